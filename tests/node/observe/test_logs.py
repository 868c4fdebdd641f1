"""Logs: JSON in a bounded file, lines on stderr, nothing a peer says can break either."""

from __future__ import annotations

import json
import logging

import pytest

from shoal.node.observe import logs
from shoal.node.observe.logs import LOG_FILE, set_up_logs


@pytest.fixture(autouse=True)
def _hands_back_the_file():
    yield
    for handler in logging.getLogger("shoal").handlers:
        handler.close()
    logging.getLogger("shoal").handlers.clear()


def records(folder):
    return [json.loads(line) for line in (folder / LOG_FILE).read_text().splitlines()]


def test_an_event_with_its_values(tmp_path, capsys):
    say = set_up_logs(tmp_path, "info", "12D3KooWabcdef")
    say("round committed", round=7, split=False)
    (record,) = records(tmp_path)
    assert record["event"] == "round committed" and record["round"] == 7 and record["split"] is False
    assert record["level"] == "info" and record["peer"] == "abcdef" and record["timestamp"].endswith("Z")
    assert (tmp_path / LOG_FILE).stat().st_mode & 0o777 == 0o600  # invites are logged, and invites let in
    out, err = capsys.readouterr()
    assert out == "" and "round committed" in err and "round=7" in err


def test_levels(tmp_path, capsys):
    say = set_up_logs(tmp_path, "warning", "p")
    for level in ("debug", "info", "warning", "error"):
        say(f"a {level}", level=level)
    assert [r["level"] for r in records(tmp_path)] == ["info", "warning", "error"]
    err = capsys.readouterr().err
    assert "a warning" in err and "a error" in err and "a info" not in err


def test_debug_reaches_the_file(tmp_path):
    set_up_logs(tmp_path, "debug", "p")("fine", level="debug")
    assert records(tmp_path)[0]["level"] == "debug"


def test_what_peers_say_is_cut_and_made_harmless(tmp_path, capsys):
    say = set_up_logs(tmp_path, "info", "p")
    say("refused", reason="\x1b[2Jevil" + "x" * 10_000)
    reason = records(tmp_path)[0]["reason"]
    assert len(reason) == logs.VALUE_CHARS_MAX + 1 and "\x1b" not in reason
    assert "\x1b[2J" not in capsys.readouterr().err


def test_values_that_json_does_not_know(tmp_path):
    say = set_up_logs(tmp_path, "info", "p")
    say("odd", value={1, 2}, error=ValueError("x"))
    assert records(tmp_path)[0]["error"] == "ValueError('x')"


def test_the_file_never_outgrows_its_limit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(logs, "LOG_BYTES_MAX", 4096)
    say = set_up_logs(tmp_path, "error", "p")
    for number in range(300):
        say("filling", number=number, padding="x" * 100)
    files = sorted(tmp_path.glob(LOG_FILE + "*"))
    assert len(files) == 1 + logs.LOG_FILES_KEPT
    assert all(file.stat().st_size <= 4096 for file in files)


def test_a_log_that_cannot_be_written_stops_nobody(tmp_path, capsys):
    (tmp_path / LOG_FILE).mkdir()
    say = set_up_logs(tmp_path, "info", "p")
    say("still going")
    err = capsys.readouterr().err
    assert "still going" in err and "Traceback" not in err
