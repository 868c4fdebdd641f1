from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENCODING_UNSPECIFIED: _ClassVar[Encoding]
    SPARSE: _ClassVar[Encoding]
    DENSE: _ClassVar[Encoding]
    COMBINED: _ClassVar[Encoding]

class Exchange(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXCHANGE_UNSPECIFIED: _ClassVar[Exchange]
    RING_SPARSE: _ClassVar[Exchange]
    RING_DENSE: _ClassVar[Exchange]
    NOTHING: _ClassVar[Exchange]
ENCODING_UNSPECIFIED: Encoding
SPARSE: Encoding
DENSE: Encoding
COMBINED: Encoding
EXCHANGE_UNSPECIFIED: Exchange
RING_SPARSE: Exchange
RING_DENSE: Exchange
NOTHING: Exchange

class Signed(_message.Message):
    __slots__ = ("body", "signature")
    BODY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    signature: bytes
    def __init__(self, body: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Dot(_message.Message):
    __slots__ = ("peer", "incarnation", "seq")
    PEER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    peer: str
    incarnation: int
    seq: int
    def __init__(self, peer: _Optional[str] = ..., incarnation: _Optional[int] = ..., seq: _Optional[int] = ...) -> None: ...

class VersionEntry(_message.Message):
    __slots__ = ("peer", "incarnation", "seq", "head")
    PEER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    peer: str
    incarnation: int
    seq: int
    head: bytes
    def __init__(self, peer: _Optional[str] = ..., incarnation: _Optional[int] = ..., seq: _Optional[int] = ..., head: _Optional[bytes] = ...) -> None: ...

class UpdateHeader(_message.Message):
    __slots__ = ("dot", "previous_head", "round", "base_lineage", "weight", "encoding", "payload_hash", "payload_size", "scale")
    DOT_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_HEAD_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_LINEAGE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_HASH_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    dot: Dot
    previous_head: bytes
    round: int
    base_lineage: bytes
    weight: int
    encoding: Encoding
    payload_hash: bytes
    payload_size: int
    scale: float
    def __init__(self, dot: _Optional[_Union[Dot, _Mapping]] = ..., previous_head: _Optional[bytes] = ..., round: _Optional[int] = ..., base_lineage: _Optional[bytes] = ..., weight: _Optional[int] = ..., encoding: _Optional[_Union[Encoding, str]] = ..., payload_hash: _Optional[bytes] = ..., payload_size: _Optional[int] = ..., scale: _Optional[float] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "run_id", "dialer", "dialed", "nonce", "boot_id", "incarnation", "addresses", "token_id")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    DIALER_FIELD_NUMBER: _ClassVar[int]
    DIALED_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run_id: bytes
    dialer: str
    dialed: str
    nonce: bytes
    boot_id: bytes
    incarnation: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    token_id: bytes
    def __init__(self, protocol: _Optional[int] = ..., run_id: _Optional[bytes] = ..., dialer: _Optional[str] = ..., dialed: _Optional[str] = ..., nonce: _Optional[bytes] = ..., boot_id: _Optional[bytes] = ..., incarnation: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., token_id: _Optional[bytes] = ...) -> None: ...

class Challenge(_message.Message):
    __slots__ = ("nonce", "boot_id", "incarnation", "proof", "admission")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    boot_id: bytes
    incarnation: int
    proof: bytes
    admission: bytes
    def __init__(self, nonce: _Optional[bytes] = ..., boot_id: _Optional[bytes] = ..., incarnation: _Optional[int] = ..., proof: _Optional[bytes] = ..., admission: _Optional[bytes] = ...) -> None: ...

class Proof(_message.Message):
    __slots__ = ("proof", "admission")
    PROOF_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    proof: bytes
    admission: bytes
    def __init__(self, proof: _Optional[bytes] = ..., admission: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("session", "incarnation_known", "seq_known", "admission_key", "addresses", "observed")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_KNOWN_FIELD_NUMBER: _ClassVar[int]
    SEQ_KNOWN_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_KEY_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    incarnation_known: int
    seq_known: int
    admission_key: bytes
    addresses: _containers.RepeatedScalarFieldContainer[str]
    observed: str
    def __init__(self, session: _Optional[bytes] = ..., incarnation_known: _Optional[int] = ..., seq_known: _Optional[int] = ..., admission_key: _Optional[bytes] = ..., addresses: _Optional[_Iterable[str]] = ..., observed: _Optional[str] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason", "theirs", "todo")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Refusal.Reason]
        WRONG_PROTOCOL: _ClassVar[Refusal.Reason]
        WRONG_RUN: _ClassVar[Refusal.Reason]
        WRONG_PEER: _ClassVar[Refusal.Reason]
        NOT_ADMITTED: _ClassVar[Refusal.Reason]
        BANNED: _ClassVar[Refusal.Reason]
        IDENTITY_IN_USE: _ClassVar[Refusal.Reason]
        BUSY: _ClassVar[Refusal.Reason]
        BAD_PROOF: _ClassVar[Refusal.Reason]
    REASON_UNSPECIFIED: Refusal.Reason
    WRONG_PROTOCOL: Refusal.Reason
    WRONG_RUN: Refusal.Reason
    WRONG_PEER: Refusal.Reason
    NOT_ADMITTED: Refusal.Reason
    BANNED: Refusal.Reason
    IDENTITY_IN_USE: Refusal.Reason
    BUSY: Refusal.Reason
    BAD_PROOF: Refusal.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    THEIRS_FIELD_NUMBER: _ClassVar[int]
    TODO_FIELD_NUMBER: _ClassVar[int]
    reason: Refusal.Reason
    theirs: str
    todo: str
    def __init__(self, reason: _Optional[_Union[Refusal.Reason, str]] = ..., theirs: _Optional[str] = ..., todo: _Optional[str] = ...) -> None: ...

class MemberRecord(_message.Message):
    __slots__ = ("peer", "state", "incarnation", "counter", "boot_id", "addresses", "reporter", "samples_per_s")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[MemberRecord.State]
        ALIVE: _ClassVar[MemberRecord.State]
        SUSPECT: _ClassVar[MemberRecord.State]
        DEAD: _ClassVar[MemberRecord.State]
        LEFT: _ClassVar[MemberRecord.State]
    STATE_UNSPECIFIED: MemberRecord.State
    ALIVE: MemberRecord.State
    SUSPECT: MemberRecord.State
    DEAD: MemberRecord.State
    LEFT: MemberRecord.State
    PEER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    REPORTER_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    peer: str
    state: MemberRecord.State
    incarnation: int
    counter: int
    boot_id: bytes
    addresses: _containers.RepeatedScalarFieldContainer[str]
    reporter: str
    samples_per_s: float
    def __init__(self, peer: _Optional[str] = ..., state: _Optional[_Union[MemberRecord.State, str]] = ..., incarnation: _Optional[int] = ..., counter: _Optional[int] = ..., boot_id: _Optional[bytes] = ..., addresses: _Optional[_Iterable[str]] = ..., reporter: _Optional[str] = ..., samples_per_s: _Optional[float] = ...) -> None: ...

class Swim(_message.Message):
    __slots__ = ("kind", "nonce", "target", "rumours", "summary")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Swim.Kind]
        PING: _ClassVar[Swim.Kind]
        ACK: _ClassVar[Swim.Kind]
        PING_REQ: _ClassVar[Swim.Kind]
        NACK: _ClassVar[Swim.Kind]
        SYNC: _ClassVar[Swim.Kind]
        SYNC_REPLY: _ClassVar[Swim.Kind]
    KIND_UNSPECIFIED: Swim.Kind
    PING: Swim.Kind
    ACK: Swim.Kind
    PING_REQ: Swim.Kind
    NACK: Swim.Kind
    SYNC: Swim.Kind
    SYNC_REPLY: Swim.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    RUMOURS_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    kind: Swim.Kind
    nonce: int
    target: str
    rumours: _containers.RepeatedCompositeFieldContainer[Signed]
    summary: Summary
    def __init__(self, kind: _Optional[_Union[Swim.Kind, str]] = ..., nonce: _Optional[int] = ..., target: _Optional[str] = ..., rumours: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ..., summary: _Optional[_Union[Summary, _Mapping]] = ...) -> None: ...

class Summary(_message.Message):
    __slots__ = ("round", "lineage", "state_hash", "open_round", "samples", "total_weight")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STATE_HASH_FIELD_NUMBER: _ClassVar[int]
    OPEN_ROUND_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    round: int
    lineage: bytes
    state_hash: bytes
    open_round: int
    samples: int
    total_weight: int
    def __init__(self, round: _Optional[int] = ..., lineage: _Optional[bytes] = ..., state_hash: _Optional[bytes] = ..., open_round: _Optional[int] = ..., samples: _Optional[int] = ..., total_weight: _Optional[int] = ...) -> None: ...

class Convene(_message.Message):
    __slots__ = ("round", "base_lineage", "attempt", "reason")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_LINEAGE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    round: int
    base_lineage: bytes
    attempt: int
    reason: str
    def __init__(self, round: _Optional[int] = ..., base_lineage: _Optional[bytes] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("peer", "round", "base_lineage", "attempt", "header", "voted_attempt", "voted_value", "state_hash", "observer")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_LINEAGE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    VOTED_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    VOTED_VALUE_FIELD_NUMBER: _ClassVar[int]
    STATE_HASH_FIELD_NUMBER: _ClassVar[int]
    OBSERVER_FIELD_NUMBER: _ClassVar[int]
    peer: str
    round: int
    base_lineage: bytes
    attempt: int
    header: Signed
    voted_attempt: int
    voted_value: bytes
    state_hash: bytes
    observer: bool
    def __init__(self, peer: _Optional[str] = ..., round: _Optional[int] = ..., base_lineage: _Optional[bytes] = ..., attempt: _Optional[int] = ..., header: _Optional[_Union[Signed, _Mapping]] = ..., voted_attempt: _Optional[int] = ..., voted_value: _Optional[bytes] = ..., state_hash: _Optional[bytes] = ..., observer: bool = ...) -> None: ...

class RosterEntry(_message.Message):
    __slots__ = ("peer", "header")
    PEER_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    peer: str
    header: Signed
    def __init__(self, peer: _Optional[str] = ..., header: _Optional[_Union[Signed, _Mapping]] = ...) -> None: ...

class Roster(_message.Message):
    __slots__ = ("convener", "round", "base_lineage", "attempt", "entries", "joiners", "exchange", "reason", "bound_value")
    CONVENER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_LINEAGE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    JOINERS_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BOUND_VALUE_FIELD_NUMBER: _ClassVar[int]
    convener: str
    round: int
    base_lineage: bytes
    attempt: int
    entries: _containers.RepeatedCompositeFieldContainer[RosterEntry]
    joiners: _containers.RepeatedScalarFieldContainer[str]
    exchange: Exchange
    reason: str
    bound_value: bytes
    def __init__(self, convener: _Optional[str] = ..., round: _Optional[int] = ..., base_lineage: _Optional[bytes] = ..., attempt: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[RosterEntry, _Mapping]]] = ..., joiners: _Optional[_Iterable[str]] = ..., exchange: _Optional[_Union[Exchange, str]] = ..., reason: _Optional[str] = ..., bound_value: _Optional[bytes] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("peer", "round", "base_lineage", "attempt", "update_hashes", "chunk_hashes")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_LINEAGE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_HASHES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_HASHES_FIELD_NUMBER: _ClassVar[int]
    peer: str
    round: int
    base_lineage: bytes
    attempt: int
    update_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    chunk_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, peer: _Optional[str] = ..., round: _Optional[int] = ..., base_lineage: _Optional[bytes] = ..., attempt: _Optional[int] = ..., update_hashes: _Optional[_Iterable[bytes]] = ..., chunk_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ("round", "base_lineage", "previous_state_hash", "updates", "roster", "joiners", "exchange", "chunk_hashes", "split", "ring")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_LINEAGE_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_STATE_HASH_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    JOINERS_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_HASHES_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    RING_FIELD_NUMBER: _ClassVar[int]
    round: int
    base_lineage: bytes
    previous_state_hash: bytes
    updates: _containers.RepeatedCompositeFieldContainer[CommittedUpdate]
    roster: _containers.RepeatedScalarFieldContainer[str]
    joiners: _containers.RepeatedScalarFieldContainer[str]
    exchange: Exchange
    chunk_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    split: bool
    ring: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, round: _Optional[int] = ..., base_lineage: _Optional[bytes] = ..., previous_state_hash: _Optional[bytes] = ..., updates: _Optional[_Iterable[_Union[CommittedUpdate, _Mapping]]] = ..., roster: _Optional[_Iterable[str]] = ..., joiners: _Optional[_Iterable[str]] = ..., exchange: _Optional[_Union[Exchange, str]] = ..., chunk_hashes: _Optional[_Iterable[bytes]] = ..., split: bool = ..., ring: _Optional[_Iterable[str]] = ...) -> None: ...

class CommittedUpdate(_message.Message):
    __slots__ = ("dot", "update_hash", "weight")
    DOT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_HASH_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    dot: Dot
    update_hash: bytes
    weight: int
    def __init__(self, dot: _Optional[_Union[Dot, _Mapping]] = ..., update_hash: _Optional[bytes] = ..., weight: _Optional[int] = ...) -> None: ...

class Propose(_message.Message):
    __slots__ = ("convener", "round", "base_lineage", "attempt", "value")
    CONVENER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_LINEAGE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    convener: str
    round: int
    base_lineage: bytes
    attempt: int
    value: bytes
    def __init__(self, convener: _Optional[str] = ..., round: _Optional[int] = ..., base_lineage: _Optional[bytes] = ..., attempt: _Optional[int] = ..., value: _Optional[bytes] = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("peer", "round", "base_lineage", "attempt", "value_hash", "split")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_LINEAGE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    VALUE_HASH_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    peer: str
    round: int
    base_lineage: bytes
    attempt: int
    value_hash: bytes
    split: bool
    def __init__(self, peer: _Optional[str] = ..., round: _Optional[int] = ..., base_lineage: _Optional[bytes] = ..., attempt: _Optional[int] = ..., value_hash: _Optional[bytes] = ..., split: bool = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("attempt", "value", "votes")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    VOTES_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    value: bytes
    votes: _containers.RepeatedCompositeFieldContainer[Signed]
    def __init__(self, attempt: _Optional[int] = ..., value: _Optional[bytes] = ..., votes: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ...) -> None: ...

class Envelope(_message.Message):
    __slots__ = ("swim", "convene", "join", "roster", "holding", "propose", "vote", "commit", "commit_request", "ban", "gossip_news", "ring_request", "ring_draw", "ring_place", "seal_request", "seal")
    SWIM_FIELD_NUMBER: _ClassVar[int]
    CONVENE_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_REQUEST_FIELD_NUMBER: _ClassVar[int]
    BAN_FIELD_NUMBER: _ClassVar[int]
    GOSSIP_NEWS_FIELD_NUMBER: _ClassVar[int]
    RING_REQUEST_FIELD_NUMBER: _ClassVar[int]
    RING_DRAW_FIELD_NUMBER: _ClassVar[int]
    RING_PLACE_FIELD_NUMBER: _ClassVar[int]
    SEAL_REQUEST_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    swim: Swim
    convene: Convene
    join: Signed
    roster: Signed
    holding: Holding
    propose: Signed
    vote: Signed
    commit: Commit
    commit_request: CommitRequest
    ban: BanNotice
    gossip_news: GossipNews
    ring_request: RingRequest
    ring_draw: RingDraw
    ring_place: RingPlace
    seal_request: SealRequest
    seal: Signed
    def __init__(self, swim: _Optional[_Union[Swim, _Mapping]] = ..., convene: _Optional[_Union[Convene, _Mapping]] = ..., join: _Optional[_Union[Signed, _Mapping]] = ..., roster: _Optional[_Union[Signed, _Mapping]] = ..., holding: _Optional[_Union[Holding, _Mapping]] = ..., propose: _Optional[_Union[Signed, _Mapping]] = ..., vote: _Optional[_Union[Signed, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., commit_request: _Optional[_Union[CommitRequest, _Mapping]] = ..., ban: _Optional[_Union[BanNotice, _Mapping]] = ..., gossip_news: _Optional[_Union[GossipNews, _Mapping]] = ..., ring_request: _Optional[_Union[RingRequest, _Mapping]] = ..., ring_draw: _Optional[_Union[RingDraw, _Mapping]] = ..., ring_place: _Optional[_Union[RingPlace, _Mapping]] = ..., seal_request: _Optional[_Union[SealRequest, _Mapping]] = ..., seal: _Optional[_Union[Signed, _Mapping]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("after_round", "lineage")
    AFTER_ROUND_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    after_round: int
    lineage: bytes
    def __init__(self, after_round: _Optional[int] = ..., lineage: _Optional[bytes] = ...) -> None: ...

class GossipNews(_message.Message):
    __slots__ = ("tops",)
    TOPS_FIELD_NUMBER: _ClassVar[int]
    tops: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, tops: _Optional[_Iterable[bytes]] = ...) -> None: ...

class RingRequest(_message.Message):
    __slots__ = ("round", "nonce")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    round: int
    nonce: bytes
    def __init__(self, round: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class RingDraw(_message.Message):
    __slots__ = ("round", "drawer", "peers", "members")
    class RingMember(_message.Message):
        __slots__ = ("peer", "nonce")
        PEER_FIELD_NUMBER: _ClassVar[int]
        NONCE_FIELD_NUMBER: _ClassVar[int]
        peer: str
        nonce: bytes
        def __init__(self, peer: _Optional[str] = ..., nonce: _Optional[bytes] = ...) -> None: ...
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DRAWER_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    round: int
    drawer: str
    peers: int
    members: _containers.RepeatedCompositeFieldContainer[RingDraw.RingMember]
    def __init__(self, round: _Optional[int] = ..., drawer: _Optional[str] = ..., peers: _Optional[int] = ..., members: _Optional[_Iterable[_Union[RingDraw.RingMember, _Mapping]]] = ...) -> None: ...

class RingPlace(_message.Message):
    __slots__ = ("nonce", "lineage", "samples")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    lineage: bytes
    samples: int
    def __init__(self, nonce: _Optional[bytes] = ..., lineage: _Optional[bytes] = ..., samples: _Optional[int] = ...) -> None: ...

class SealRequest(_message.Message):
    __slots__ = ("lineage", "dot")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    DOT_FIELD_NUMBER: _ClassVar[int]
    lineage: bytes
    dot: Dot
    def __init__(self, lineage: _Optional[bytes] = ..., dot: _Optional[_Union[Dot, _Mapping]] = ...) -> None: ...

class Seal(_message.Message):
    __slots__ = ("peer", "lineage", "value_hash", "sum_hash", "dot")
    PEER_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    VALUE_HASH_FIELD_NUMBER: _ClassVar[int]
    SUM_HASH_FIELD_NUMBER: _ClassVar[int]
    DOT_FIELD_NUMBER: _ClassVar[int]
    peer: str
    lineage: bytes
    value_hash: bytes
    sum_hash: bytes
    dot: Dot
    def __init__(self, peer: _Optional[str] = ..., lineage: _Optional[bytes] = ..., value_hash: _Optional[bytes] = ..., sum_hash: _Optional[bytes] = ..., dot: _Optional[_Union[Dot, _Mapping]] = ...) -> None: ...

class CombinedUpdate(_message.Message):
    __slots__ = ("draw", "value", "counted", "sum", "seals")
    DRAW_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    SEALS_FIELD_NUMBER: _ClassVar[int]
    draw: bytes
    value: bytes
    counted: bytes
    sum: bytes
    seals: _containers.RepeatedCompositeFieldContainer[Signed]
    def __init__(self, draw: _Optional[bytes] = ..., value: _Optional[bytes] = ..., counted: _Optional[bytes] = ..., sum: _Optional[bytes] = ..., seals: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ...) -> None: ...

class BanNotice(_message.Message):
    __slots__ = ("peer", "reason", "first", "second")
    PEER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SECOND_FIELD_NUMBER: _ClassVar[int]
    peer: str
    reason: str
    first: Signed
    second: Signed
    def __init__(self, peer: _Optional[str] = ..., reason: _Optional[str] = ..., first: _Optional[_Union[Signed, _Mapping]] = ..., second: _Optional[_Union[Signed, _Mapping]] = ...) -> None: ...

class PushHello(_message.Message):
    __slots__ = ("round", "base_lineage", "attempt")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_LINEAGE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    round: int
    base_lineage: bytes
    attempt: int
    def __init__(self, round: _Optional[int] = ..., base_lineage: _Optional[bytes] = ..., attempt: _Optional[int] = ...) -> None: ...

class PushHave(_message.Message):
    __slots__ = ("update_hashes",)
    UPDATE_HASHES_FIELD_NUMBER: _ClassVar[int]
    update_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, update_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class UpdateStart(_message.Message):
    __slots__ = ("header", "payload_size", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: Signed
    payload_size: int
    payload: bytes
    def __init__(self, header: _Optional[_Union[Signed, _Mapping]] = ..., payload_size: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Updates(_message.Message):
    __slots__ = ("updates",)
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    updates: _containers.RepeatedCompositeFieldContainer[UpdateStart]
    def __init__(self, updates: _Optional[_Iterable[_Union[UpdateStart, _Mapping]]] = ...) -> None: ...

class PushDone(_message.Message):
    __slots__ = ("received",)
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    received: int
    def __init__(self, received: _Optional[int] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("update_hashes",)
    UPDATE_HASHES_FIELD_NUMBER: _ClassVar[int]
    update_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, update_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class DenseHello(_message.Message):
    __slots__ = ("round", "base_lineage", "attempt")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_LINEAGE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    round: int
    base_lineage: bytes
    attempt: int
    def __init__(self, round: _Optional[int] = ..., base_lineage: _Optional[bytes] = ..., attempt: _Optional[int] = ...) -> None: ...

class DenseChunk(_message.Message):
    __slots__ = ("hop", "chunk", "payload_size")
    HOP_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    hop: int
    chunk: int
    payload_size: int
    def __init__(self, hop: _Optional[int] = ..., chunk: _Optional[int] = ..., payload_size: _Optional[int] = ...) -> None: ...

class StateRequest(_message.Message):
    __slots__ = ("round", "lineage", "chunks")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    round: int
    lineage: bytes
    chunks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, round: _Optional[int] = ..., lineage: _Optional[bytes] = ..., chunks: _Optional[_Iterable[int]] = ...) -> None: ...

class StateOffer(_message.Message):
    __slots__ = ("round", "lineage", "state_hash", "size", "chunk_size", "chunk_hashes", "commit")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STATE_HASH_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_SIZE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_HASHES_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    round: int
    lineage: bytes
    state_hash: bytes
    size: int
    chunk_size: int
    chunk_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    commit: Commit
    def __init__(self, round: _Optional[int] = ..., lineage: _Optional[bytes] = ..., state_hash: _Optional[bytes] = ..., size: _Optional[int] = ..., chunk_size: _Optional[int] = ..., chunk_hashes: _Optional[_Iterable[bytes]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ...) -> None: ...

class StateChunk(_message.Message):
    __slots__ = ("index", "payload_size")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    index: int
    payload_size: int
    def __init__(self, index: _Optional[int] = ..., payload_size: _Optional[int] = ...) -> None: ...

class ManifestRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ManifestReply(_message.Message):
    __slots__ = ("manifest", "base_hash", "layout_hash", "genesis")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    BASE_HASH_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    GENESIS_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    base_hash: bytes
    layout_hash: bytes
    genesis: Signed
    def __init__(self, manifest: _Optional[bytes] = ..., base_hash: _Optional[bytes] = ..., layout_hash: _Optional[bytes] = ..., genesis: _Optional[_Union[Signed, _Mapping]] = ...) -> None: ...

class GossipStart(_message.Message):
    __slots__ = ("hello_size",)
    HELLO_SIZE_FIELD_NUMBER: _ClassVar[int]
    hello_size: int
    def __init__(self, hello_size: _Optional[int] = ...) -> None: ...

class GossipHello(_message.Message):
    __slots__ = ("entries", "frontier", "view", "limits", "base", "total_weight", "state_hash", "floor_hash")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    FRONTIER_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    STATE_HASH_FIELD_NUMBER: _ClassVar[int]
    FLOOR_HASH_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedScalarFieldContainer[bytes]
    frontier: _containers.RepeatedScalarFieldContainer[bytes]
    view: StabilityView
    limits: _containers.RepeatedCompositeFieldContainer[ChainLimit]
    base: bytes
    total_weight: int
    state_hash: bytes
    floor_hash: bytes
    def __init__(self, entries: _Optional[_Iterable[bytes]] = ..., frontier: _Optional[_Iterable[bytes]] = ..., view: _Optional[_Union[StabilityView, _Mapping]] = ..., limits: _Optional[_Iterable[_Union[ChainLimit, _Mapping]]] = ..., base: _Optional[bytes] = ..., total_weight: _Optional[int] = ..., state_hash: _Optional[bytes] = ..., floor_hash: _Optional[bytes] = ...) -> None: ...

class ChainLimit(_message.Message):
    __slots__ = ("peer", "incarnation", "seq")
    PEER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    peer: str
    incarnation: int
    seq: int
    def __init__(self, peer: _Optional[str] = ..., incarnation: _Optional[int] = ..., seq: _Optional[int] = ...) -> None: ...

class StabilityView(_message.Message):
    __slots__ = ("epoch", "entries", "holders", "others", "settled")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    entries: _containers.RepeatedScalarFieldContainer[bytes]
    holders: bytes
    others: _containers.RepeatedScalarFieldContainer[str]
    settled: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, epoch: _Optional[int] = ..., entries: _Optional[_Iterable[bytes]] = ..., holders: _Optional[bytes] = ..., others: _Optional[_Iterable[str]] = ..., settled: _Optional[_Iterable[bytes]] = ...) -> None: ...

class GossipWant(_message.Message):
    __slots__ = ("ranges", "concurrent_weight")
    class Range(_message.Message):
        __slots__ = ("peer", "incarnation", "first", "last")
        PEER_FIELD_NUMBER: _ClassVar[int]
        INCARNATION_FIELD_NUMBER: _ClassVar[int]
        FIRST_FIELD_NUMBER: _ClassVar[int]
        LAST_FIELD_NUMBER: _ClassVar[int]
        peer: str
        incarnation: int
        first: int
        last: int
        def __init__(self, peer: _Optional[str] = ..., incarnation: _Optional[int] = ..., first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...
    RANGES_FIELD_NUMBER: _ClassVar[int]
    CONCURRENT_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[GossipWant.Range]
    concurrent_weight: int
    def __init__(self, ranges: _Optional[_Iterable[_Union[GossipWant.Range, _Mapping]]] = ..., concurrent_weight: _Optional[int] = ...) -> None: ...

class Genesis(_message.Message):
    __slots__ = ("founder", "state_hash", "lineage")
    FOUNDER_FIELD_NUMBER: _ClassVar[int]
    STATE_HASH_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    founder: str
    state_hash: bytes
    lineage: bytes
    def __init__(self, founder: _Optional[str] = ..., state_hash: _Optional[bytes] = ..., lineage: _Optional[bytes] = ...) -> None: ...

class TokenUse(_message.Message):
    __slots__ = ("token_id", "peer", "used")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    token_id: bytes
    peer: str
    used: bool
    def __init__(self, token_id: _Optional[bytes] = ..., peer: _Optional[str] = ..., used: bool = ...) -> None: ...

class JudgeRequest(_message.Message):
    __slots__ = ("payload_size", "seconds")
    PAYLOAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    payload_size: int
    seconds: float
    def __init__(self, payload_size: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class JudgeGroups(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[JudgeGroup]
    def __init__(self, groups: _Optional[_Iterable[_Union[JudgeGroup, _Mapping]]] = ...) -> None: ...

class JudgeGroup(_message.Message):
    __slots__ = ("prompt", "completions")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    completions: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, prompt: _Optional[str] = ..., completions: _Optional[_Iterable[str]] = ...) -> None: ...

class JudgeReply(_message.Message):
    __slots__ = ("scores", "refusal")
    SCORES_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    refusal: str
    def __init__(self, scores: _Optional[_Iterable[float]] = ..., refusal: _Optional[str] = ...) -> None: ...
