"""What one peer publishes of its residual, seen as the others will merge it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal.aggregation.book import Book
from shoal.aggregation.compress import Compression, decode
from shoal.aggregation.merge import contribution
from shoal.node.learner import LocalResult
from shoal.node.quadratic import QuadraticLearner
from shoal.node.store.journal import Journal
from shoal.node.swarm.local_work import LocalWork, Work
from shoal.node.swarm.state import SharedState
from shoal.node.swarm.updates import UpdateStore
from shoal.protocol.identity import Identity
from shoal.protocol.version import VersionVector

from .memory import InlineClock, run

D = 256
ALONE = Identity.generate(bytes(32))
RUN = bytes(32)


def state_of(d: int) -> SharedState:
    return SharedState.make(
        theta=np.zeros(d, np.float32), outer=None, round_=0, lineage=bytes(32), vector=VersionVector({}),
        electorate=[ALONE.peer_id], total_weight=0,
    )  # fmt: skip


@pytest.mark.parametrize("scale", [0.0, 0.25, 3.0])
@pytest.mark.parametrize("compression", [Compression(0.1, 4), Compression(0.5, 1), Compression(1.0, 8)], ids=str)
def test_a_residual_that_has_grown_large_is_sent_in_parts_that_count(
    tmp_path: Path, compression: Compression, scale: float
) -> None:
    """A contribution of 1 or more is void: sent whole, such a residual would void this update and all that follow."""
    journal = Journal(tmp_path)
    journal.start_incarnation(now_wall=1.0)
    book = Book(D)
    delta = np.random.Generator(np.random.PCG64(1)).normal(0, 2.0, D).astype(np.float32)
    book.learn(delta)
    work = LocalWork(
        learner=QuadraticLearner(dimension=D), clock=InlineClock(), book=book, journal=journal,
        store=UpdateStore(run_id=RUN, d=D, compression=compression, bytes_max=1 << 20), identity=ALONE, run_id=RUN,
        compression=compression, shards=lambda: (0,), scale=lambda state, result: scale,
    )  # fmt: skip
    result = LocalResult(delta=delta, weight=8, metrics={})
    owed = [np.abs(book.residual_f64()).sum()]
    for _ in range(5):
        header = run(work.publish(state_of(D), Work(result=result, steps=1, seconds=1.0)))
        assert header is not None
        values = decode(journal.updates[-1].payload, D, compression).values
        assert contribution(values, 1.0) is not None, "void in ring mode"
        assert contribution(values, header.scale) is not None, "void in gossip mode"
        book.adopt(header.dot)
        owed.append(np.abs(book.residual_f64()).sum())
    assert owed == sorted(owed, reverse=True) and owed[-1] < owed[0], "the rest stays owed, and is sent later"
    journal.close()
