"""What goes wrong again and again, such as a full disk every round: said when it begins, when its cause changes, now and
then while it lasts, and when it is over. Pure logic apart from what it calls; the caller's thread does not matter.
"""

from __future__ import annotations

from collections.abc import Callable

# While nothing changes: often enough for who looks at the last lines of a log, too rare to fill one.
REPEAT_SECONDS = 600.0


class Recurring:
    """Of one node. Each trouble goes by the text that is said of it."""

    def __init__(self, say: Callable[..., None], now: Callable[[], float]) -> None:
        """
        Args:
            say: `say(event, level=…, **values)`.
            now: monotonic seconds; called from any thread.
        """
        self._say, self._now = say, now
        self._open: dict[str, tuple[str, float, float, int]] = {}  # by event: cause, begun, last said, times since

    def wrong(self, event: str, cause: str, *, level: str = "error", **values: object) -> None:
        """It has happened, perhaps again."""
        now = self._now()
        before, begun, said_at, unsaid = self._open.get(event, (None, now, now, 0))
        if cause == before and now - said_at < REPEAT_SECONDS:
            self._open[event] = cause, begun, said_at, unsaid + 1
            return
        if unsaid and cause == before:
            values |= {"times": unsaid + 1}
        self._open[event] = cause, begun, now, 0
        self._say(event, level=level, cause=cause, **values)

    def over(self, event: str) -> None:
        """What may have gone wrong before went well: said once, and nothing when nothing was wrong."""
        if (was := self._open.pop(event, None)) is not None:
            cause, begun, _, _ = was
            self._say(f"over: {event}", cause=cause, seconds=round(self._now() - begun, 1))
