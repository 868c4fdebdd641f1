"""What lasts is said when it begins, changes, goes on for long, and ends; never each time."""

from __future__ import annotations

from typing import Any

from shoal.node.observe.recurring import REPEAT_SECONDS, Recurring

FULL, READ_ONLY = "No space left on device", "Read-only file system"


class Log:
    def __init__(self) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.at = 0.0
        self.troubles = Recurring(self._say, lambda: self.at)

    def _say(self, event: str, **values: Any) -> None:
        self.said.append((event, values))

    def wrong(self, times: int, cause: str = FULL, *, every_s: float = 1.0, event: str = "not saved") -> None:
        for _ in range(times):
            self.troubles.wrong(event, cause, folder="/data")
            self.at += every_s


def test_a_hundred_rounds_on_a_full_disk_are_one_line_and_its_end_another():
    log = Log()
    log.wrong(100)
    log.troubles.over("not saved")
    log.troubles.over("not saved")
    assert log.said == [
        ("not saved", {"level": "error", "cause": FULL, "folder": "/data"}),
        ("over: not saved", {"cause": FULL, "seconds": 100.0}),
    ]


def test_another_cause_is_said_and_so_is_the_first_one_again():
    log = Log()
    log.wrong(3)
    log.wrong(3, READ_ONLY)
    log.wrong(3)
    assert [(values["cause"], values.get("times")) for _, values in log.said] == [
        (FULL, None),
        (READ_ONLY, None),
        (FULL, None),
    ]


def test_what_begins_anew_is_said_anew():
    log = Log()
    for _ in range(2):
        log.wrong(5)
        log.troubles.over("not saved")
    assert [event for event, _ in log.said] == ["not saved", "over: not saved"] * 2


def test_what_lasts_is_repeated_now_and_then_with_how_often_it_happened():
    log = Log()
    log.wrong(1201, every_s=REPEAT_SECONDS / 600)
    assert [values.get("times") for _, values in log.said] == [None, 600, 600]


def test_two_troubles_do_not_hide_each_other():
    log = Log()
    for _ in range(4):
        log.wrong(1)
        log.wrong(1, event="metrics not written")
    log.troubles.over("metrics not written")
    assert [event for event, _ in log.said] == ["not saved", "metrics not written", "over: metrics not written"]
