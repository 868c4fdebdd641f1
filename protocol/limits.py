"""Every limit on what a peer may send or make us keep: name, value, unit, why.

Times that are policy (probe interval, deadlines) live with their owners; here are only the hard bounds.
"""

from __future__ import annotations

from typing import Final

PROTOCOL_VERSION: Final = 1

# --- frames -----------------------------------------------------------------------------------------------------------
# One frame of a stream. 256 KiB … 4 MiB are equally fast over TLS, so the smallest keeps pre-admission memory low.
FRAME_BYTES_MAX: Final = 256 * 1024
# A raw payload frame leaves room for protobuf framing in the same gRPC message.
PAYLOAD_FRAME_BYTES: Final = 192 * 1024
# Handshake frames: the largest honest one (Hello with eight addresses) is under 1 KiB.
HANDSHAKE_FRAME_BYTES_MAX: Final = 4 * 1024
# Handshakes in progress at once; the next caller is told BUSY. 16 × FRAME_BYTES_MAX bounds a stranger's memory to 4 MiB.
HANDSHAKES_AT_ONCE_MAX: Final = 16
# One host may hold this many of the places for handshakes, so that it cannot keep everybody else out.
HANDSHAKES_PER_HOST_MAX: Final = HANDSHAKES_AT_ONCE_MAX // 2
# A handshake needs two round trips and one signature each; a slower one is a slot held open on purpose.
HANDSHAKE_SECONDS_MAX: Final = 10.0

# --- connections ------------------------------------------------------------------------------------------------------
# Connections that one peer dialed and keeps; beyond it those unused for longest are closed, and dialed again when needed.
# Twice as many as a large swarm's neighbours (overlay.py) with those that exchanges and rounds need now and then.
CONNECTIONS_KEPT_MAX: Final = 128
# Connections that others have opened at once, strangers among them. One that finished TLS and says nothing takes ~70 KiB and
# is closed after the idle time; one that does not finish TLS is closed after HANDSHAKE_SECONDS_MAX.
CONNECTIONS_INCOMING_MAX: Final = 4096
CONNECTION_IDLE_MS: Final = 60_000
CONNECTION_IDLE_SECONDS_MIN: Final = 10.0  # one used since is not closed for that
STREAMS_PER_CONNECTION_MAX: Final = 64
SESSIONS_MAX: Final = 4096  # ~100 B each; oldest idle one goes first
# Sessions of one peer: an old connection may end after the new one began, more is a peer pushing others' sessions out.
SESSIONS_PER_PEER_MAX: Final = 4
# Keepalive, the same numbers on both ends, or the server answers GOAWAY too_many_pings.
KEEPALIVE_TIME_MS: Final = 10_000
KEEPALIVE_TIMEOUT_MS: Final = 5_000
OBSERVERS_MAX: Final = 32  # peers whose word on our own address is kept
NEARBY_MAX: Final = 256  # peers that discovery found and that are still to be tried; the one heard of longest ago goes
RECONNECT_BACKOFF_SECONDS_MAX: Final = 15.0  # a partition that heals is noticed within this
# Faults that no honest peer makes (conduct.py), by one peer in the window, before it is banned here. A flipped bit is an
# accident, even twice. A peer that we disconnect dials again at once, so a broken one gets there within seconds; ten
# minutes are so long that making a fault every minute is no way around it.
FAULTS_BEFORE_BAN: Final = 8
FAULT_WINDOW_SECONDS: Final = 600.0
# Evidence of a ban: two signed headers are about 1 KiB; a frame's worth of it for every ban would be a gigabyte.
EVIDENCE_BYTES_MAX: Final = 8 * 1024

# --- messages ---------------------------------------------------------------------------------------------------------
MESSAGE_BYTES_MAX: Final = FRAME_BYTES_MAX  # one Envelope
MESSAGE_QUEUE_MAX: Final = 1024  # per peer, outgoing; the oldest is dropped: every sender repeats what matters
PEER_ID_CHARS_MAX: Final = 64  # "12D3Koo…" has 52
ADDRESS_CHARS_MAX: Final = 262  # DNS name (253) ":" port, brackets of IPv6
ADDRESSES_MAX: Final = 8
REASON_CHARS_MAX: Final = 512
RUMOURS_PER_MESSAGE_MAX: Final = 64
MEMBERS_MAX: Final = 4096
LINKS_MAX: Final = 2 * MEMBERS_MAX  # peers that addresses and counters are kept of
CHARGED_MAX: Final = 2 * MEMBERS_MAX  # peers whose faults are counted one by one; the rest only in the sum
BINDINGS_MAX: Final = MEMBERS_MAX  # tokens whose first user is known here; and as many from hearsay
# All members of the largest usual ring are asked who uses a token. In a larger swarm all ask the same ones.
TOKEN_ASKED_MAX: Final = 64
# The largest honest record has ADDRESSES_MAX addresses of ADDRESS_CHARS_MAX; records are kept and passed on as they came,
# so what is appended to one in fields that nobody knows would be kept by everybody. RUMOURS_PER_MESSAGE_MAX of them, with
# their signatures, fit into MESSAGE_BYTES_MAX.
MEMBER_RECORD_BYTES_MAX: Final = ADDRESSES_MAX * (ADDRESS_CHARS_MAX + 3) + 256
INTRODUCTIONS_MAX: Final = 64  # first contacts whose answer is awaited at once
CORRECTIONS_MAX: Final = 8  # newer words sent back with one message
# One record is told many times by many: it is decoded and verified once. At the largest size they are 20 MiB.
MEMBER_RECORDS_KEPT_MAX: Final = 8192
# Pings made for others at once: for one asker, and for all. An honest asker has one probe under way.
RELAYS_PER_PEER_MAX: Final = 8
RELAYS_MAX: Final = 1024
SIGNATURES_KEPT_MAX: Final = 16_384  # verified: rumours and headers are seen many times; 32 bytes each
GOSSIP_HELLO_BYTES_MAX: Final = 5 * MEMBERS_MAX * 160  # five lists of MEMBERS_MAX entries of a chain each
SIGNED_BODY_BYTES_MAX: Final = FRAME_BYTES_MAX
HEADER_BYTES_MAX: Final = 512  # a signed UpdateHeader is ~260 B
# One header arrives from several peers, and again with proofs: it is decoded and verified once. At the largest size 12 MiB.
HEADERS_DECODED_MAX: Final = 8192

