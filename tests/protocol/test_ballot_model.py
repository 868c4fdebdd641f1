"""The ballot under the model checker, and proof that the checker would notice a broken ballot."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

import shoal.protocol.ballot_attempt as attempt_module
import shoal.protocol.ballot_convener as convener_module
import shoal.protocol.ballot_rules as rules_module
from shoal.protocol.ballot import Ballot, Phase
from shoal.protocol.ballot_messages import Propose, Vote, VotedFor

from . import ballot_checker
from .ballot_checker import Violation, check, check_many

SCHEDULES = 1_000
SCHEDULES_LONG = 50_000  # with SHOAL_LONG=1


@pytest.mark.timeout(3600)
def test_random_schedules_keep_every_invariant():
    if not os.environ.get("SHOAL_LONG"):
        problems = check_many(0, SCHEDULES)
    else:
        workers = os.cpu_count() or 1
        share = -(-SCHEDULES_LONG // workers)
        commands = [[sys.executable, ballot_checker.__file__, str(share * i), str(share)] for i in range(workers)]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        problems = [text for process in running if (text := process.communicate()[0].strip()) or process.returncode]
    assert not problems, "\n".join(problems)


def test_the_same_seed_is_the_same_schedule():
    first, second = check(11), check(11)
    assert (first.steps, first.now, first.commits) == (second.steps, second.now, second.commits)


# --- planted bugs -----------------------------------------------------------------------------------------------------


def forget_votes_in_joins(monkeypatch):
    monkeypatch.setattr(Ballot, "_reported", lambda self: None)


def persist_nothing_but_votes(monkeypatch):
    honest = Ballot._persist

    def persist(self, record):
        if (record.voted, record.voted_split) == (self._record.voted, self._record.voted_split):
            self._record = record
        else:
            honest(self, record)

    monkeypatch.setattr(Ballot, "_persist", persist)


def persist_nothing_but_promises(monkeypatch):
    honest = Ballot._persist

    def persist(self, record):
        if record.promised == self._record.promised:
            self._record = record
        else:
            honest(self, record)

    monkeypatch.setattr(Ballot, "_persist", persist)


def half_is_a_majority(monkeypatch):
    for module in (attempt_module, convener_module, rules_module):
        monkeypatch.setattr(module, "is_majority", lambda count, electorate: 2 * count >= electorate)


def continue_an_own_attempt_after_a_restart(monkeypatch):
    def start(self):
        if self.observing:
            self._show()
        elif self._record.promised >= 0:
            self._closed_locally("restarted")
            self._enter(self._record.promised, "restarted")

    monkeypatch.setattr(Ballot, "_start", start)


def vote_below_a_promise(monkeypatch):
    honest = Ballot._on_message

    def on_message(self, peer, message):
        low = isinstance(message, Propose) and message.attempt < self.attempt and self.phase is not Phase.DECIDED
        if low and not self.observing and self.concerns(message):
            vote = Vote(self.me, self.round, self.base_lineage, message.attempt, message.value.hash)
            self._send((peer,), replace(vote, signed=b"signed"))
        else:
            honest(self, peer, message)

    monkeypatch.setattr(Ballot, "_on_message", on_message)


def keep_split_votes_with_the_others(monkeypatch):
    honest = Ballot._persist

    def persist(self, record):
        if record.voted_split is not None:
            cast = VotedFor(record.voted_split.attempt, record.voted_split.value)
            record = replace(record, voted=cast, voted_split=None)
        honest(self, record)

    monkeypatch.setattr(Ballot, "_persist", persist)


# With the seed that showed it first; a change of the ballot or the checker moves it, so a few more are tried.
@pytest.mark.parametrize(
    ("plant", "seed"),
    [
        (forget_votes_in_joins, 1),
        (persist_nothing_but_votes, 0),
        (persist_nothing_but_promises, 0),
        (half_is_a_majority, 0),
        (continue_an_own_attempt_after_a_restart, 0),
        (vote_below_a_promise, 3),
        (keep_split_votes_with_the_others, 7),
    ],
)
def test_a_planted_bug_is_caught(monkeypatch, plant, seed):
    plant(monkeypatch)
    with pytest.raises(Violation):
        for tried in range(seed, seed + 200):
            check(tried)


@pytest.mark.parametrize(("plant", "seed"), [(forget_votes_in_joins, 1190), (half_is_a_majority, 0)])
def test_a_planted_bug_shows_in_what_is_decided(monkeypatch, plant, seed):
    """Without watching the rules: two decisions for one round, or one without a majority."""
    plant(monkeypatch)
    with pytest.raises(Violation, match="decided"):
        for tried in range(seed, seed + 700):
            check(tried, monitors=False)
