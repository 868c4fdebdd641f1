"""Progress: bars on a terminal, few plain lines elsewhere, never on stdout."""

from __future__ import annotations

import io

from shoal.node.observe.progress import PLAIN_SECONDS, Bar, bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_come_seldom():
    stream, now = io.StringIO(), [100.0]
    one = Bar("downloading", stream, lambda: now[0])
    one(1, 4)
    one(2, 4)  # too soon
    now[0] += PLAIN_SECONDS
    one(3, 4, "from two peers")
    one.close()
    assert stream.getvalue() == "downloading: 25 %\ndownloading: 75 % from two peers\n"


def test_an_unknown_end_shows_the_count():
    stream = io.StringIO()
    Bar("rounds", stream)(7, 0)
    assert stream.getvalue() == "rounds: 7\n"


def test_a_terminal_gets_a_bar():
    stream = Terminal()
    one = Bar("loading", stream)
    one(1, 2, "weights")
    one.close()
    one.close()  # harmless
    assert "loading weights" in stream.getvalue()


def test_stdout_stays_clean(capsys):
    with bar("loading") as show:
        show(0, 1.0)
    out, err = capsys.readouterr()
    assert out == "" and err == "loading: 0 %\n"