# --- finding peers ----------------------------------------------------------------------------------------------------
INVITE_CHARS_MAX: Final = 8192
CACHE_PEERS_MAX: Final = 256  # peers met before, on disk
CACHE_BYTES_MAX: Final = (
    1024 * 1024
)  # a full cache with the longest addresses is well below this; a larger file is not ours
DHT_RECORD_BYTES_MAX: Final = 4096
# Peers taken from one answer, drawn by chance from all in it, since anybody may store records of peers that are none. A few
# real ones are enough to get in; a quarter of NEARBY_MAX, so that one flood does not push out what was found elsewhere.
DHT_RECORDS_MAX: Final = NEARBY_MAX // 4
DHT_CHECKED_MAX: Final = 1024  # records whose signature is checked for that; 0.1 ms each
LAN_FOUND_MAX: Final = MEMBERS_MAX
LAN_LOOKUPS_MAX: Final = 64  # at once; a name that found no place is heard of again when its announcement is renewed

# --- rounds -----------------------------------------------------------------------------------------------------------
ROSTER_MAX: Final = 256  # peers in one ring; the manifest's ring_size_max is lower
ATTEMPTS_MAX: Final = 1_000_000  # an attempt number above this is nonsense
CHUNKS_MAX: Final = ROSTER_MAX
# Messages of the open round that wait for the ballot, which waits for the disk; in all, and an eighth of it of one sender.
# Senders repeat what is not answered. A decoded message takes a few times its bytes.
BALLOT_MESSAGES_MAX: Final = 4096
BALLOT_BYTES_MAX: Final = 32 * 1024**2
# Those of the next round that arrive while this one is being applied, likewise. A few are enough.
EARLY_MESSAGES_MAX: Final = 512
EARLY_BYTES_MAX: Final = 8 * 1024**2
COMMIT_RECORDS_KEPT: Final = 1000  # rounds; the fork point of a longer partition is unknown and a person decides
# All of them, encoded. A commit of 64 peers is ~25 KiB, so that of the largest rings fewer than 1,000 are kept and handed on.
# As many bytes again of other branches.
COMMIT_RECORDS_BYTES_MAX: Final = 64 * 1024**2
COMMITS_PER_REPLY_MAX: Final = 32
WEIGHT_MAX: Final = 2**40  # a claimed weight above this is nonsense
# Updates of later rounds that are fetched along with those of a round that is caught up with.
AHEAD_BYTES_MAX: Final = 16 * 1024**2
SPLITS_KEPT: Final = 8  # split commits held back at once; each needs a split of its own, more mean a broken network

# --- payloads and state -----------------------------------------------------------------------------------------------
UPDATE_BYTES_MAX: Final = 4 * 1024**3  # the codec's own bound from d is tighter; this one bounds a header's claim
UPDATES_HELD_BYTES_MAX: Final = 4 * 1024**3  # verified updates kept for repairs; on disk beyond 64 MiB
UPDATES_MEMORY_BYTES_MAX: Final = 64 * 1024**2  # of them in memory, and of decoded ones in gossip mode as much again
# Headers remembered longer than their payloads, to find two under one name. ~1 KiB each; a full ring's over many rounds.
HEADERS_KEPT_MAX: Final = 16 * ROSTER_MAX
STATE_CHUNK_BYTES: Final = 1024 * 1024
STATE_BYTES_MAX: Final = 256 * 1024**3
# Hashes of many more would not fit into one frame beside a commit of the largest ring; larger states have larger chunks.
STATE_CHUNKS_MAX: Final = 2048
# The newest state and this many less one that are being downloaded. Each may hold 8 bytes per parameter.
SNAPSHOTS_MAX: Final = 3
MANIFEST_BYTES_MAX: Final = 64 * 1024

# --- gossip -----------------------------------------------------------------------------------------------------------
GOSSIP_EXCHANGES_MAX: Final = (
    4  # exchanges and fetches that we open at once; what others open is bounded by their number
)
# Bytes of updates that one exchange brings at most in each direction; the rest comes with the next.
GOSSIP_EXCHANGE_BYTES_MAX: Final = 64 * 1024**2
GOSSIP_NEWS_MAX: Final = 1024  # chains that one message of news names; the rest comes with the next exchange

# --- judging ----------------------------------------------------------------------------------------------------------
JUDGE_BYTES_MAX: Final = 8 * 1024**2  # prompts and completions of one request: 1,000 completions of 8 KiB
JUDGE_COMPLETIONS_MAX: Final = 4096  # in one request; their scores fit into one frame
JUDGE_REQUESTS_MAX: Final = 8  # waiting or worked on, one of each peer; with the two above 64 MiB
JUDGES_MAX: Final = MEMBERS_MAX  # judges whose past agreement is remembered; the one heard of longest ago goes
JUDGE_SECONDS_MAX: Final = 600.0  # an asker that claims to wait longer is not believed

INT64_MAX: Final = 2**63 - 1
