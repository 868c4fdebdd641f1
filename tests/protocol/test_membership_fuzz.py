"""Valid membership messages, mutated: at worst a fault, and never news that nobody signed."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.errors import PeerFault
from shoal.protocol.identity import Identity
from shoal.protocol.membership_events import Kind, Message, Record, State
from shoal.protocol.membership_wire import decode, encode, sign_record
from shoal.protocol.wire_pb2 import Summary, Swim

RUN = bytes(range(32))
ANN, BOB = (Identity.generate(bytes([n]) * 32) for n in range(2))
ADDRESSES = ("10.0.0.1:7", "[fd00::1]:7")
RECORDS = (
    sign_record(ANN, RUN, Record(ANN.peer_id, State.ALIVE, 2, 3, bytes(16), ADDRESSES, "", 12.5)),
    sign_record(BOB, RUN, Record(ANN.peer_id, State.DEAD, 2, 3, reporter=BOB.peer_id)),
    sign_record(ANN, RUN, Record(ANN.peer_id, State.LEFT, 2, 4, bytes(16), ADDRESSES)),
)
SUMMARY = Summary(round=5, lineage=bytes(32), state_hash=b"\1" * 32, open_round=6, samples=9, total_weight=9)
VALID = encode(Message(Kind.SYNC, 7, BOB.peer_id, RECORDS, SUMMARY)).SerializeToString()
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "repeat"]), st.integers(0, len(VALID) - 1), st.integers(1, 255)
    ),
    min_size=1,
    max_size=4,
)


def test_the_message_that_is_mutated_is_valid() -> None:
    assert decode(Swim.FromString(VALID), RUN).rumours == RECORDS


@given(EDITS)
def test_a_mutated_message_is_at_worst_a_fault_and_never_news(edits: list[tuple[str, int, int]]) -> None:
    content = bytearray(VALID)
    for edit, at, value in edits:
        at %= max(1, len(content))
        if edit == "flip" and content:
            content[at] ^= value
        elif edit == "cut":
            del content[at : at + value]
        elif edit == "insert":
            content[at:at] = bytes([value]) * (value % 9)
        else:
            content[at:at] = content[at : at + value]
    try:
        message = decode(Swim.FromString(bytes(content)), RUN)
    except DecodeError:  # the transport parses, and charges its peer
        return
    except PeerFault as fault:
        assert fault.kind in {"bad_rumour", "bad_signature", "bad_peer_id", "bad_summary"}
        return
    assert set(message.rumours) <= set(RECORDS)
