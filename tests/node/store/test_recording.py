"""The recording: what is written is read, once; a torn tail, a full one and a new start lose nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shoal.node.store.journal import OwnUpdate
from shoal.node.store.recording import Recording, read_recording
from shoal.protocol.version import Dot
from shoal.protocol.wire_pb2 import Signed

NOTHING = np.zeros(1)


def update(seq: int) -> OwnUpdate:
    signed = Signed(body=b"header %d" % seq).SerializeToString()
    return OwnUpdate(Dot("p", 1, seq), seq, b"base", signed, b"payload %d" % seq, b"head", NOTHING, NOTHING)


def test_records_come_back_once_each_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    one = Recording(path, 10_000, warn=AssertionError)
    one.update(update(1))
    one.commit(b"a commit")
    one.close()
    path.write_bytes(path.read_bytes() + b"\0\0\0\x09\1torn")  # the process died in the middle of a record
    again = Recording(path, 10_000, warn=AssertionError)
    again.update(update(1))
    again.update(update(2))
    again.close()
    found = read_recording(path.read_bytes())
    assert [u.payload for u in found.updates] == [b"payload 1", b"payload 2"]
    assert found.updates[0].header.body == b"header 1"
    assert found.commits == (b"a commit",)


def test_a_full_recording_ends_and_says_so_once(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "recording"
    one = Recording(path, 100, warn=said.append)
    for seq in range(1, 6):
        one.update(update(seq))
    one.close()
    assert [u.payload for u in read_recording(path.read_bytes()).updates] == [b"payload 1", b"payload 2"]
    assert len(said) == 1 and "record_bytes_max" in said[0]
