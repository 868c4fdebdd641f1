"""When repeated faults become a ban."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol import limits
from shoal.protocol.conduct import BANNABLE, Conduct

N, WINDOW = limits.FAULTS_BEFORE_BAN, limits.FAULT_WINDOW_SECONDS


def test_many_faults_within_the_window_are_a_ban_with_its_evidence() -> None:
    conduct = Conduct()
    for n in range(N - 1):
        assert conduct.fault("m", "bad_payload", "x" * 10_000, float(n)) is None
    assert conduct.fault("other", "bad_payload", "", 6.0) is None
    reason = conduct.fault("m", "bad_signature", "\x00 \N{GRINNING FACE}" * 1000, 20.0)
    assert reason is not None and f"{N} faults within 20 s" in reason and "bad_payload, bad_signature" in reason
    evidence = conduct.evidence("m", 21.0)
    assert len(evidence) <= limits.EVIDENCE_BYTES_MAX
    listed = json.loads(evidence)
    assert [kind for _, kind, _ in listed] == ["bad_payload"] * (N - 1) + ["bad_signature"] and listed[0][0] == 21.0
    conduct.forget("m")
    assert conduct.fault("m", "bad_payload", "", 22.0) is None and conduct.evidence("unknown", 0.0) == b"[]"


@pytest.mark.parametrize(
    "kind", ["stale", "state_moved_on", "bad_chunk", "bad_commit", "unsolicited_update", "bad_state"]
)
def test_what_an_honest_peer_may_run_into_is_never_a_ban(kind: str) -> None:
    conduct = Conduct()
    assert all(conduct.fault("m", kind, "", float(n)) is None for n in range(10 * N))


def test_an_accident_now_and_then_is_none() -> None:
    conduct = Conduct()
    step = WINDOW / (N - 1) + 0.01
    assert all(conduct.fault("m", "bad_payload", "", n * step) is None for n in range(100))


@given(st.lists(st.tuples(st.floats(0, 2 * WINDOW), st.sampled_from(sorted(BANNABLE | {"stale"}))), max_size=60))
def test_banned_exactly_when_the_window_holds_enough(steps: list[tuple[float, str]]) -> None:
    conduct, now = Conduct(), 0.0
    times: list[float] = []
    for step, kind in steps:
        now += step / 20
        if kind in BANNABLE:
            times.append(now)
        expected = kind in BANNABLE and sum(now - t <= WINDOW for t in times) >= N
        assert (conduct.fault("m", kind, "", now) is not None) == expected


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MEMBERS_MAX", 5)
    conduct = Conduct()
    for n in range(1000):
        conduct.fault(f"p{n}", "bad_payload", "", 0.0)
    assert len(conduct._faults) == 10
