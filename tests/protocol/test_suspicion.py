"""Lifeguard's arithmetic and the small parts of membership: suspicion timeout, local health, rumours, turns, relays."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol import limits
from shoal.protocol.awareness import Awareness
from shoal.protocol.membership import PRESETS, MembershipConfig
from shoal.protocol.probing import Probe, Relay, Relays, Turns
from shoal.protocol.rumours import Rumours, retransmits
from shoal.protocol.suspicion import Suspicion


def suspicion(wanted: int = 3) -> Suspicion:
    return Suspicion(100.0, least_s=2.0, most_s=8.0, wanted=wanted)


def test_the_timeout_shrinks_with_independent_reporters_by_the_papers_formula() -> None:
    one = suspicion()
    assert one.deadline() == 108.0
    assert one.confirm("a") and one.deadline() == 108.0
    for c, reporter in enumerate("bcd", 1):
        assert one.confirm(reporter) and not one.confirm(reporter)
        assert one.deadline() - 100 == pytest.approx(8 - 6 * math.log(c + 1) / math.log(4))
    assert one.deadline() == pytest.approx(102.0)
    assert not one.confirm("e") and one.reporters == 4  # enough: no more are counted or kept


@pytest.mark.parametrize("wanted", [0, -1])
def test_with_nobody_to_confirm_the_timeout_is_the_least(wanted: int) -> None:
    assert suspicion(wanted).deadline() == 102.0


def test_hurry_restart_and_shift() -> None:
    one = suspicion()
    one.hurry()
    assert one.deadline() == 102.0
    one.shift(5)
    assert one.deadline() == 107.0
    one.restart(200)
    assert one.deadline() == 202.0 and one.waited_s(201) == 1


@given(st.lists(st.text(max_size=2), max_size=20), st.integers(-1, 6))
def test_the_timeout_only_shrinks_and_stays_within_its_bounds(reporters: list[str], wanted: int) -> None:
    one, last = suspicion(wanted), math.inf
    for reporter in reporters:
        one.confirm(reporter)
        assert 102.0 <= one.deadline() <= min(last, 108.0)
        last = one.deadline()
    assert one.reporters <= max(0, wanted) + 1


def test_awareness_stays_in_its_range_and_scales() -> None:
    one = Awareness(3)
    assert one.scale(2.0) == 2.0
    one.change(+2)
    assert one.scale(2.0) == 6.0
    one.change(+5)
    assert one.score == 3
    one.change(-9)
    assert one.score == 0


@pytest.mark.parametrize(("size", "times"), [(1, 4), (2, 4), (9, 4), (10, 8), (99, 8), (100, 12)])
def test_retransmits_grow_with_the_logarithm(size: int, times: int) -> None:
    assert retransmits(4, size) == times


def test_rumours_are_told_least_told_first_and_a_bounded_number_of_times() -> None:
    rumours = Rumours()
    rumours.tell(("a", False))
    assert list(rumours.pick(5, 3)) == [("a", False)]
    rumours.tell(("b", True))
    assert list(rumours.pick(1, 3)) == [("b", True)]
    told = [key for _ in range(9) for key in rumours.pick(5, 3)]
    assert told.count(("a", False)) == 2 and told.count(("b", True)) == 2 and len(rumours) == 0
    rumours.tell(("c", False))
    assert list(rumours.pick(0, 3)) == list(rumours.pick(-1, 3)) == []
    rumours.drop(("c", False))
    rumours.drop(("c", False))
    assert not len(rumours)


@given(st.integers(1, 12), st.integers(0, 5))
def test_everybody_is_probed_within_two_rounds_of_turns(n: int, seed: int) -> None:
    turns, alive = Turns(random.Random(seed)), {f"p{i}" for i in range(n)}
    assert turns.next(set()) is None
    seen = [turns.next(alive) for _ in range(4 * n)]
    for start in range(2 * n):
        assert set(seen[start : start + 2 * n]) == alive
    assert turns.next({"new"}) == "new"


def test_a_hastened_turn_comes_first_and_once() -> None:
    turns = Turns(random.Random(1))
    alive = {"a", "b", "c", "d"}
    turns.next(alive)
    turns.hasten("c")
    turns.hasten("c")
    assert turns.next(alive) == "c"
    assert sorted(str(turns.next(alive)) for _ in range(3)).count("c") <= 1


def test_a_probe_listens_only_to_whom_it_asked() -> None:
    probe = Probe("t", 7, 1.0, 2.0, helpers={"h"})
    assert probe.acked_by("t", 7) and probe.acked_by("h", 7)
    assert not probe.acked_by("t", 8) and not probe.acked_by("x", 7)
    for peer, nonce in (("x", 7), ("h", 8), ("h", 7), ("h", 7)):
        probe.nack(peer, nonce)
    assert probe.nacks == {"h"}
    probe.shift(1.0)
    assert (probe.direct_until, probe.ends) == (2.0, 3.0)


def test_relays_answer_once_are_bounded_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RELAYS_MAX", 10)
    relays = Relays()
    assert relays.add(1, Relay("a", 11, "t", nack_at=1.0, ends=5.0))
    assert relays.acked("x", 1) is None and relays.acked("t", 2) is None
    assert [r.nonce for r in relays.due(0.5)] == [] and [r.nonce for r in relays.due(1.0)] == [11]
    assert list(relays.due(2.0)) == []  # told once
    late = relays.acked("t", 1)
    assert late is not None and late.asker == "a" and not len(relays)
    added = [relays.add(n, Relay("a", n, "t", 1.0, 5.0)) for n in range(9)]
    assert added == [True] * limits.RELAYS_PER_PEER_MAX + [False]
    assert [relays.add(n, Relay("b", n, "t", 1.0, 5.0)) for n in range(20, 23)] == [True, True, False]
    assert len(list(relays.due(6.0))) == 10 and not len(relays) and not relays._askers


@pytest.mark.parametrize(
    "change",
    [{"probe_interval_s": 0.0}, {"suspicion_max_mult": 0.5}, {"probe_timeout_s": math.nan}, {"indirect_probes": -1}],
)
def test_impossible_knobs_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        MembershipConfig(**change)  # type: ignore[arg-type]


def test_presets_differ_in_speed() -> None:
    intervals = [PRESETS[name].probe_interval_s for name in ("local", "lan", "wan")]
    assert intervals == sorted(intervals) and len(set(intervals)) == 3
