"""Held-out metrics: the pass@k estimator against enumeration, fixed seeds, and what training randomness may not touch."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.node.rl.evaluate import pass_at_k, pass_ks

COUNTS = st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))


@given(COUNTS)
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(counts):
    n, correct, k = counts
    subsets = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@given(p=st.floats(0.0, 1.0), n=st.integers(1, 12), data=st.data())
def test_pass_at_k_is_unbiased(p, n, data):
    """Its mean over the binomial number of correct samples is 1 - (1 - p)^k, for any number of samples."""
    k = data.draw(st.integers(1, n))
    mean = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-9)


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_impossible_counts_are_refused(n, correct, k):
    with pytest.raises(ValueError, match="expected 1 <= k <= n"):
        pass_at_k(n, correct, k)


def test_reported_ks():
    assert [pass_ks(n) for n in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]


def test_an_evaluation_repeats_itself_and_leaves_training_alone(make_learner):
    task, warmup = {"eval_generations": 4, "eval_size": 24}, {"steps": 80, "learning_rate": 1e-2}
    learner, other = make_learner(task=task, warmup=warmup), make_learner(task=task, warmup=warmup)
    for each in (learner, other):
        each.load(each.initial())
        each.warmup()
    first = learner.evaluate()
    assert learner.evaluate() == first
    values = [first[f"pass_at_{k}"] for k in (1, 2, 4)]
    assert values == sorted(values) and 0 < values[-1] <= 1
    assert first["n"] == 24
    for each in (learner, other):
        each.begin(0)
    learner.step()
    learner.evaluate()  # inside a round, of the shared parameters
    learner.step()
    other.step()
    other.step()
    assert np.array_equal(learner.theta(), other.theta())


def test_pass_at_one_is_the_mean_of_the_full_marks(make_learner, tmp_path):
    """A JSONL task scores 1 for the exact answer and 0 for all else, so its mean sampled reward is pass@1."""
    path = tmp_path / "parity.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}>", "answer": "{i % 2}"}}\n' for i in range(200)))
    learner = make_learner(
        task={"name": str(path), "options": {}, "prompt_format": "plain", "eval_generations": 4, "eval_size": 16},
        warmup={"steps": 40, "learning_rate": 1e-2},
    )
    learner.load(learner.initial())
    learner.warmup()
    found = learner.evaluate()
    assert found["reward"] == pytest.approx(found["pass_at_1"])
    assert 0 < found["pass_at_1"] < found["pass_at_4"]
