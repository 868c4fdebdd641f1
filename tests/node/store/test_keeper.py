"""What a round leaves on disk is enough to go on from any checkpoint that is left: nothing learned is lost or counted twice."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.aggregation.book import Book, to_fixed
from shoal.aggregation.compress import Compression
from shoal.node.keeper import ROUNDS_KEPT, Keeper, rebook
from shoal.node.observe.recurring import Recurring
from shoal.node.quadratic import QuadraticLearner
from shoal.node.store.checkpoint import Checkpoint, Checkpoints
from shoal.node.store.commits import CommitFile
from shoal.node.store.datadir import DataDir
from shoal.node.store.journal import Journal, OwnUpdate
from shoal.node.swarm.state import SharedState
from shoal.node.swarm.updates import UpdateStore
from shoal.protocol.version import Dot, VersionVector, sha256
from shoal.sim.disk import MemoryDisk

D = 6
ROOT = Path("/p0")


def state(round_: int) -> SharedState:
    return SharedState.make(
        theta=np.full(D, round_, np.float32), outer=None, round_=round_, lineage=sha256(b"%d" % round_),
        vector=VersionVector({}), electorate=["me"], total_weight=1,
    )  # fmt: skip


class Life:
    """One process: opens what is on disk, goes on from the newest checkpoint that is whole, then lives rounds."""

    def __init__(self, disk: MemoryDisk, keep: int) -> None:
        self.said: list[tuple[str, str]] = []
        mine = disk.mount()
        data = DataDir(ROOT, mine)
        self.journal = Journal(data.journal, mine)
        if not self.journal.incarnation:
            self.journal.start_incarnation(now_wall=7.0)
        self.checkpoints = Checkpoints(data.checkpoints, keep, mine)
        found: Checkpoint | None = self.checkpoints.newest(lambda text: None)
        self.round = found.state.round if found else 0
        self.book = Book.from_arrays(found.book) if found else Book(D)
        self.fresh = rebook(self.book, self.journal.updates, lambda u: np.frombuffer(u.payload, "<f4"))
        store = UpdateStore(
            run_id=b"r" * 32,
            d=D,
            compression=Compression(0.10, 4),
            bytes_max=2**20,
            folder=data.updates,
            disk=mine,
        )
        self.keeper = Keeper(
            data=data, checkpoints=self.checkpoints, commits=CommitFile(data.commits, disk=mine), journal=self.journal,
            store=store, book=self.book, learner=QuadraticLearner(dimension=D, peer_seed=1, seed=1),  # type: ignore[arg-type]
            evaluate_every=-1, rounds_max=0, extra=dict, troubles=Recurring(self._say, lambda: 0.0),
        )  # fmt: skip

    def _say(self, text: str, *, level: str = "info", **values: Any) -> None:
        self.said.append((level, text))

    def live_round(self, *, publish: bool = True, adopt: bool = True) -> None:
        self.round += 1
        self.book.learn(delta(self.round))
        if publish:
            payload = self.book.residual_f64().astype("<f4")
            update = self.journal.say("me", self._update(payload.tobytes()))
            self.book.record(update.dot, payload)
            if adopt:
                self.book.adopt(update.dot)
        self.keeper.save(state(self.round), None, None, None, {})

    def _update(self, payload: bytes) -> Any:
        def build(dot: Dot, head: bytes) -> OwnUpdate:
            learned = self.book.parts()["learned"]
            return OwnUpdate(dot, self.round, b"b" * 32, b"signed", payload, sha256(head), delta(self.round), learned)

        return build


def delta(round_: int) -> np.ndarray:
    return np.random.default_rng(round_).normal(size=D).astype(np.float32)


def learned_up_to(round_: int) -> np.ndarray:
    return sum((to_fixed(delta(r)) for r in range(1, round_ + 1)), np.zeros(D, np.int64))


def damage(disk: MemoryDisk, count: int) -> None:
    names = disk.names(ROOT / "checkpoints")
    for name in names[len(names) - count :]:
        descriptor = disk.open(ROOT / "checkpoints" / name)
        disk.truncate(descriptor, disk.size(descriptor) - 1)
        disk.close(descriptor)


@pytest.mark.parametrize("silent", [None, 4, 5, 6])
@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_from_an_older_checkpoint_own_updates_are_booked_again(silent: int | None, damaged: int) -> None:
    """`silent`: a round whose inner steps came to no update of their own (decided without us, or a full disk)."""
    disk, rounds, keep = MemoryDisk(), 7, 3
    one = Life(disk, keep)
    for round_ in range(1, rounds + 1):
        one.live_round(publish=round_ != silent)
    before = one.book.parts()
    disk.mute()
    damage(disk, damaged)
    two = Life(disk, keep)
    assert two.round == rounds - damaged
    after = two.book.parts()
    assert np.array_equal(after["learned"], before["learned"])
    assert np.array_equal(after["learned"], learned_up_to(rounds))
    assert np.array_equal(two.book.residual(), after["learned"] - after["adopted"] - after["damped"])
    assert [u.round for u in two.fresh] == [r for r in range(rounds - damaged + 1, rounds + 1) if r != silent]
    # They come back as owed; whether the state holds them is said when it is applied.
    for update in two.fresh:
        two.book.adopt(update.dot)
    assert np.array_equal(two.book.residual(), one.book.residual())


def test_what_the_oldest_checkpoint_covers_leaves_the_journal() -> None:
    disk = MemoryDisk()
    one = Life(disk, keep=2)
    for _ in range(9):
        one.live_round()
    assert [u.round for u in one.journal.updates] == [9]
    assert one.checkpoints.oldest_round() == 8


def test_a_long_time_without_a_checkpoint_books_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for the journal's records and not for a checkpoint; then the first save covers more than a book keeps."""

    def full(self: Checkpoints, checkpoint: Checkpoint) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    disk = MemoryDisk()
    one = Life(disk, keep=2)
    one.live_round()
    monkeypatch.setattr(Checkpoints, "save", full)
    for _ in range(ROUNDS_KEPT + 8):
        one.live_round()
    assert one.keeper.trouble and ("error" in {level for level, _ in one.said})
    monkeypatch.undo()
    one.live_round()
    assert not one.keeper.trouble and one.checkpoints.oldest_round() == 1
    before = one.book.residual()
    disk.mute()
    two = Life(disk, keep=2)
    assert two.fresh == [] and np.array_equal(two.book.residual(), before)
    assert np.array_equal(two.book.parts()["learned"], learned_up_to(one.round))
    # And from the old checkpoint, everything comes back.
    disk.mute()
    damage(disk, 1)
    three = Life(disk, keep=2)
    assert three.round == 1 and len(three.fresh) == ROUNDS_KEPT + 9
    assert np.array_equal(three.book.parts()["learned"], learned_up_to(one.round))
    # Once two newer ones are there, the journal lets go and the book settles.
    for _ in range(3):
        two.live_round()
    assert len(two.journal.updates) <= 2 and len(two.book.dots()) <= ROUNDS_KEPT + 2


def test_a_new_life_never_begins_between_an_updates_name_and_its_record() -> None:
    """Another thread begins one while an update is being made: it comes after, and the update keeps the name it was given."""
    disk = MemoryDisk()
    one = Life(disk, keep=2)
    journal, asked, first = one.journal, threading.Event(), one.journal.incarnation

    def begin() -> None:
        asked.set()
        journal.start_incarnation(now_wall=0.0)

    thread = threading.Thread(target=begin)

    def build(dot: Dot, head: bytes) -> OwnUpdate:
        thread.start()
        assert asked.wait(10)
        return one._update(b"")(dot, head)

    update = journal.say("me", build)
    thread.join(10)
    assert not thread.is_alive()
    assert (update.dot.incarnation, update.dot.seq) == (first, 1)
    assert (journal.incarnation, journal.last_seq) == (first + 1, 0)
    assert journal.say("me", one._update(b"")).dot == Dot("me", first + 1, 1)
    disk.mute()
    assert [u.dot.incarnation for u in Life(disk, keep=2).journal.updates] == [first, first + 1]
