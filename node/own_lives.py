"""Which of this peer's lives (incarnations) the swarm knows, and when a new one must begin.

A peer whose disk was lost, or is older than what others have of it, would sign a second update under a name that is taken.
So before anything is published a life above every one that is known begins.
"""

from __future__ import annotations

from collections.abc import Callable

from ..protocol.errors import ExitCode, ShoalError
from ..protocol.transport import Clock
from ..protocol.wire_pb2 import Welcome
from .store.journal import Journal, JournalFull


def first_life(journal: Journal, *, lost: bool, now_wall: float, warn: Callable[[str], None]) -> None:
    """Of a new peer; `lost`: of one that has lived before, as its disk shows. Raises ShoalError(DISK)."""
    if lost:
        warn(f"{journal.path} holds nothing: what was published last is not known; a new life begins")
    try:
        journal.start_incarnation(now_wall=now_wall)
    except JournalFull as error:
        raise ShoalError(
            "The journal cannot be written",
            values=str(error),
            todo=f"Check permissions and free space of {journal.path}, or use another --data-dir.",
            code=ExitCode.DISK,
        ) from None


class OwnLives:
    """Of one peer, beside its journal. `amnesiac`: the swarm knows a life of this peer that its disk does not."""

    def __init__(
        self, journal: Journal, clock: Clock, *, begun: Callable[[int], None], say: Callable[..., None]
    ) -> None:
        """`begun`: told of a new incarnation."""
        self._journal, self._clock, self._begun, self._say = journal, clock, begun, say
        self._known = (0, 0)  # highest (incarnation, seq) that anybody has of us
        self.amnesiac = False

    def heard(self, welcome: Welcome) -> None:
        """What a peer that let us in has of us. Raises JournalFull, as `check`."""
        if welcome.incarnation_known not in (0, self._journal.incarnation):
            self.amnesiac = True
        self._known = max(self._known, (welcome.incarnation_known, welcome.seq_known))
        self.check()

    def over(self) -> None:
        """Own updates were taken back for good: what is published next begins a new life."""
        self._known = max(self._known, (self._journal.incarnation, self._journal.last_seq + 1))

    def check(self) -> None:
        """Before anything is published: a life above every one that the swarm knows of us has begun. Raises JournalFull."""
        journal = self._journal
        if self._known <= (journal.incarnation, journal.last_seq):
            return
        before = journal.incarnation
        now = journal.start_incarnation(self._known[0], now_wall=self._clock.wall())
        self._say(
            "new incarnation: the swarm knows more of this peer than its disk", level="warning", before=before, now=now
        )
        self._begun(now)
