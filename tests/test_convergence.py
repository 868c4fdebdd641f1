"""The convergence benchmark: merging in one process, taking up again, and that docs/convergence.md says what was measured."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from shoal.aggregation.compress import max_payload_bytes
from shoal.node.bandit import BanditLearner
from shoal.node.quadratic import QuadraticLearner

ROOT = Path(__file__).parents[1]


def load(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


bench = load("convergence")
report = load("convergence_report")
DENSE, SHORT, LONG, SHORT_WITHOUT, LONG_WITHOUT, DENSE_WITHOUT = bench.EXCHANGES
SMALL = bench.Study("small", 2, (10, 60), "loss", True, True)


def make(seed: int):
    learners = [
        QuadraticLearner(dimension=200, learning_rate=0.02, seed=seed, peer_seed=i, noise=0.0 if seed == 9 else 0.05)
        for i in range(3)
    ]
    return learners, learners[0].initial(), lambda theta: {"loss": learners[0].loss(theta)}


def last(exchange, seed: int = 0) -> dict[str, float]:
    return bench.merged_run(make, SMALL, exchange, seed)["curve"][-1]


def test_dense_merging_is_the_mean_of_the_replicas():
    """Without noise the replicas are alike, and their mean is what one of them does alone."""
    learners, theta, _ = make(9)
    one = learners[0]
    for round_ in range(60):
        one.load(theta)
        one.begin(round_)
        one.step(), one.step()
        theta = theta - one.finish().delta
    assert last(DENSE, 9)["loss"] == pytest.approx(one.loss(theta), rel=1e-4)


def test_feedback_changes_nothing_where_nothing_is_left_out():
    assert last(DENSE)["loss"] == pytest.approx(last(DENSE_WITHOUT)["loss"], rel=1e-5)


def test_what_feedback_is_worth():
    for with_feedback, without in ((SHORT, SHORT_WITHOUT), (LONG, LONG_WITHOUT)):
        assert last(with_feedback)["loss"] < 0.7 * last(without)["loss"]


def test_bytes_are_those_of_the_rings():
    assert last(DENSE)["bytes"] == 60 * 2 * 2 * 4 * 200  # rounds, 2 (n - 1), fp32, d
    assert 0 < last(LONG)["bytes"] <= 60 * 3 * 2 * max_payload_bytes(200, bench.PRESETS["long"])


def test_a_residual_beyond_one_unit_does_not_void_the_updates():
    """Rounds far too long for 2 %: it does not converge, but every update counts, as in a run."""

    def loud(seed: int):
        learners = [BanditLearner(learning_rate=20.0, seed=seed, peer_seed=i) for i in range(2)]
        return learners, learners[0].initial(), lambda theta: {"loss": float(np.abs(theta).max())}

    found = bench.merged_run(loud, bench.Study("loud", 20, (10,), "loss", True, True), LONG, 0)
    assert found["voids"] == 0 and found["curve"][-1]["loss"] > 0.5


def test_runs_are_taken_up_where_they_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    made: list[int] = []

    def counted(seed: int):
        made.append(seed)
        return make(seed)

    monkeypatch.setattr(bench, "FOLDER", tmp_path)
    monkeypatch.setattr(bench, "STUDIES", (bench.Study("small", 1, (2,), "loss", True, True, bench.EXCHANGES[:2]),))
    monkeypatch.setitem(bench.MAKE, "small", counted)
    assert bench.run_missing("small", 2, -1.0) == 4 and not made
    assert bench.run_missing("small", 1, 1e9) == 0 and made == [0, 0]
    before = bench.read_figures("small")
    assert bench.run_missing("small", 2, 1e9) == 0 and made == [0, 0, 1, 1]
    after = bench.read_figures("small")
    assert {e: runs["0"] for e, runs in after["small 1x2"].items()} == {
        e: r["0"] for e, r in before["small 1x2"].items()
    }
    assert list(after["small 1x2"]["short"]) == ["0", "1"]


def test_standard_errors_and_catching_up():
    study = bench.Study("s", 1, (1, 2, 3), "reward", False, False)

    def runs(*columns: tuple[float, float]):
        return {str(i): {"curve": [{"round": r, "reward": c[i]} for r, c in enumerate(columns)]} for i in range(2)}

    dense = runs((0.0, 0.0), (0.4, 0.6), (0.6, 0.8), (0.7, 0.9))
    assert report.error_of_mean([0.4, 0.6]) == pytest.approx(0.1)
    assert report.worse_by(study, [0.4, 0.6], [0.1, 0.3]) == pytest.approx(0.3 / np.hypot(0.1, 0.1))
    assert report.caught_up(study, dense, runs((0.0, 0.0), (0.1, 0.3), (0.5, 0.7), (0.7, 0.9))) == 2
    assert report.caught_up(study, dense, runs((0.0, 0.0), (0.4, 0.6), (0.6, 0.8), (0.3, 0.5))) is None


# --- what the page says -----------------------------------------------------------------------------------------------


def test_the_page_has_the_tables_of_the_figures_on_disk():
    page = (ROOT / "docs" / "convergence.md").read_text(encoding="utf-8")
    assert report.with_tables(page) == page, "docs/convergence.md is stale: run benchmarks/convergence_report.py"


@pytest.mark.parametrize("study", bench.STUDIES, ids=lambda study: study.name)
def test_every_study_has_five_seeds(study):
    figures = report.read_figures(study.learner)
    assert report.complete(study, figures) and len(figures[study.name]["dense"]) >= 5
