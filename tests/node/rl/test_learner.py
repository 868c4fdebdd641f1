"""The learner: rounds, skipped steps, non-finite values, exact resume, micro-batches, warm-up."""

import dataclasses

import numpy as np
import pytest
import torch

from shoal.node.rl import learner as learner_module
from shoal.node.rl import update as update_module
from shoal.node.rl.config import LoraConfig
from shoal.node.rl.rewards import Scored


@pytest.fixture
def varied_rewards(monkeypatch):
    """A random small model is never right: score completions by their first token instead."""
    real = learner_module.collect

    def collect(*args, **kwargs):
        experience = real(*args, **kwargs)
        first = experience.batch.completion_ids[:, 0].float()
        return dataclasses.replace(
            experience,
            advantages=(first - first.mean()) / 30,
            has_signal=torch.ones(len(first), dtype=torch.bool),
        )

    monkeypatch.setattr(learner_module, "collect", collect)


def steps(learner, n, round_=0):
    learner.begin(round_)
    return [learner.step() for _ in range(n)]


def test_a_round_gives_the_difference_to_what_was_loaded(make_learner, varied_rewards):
    learner = make_learner()
    theta = learner.initial()
    learner.load(theta)
    done = steps(learner, 2)
    result = learner.finish()
    assert [s.samples for s in done] == [12, 12]
    assert result.weight == 24
    assert result.delta.dtype == np.float32
    assert np.array_equal(result.delta, theta - learner.theta())
    assert np.abs(result.delta).max() > 0
    assert {"reward", "loss", "grad_norm", "skipped_groups", "truncated"} <= set(result.metrics)


def test_equal_peers_start_equal_and_sample_apart(make_learner, varied_rewards):
    one, two = make_learner(peer_seed=1), make_learner(peer_seed=2)
    assert np.array_equal(one.initial(), two.initial())
    assert one.base_hash == two.base_hash
    assert one.layout.hash() == two.layout.hash()
    steps(one, 1)
    steps(two, 1)
    assert not np.array_equal(one.theta(), two.theta())
    assert make_learner(run_seed=9).base_hash != one.base_hash


def test_all_equal_rewards_skip_the_step(make_learner):
    learner = make_learner()
    done = steps(learner, 2)
    assert all(s.skipped for s in done)
    assert done[0].metrics["skipped_groups"] == 1.0
    result = learner.finish()
    assert result.weight == 0
    assert not result.delta.any()


def test_finish_without_a_step(make_learner):
    learner = make_learner()
    learner.begin(0)
    result = learner.finish()
    assert (result.weight, result.delta.any()) == (0, False)


def test_begin_drops_unfinished_steps(make_learner, varied_rewards):
    learner = make_learner()
    theta = learner.initial()
    steps(learner, 1)
    assert not np.array_equal(learner.theta(), theta)
    learner.begin(1)
    assert np.array_equal(learner.theta(), theta)
    assert learner.finish().weight == 0


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_non_finite_loss_is_skipped_and_counted(make_learner, varied_rewards, monkeypatch, poison):
    learner = make_learner()
    steps(learner, 1)
    before = learner.theta()
    real = update_module.policy_loss
    monkeypatch.setattr(update_module, "policy_loss", lambda *a, **k: (real(*a, **k)[0] * poison, real(*a, **k)[1]))
    bad = learner.step()
    assert bad.skipped
    assert bad.metrics["nonfinite_steps"] == 1
    assert np.array_equal(learner.theta(), before)
    monkeypatch.setattr(update_module, "policy_loss", real)
    assert not learner.step().skipped
    result = learner.finish()
    assert np.isfinite(result.delta).all()
    assert result.weight == 24


def test_a_non_finite_gradient_is_skipped(make_learner, varied_rewards):
    learner = make_learner()
    weight = learner.loaded.model.model.layers[0].mlp.up_proj.weight
    handle = weight.register_hook(lambda grad: grad * float("nan"))
    before = learner.theta()
    assert steps(learner, 1)[0].skipped
    assert np.array_equal(learner.theta(), before)
    handle.remove()


def test_parameters_that_overflowed_never_leave(make_learner, varied_rewards):
    learner = make_learner()
    theta = learner.initial()
    learner.load(theta)
    steps(learner, 1)
    with torch.no_grad():
        learner.loaded.model.model.norm.weight[0] = float("inf")
    result = learner.finish()
    assert (result.weight, result.delta.any()) == (0, False)
    assert result.metrics["nonfinite_delta"] == 1
    assert np.array_equal(learner.theta(), theta)


@pytest.mark.parametrize("lora", [None, LoraConfig(r=2, alpha=4), LoraConfig(r=2, alpha=4, freeze_a=True)])
def test_resume_is_exact_to_the_bit(make_learner, varied_rewards, lora):
    learner = make_learner(lora=lora)
    learner.set_shard((1, 2), 3)
    learner.load(learner.initial())
    steps(learner, 2)
    theta = learner.theta()
    learner.load(theta)
    saved = learner.snapshot()
    assert all(isinstance(v, (np.ndarray, bytes)) for v in saved.values())
    steps(learner, 2, round_=1)
    expected = learner.finish()

    other = make_learner(lora=lora, peer_seed=77)
    other.load(theta)
    other.restore(saved)
    torch.manual_seed(1234)  # global randomness plays no part
    steps(other, 2, round_=1)
    found = other.finish()
    assert np.array_equal(found.delta, expected.delta)
    assert found.metrics == expected.metrics
    for key, value in other.snapshot().items():
        assert np.array_equal(np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value, (
            np.frombuffer(learner.snapshot()[key], np.uint8) if isinstance(value, bytes) else learner.snapshot()[key]
        ))  # fmt: skip


def test_resume_in_the_middle_of_a_round(make_learner, varied_rewards):
    learner = make_learner()
    learner.load(learner.initial())
    steps(learner, 1)
    saved = learner.snapshot()
    learner.step()
    expected = learner.finish()
    other = make_learner()
    other.load(other.initial())
    other.restore(saved)
    other.step()
    found = other.finish()
    assert np.array_equal(found.delta, expected.delta)
    assert found.weight == expected.weight == 24


def test_a_snapshot_of_another_layout_is_refused(make_learner):
    saved = make_learner().snapshot()
    with pytest.raises(ValueError, match="layout"):
        make_learner(lora=LoraConfig(r=2)).restore(saved)


def test_moments_survive_load(make_learner, varied_rewards):
    learner = make_learner()
    steps(learner, 2)
    before = learner.snapshot()["adam_m"]
    learner.load(learner.theta())
    assert np.array_equal(learner.snapshot()["adam_m"], before)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_the_micro_batch_split_does_not_change_the_step(make_learner, varied_rewards, loss_type):
    thetas = []
    for size in (0, 5, 1):
        learner = make_learner(grpo={"micro_batch_size": size, "loss_type": loss_type, "beta": 0.01})
        norm = steps(learner, 1)[0].metrics["grad_norm"]
        thetas.append((norm, learner.snapshot()["adam_m"]))
    for norm, moment in thetas[1:]:
        assert norm == pytest.approx(thetas[0][0], rel=1e-4)
        assert np.allclose(moment, thetas[0][1], atol=1e-6)


def test_several_iterations_go_off_policy(make_learner, varied_rewards):
    learner = make_learner(grpo={"num_iterations": 3, "learning_rate": 0.02})
    metrics = steps(learner, 1)[0].metrics
    assert metrics["clip_fraction"] > 0
    assert learner.snapshot()["adam_m"].any()


def test_truncated_sampling_is_corrected(make_learner, varied_rewards):
    learner = make_learner(grpo={"top_k": 3, "vllm_importance_sampling_mode": "token_truncate"})
    assert 0 < steps(learner, 1)[0].metrics["sampler_weight"] < 1
    assert "sampler_weight" not in steps(make_learner(), 1)[0].metrics


def test_masking_truncated_completions_can_empty_a_batch(make_learner, varied_rewards):
    learner = make_learner(grpo={"max_completion_length": 1, "mask_truncated_completions": True})
    done = steps(learner, 1)[0]
    assert np.isfinite(done.metrics["truncated"])


def test_sixteen_bit_models_keep_fp32_masters(make_learner, varied_rewards):
    learner = make_learner(model={"dtype": "bfloat16"}, grpo={"learning_rate": 1e-5})
    theta = learner.initial()
    steps(learner, 1)
    moved = learner.theta() != theta
    assert moved.mean() > 0.5  # steps far below bf16's resolution are not lost
    parameter = next(learner.loaded.model.parameters())
    assert parameter.dtype == torch.bfloat16
    learner.load(theta)
    assert np.array_equal(learner.theta(), theta)


def test_evaluate_measures_what_was_loaded_and_disturbs_nothing(make_learner, varied_rewards):
    learner = make_learner()
    first = learner.evaluate()
    steps(learner, 1)
    theta, saved = learner.theta(), learner.snapshot()
    assert learner.evaluate() == first
    assert np.array_equal(learner.theta(), theta)
    assert learner.snapshot()["rng"] == saved["rng"]
    assert {"accuracy", "reward", "n"} <= set(first)


def test_warmup_learns_and_is_bounded(make_learner):
    learner = make_learner(warmup={"steps": 30, "batch_size": 16, "learning_rate": 3e-3})
    before = learner.theta()
    stages = []
    result = learner.warmup(lambda stage, fraction: stages.append(fraction))
    assert result["steps"] == 30
    assert result["loss"] < 4.5  # log(99) = 4.6 at the start
    assert stages[-1] == 1.0
    assert not np.array_equal(learner.theta(), before)
    assert learner.finish().weight == 0  # the warm-up is not part of a delta
    ticks = iter(range(1000))
    late = make_learner(warmup={"steps": 30, "seconds_max": 5}).warmup(clock=lambda: float(next(ticks)))
    assert late["steps"] < 6


def test_metrics_are_always_finite(make_learner):
    learner = make_learner()
    assert all(np.isfinite(v) for s in steps(learner, 1) for v in s.metrics.values())


OPTIONS = {
    "plain": {},
    "top entropy": {"top_entropy_quantile": 0.3},
    "entropy bonus": {"entropy_coef": 0.05},
    "group expectation": {
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "group_expectation",
        "importance_sampling_level": "sequence",
        "top_k": 20,
    },
    "k1": {"beta": 0.1, "kl_estimator": "k1"},
    "recomputed": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_no_option_depends_on_the_micro_batch_split(make_learner, varied_rewards, options):
    moments = []
    for size in (0, 5, 1):
        learner = make_learner(grpo={"micro_batch_size": size, "gradient_checkpointing": False} | options)
        assert not steps(learner, 1)[0].skipped
        moments.append(learner.snapshot()["adam_m"])
    for moment in moments[1:]:
        assert np.abs(moment - moments[0]).max() < 1e-5 * np.abs(moments[0]).max()


def test_the_options_do_something(make_learner, varied_rewards):
    moments = {}
    for name, options in OPTIONS.items():
        learner = make_learner(grpo={"gradient_checkpointing": False} | options)
        steps(learner, 1)
        moments[name] = learner.snapshot()["adam_m"]
    for name, moment in moments.items():
        same = np.allclose(moment, moments["plain"], rtol=1e-3, atol=1e-7)
        assert same == (name in ("plain", "recomputed")), name


def test_the_ratio_is_logged_before_and_after_truncation(make_learner, varied_rewards):
    options = {"top_k": 3, "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_min": 0.1}
    metrics = steps(make_learner(grpo=options), 1)[0].metrics
    assert metrics["sampler_ratio/min"] < metrics["sampler_weight/min"] == pytest.approx(0.1)
    assert metrics["sampler_ratio/p05"] <= metrics["sampler_ratio/median"] <= metrics["sampler_ratio/p95"]
    assert 0 < metrics["sampler_truncated"] <= 1


def test_bf16_counts_as_another_sampler(make_learner, varied_rewards):
    learner = make_learner(grpo={"bf16": True})
    metrics = steps(learner, 1)[0].metrics
    assert metrics["sampler_ratio/max"] > 1
    assert metrics["sampler_weight"] == pytest.approx(1, abs=0.1)
    assert next(learner.loaded.model.parameters()).dtype == torch.float32


@pytest.mark.parametrize("options", [{"leave_one_out": True}, {"multi_objective_aggregation": "normalize_then_sum"}])
def test_advantage_options_reach_the_advantages(make_learner, options):
    class ByTokens:
        weights = {"task": 1.0, "exact": 2.0}
        failures = {}
        clipped = {}

        def score(self, examples, prompts, completions, texts, ids):
            values = {"task": [float(i[0] % 3) for i in ids], "exact": [float(i[-1] % 5) for i in ids]}
            return Scored(total=[a + 2 * b for a, b in zip(*values.values())], means={}, values=values)

    def advantages(learner):
        examples = [learner._task.train(i) for i in range(4)]
        return learner_module.collect(
            learner.loaded, examples, config=learner._grpo, prompts=learner._prompts, rewards=ByTokens(),
            generator=torch.Generator().manual_seed(3),
        ).advantages  # fmt: skip

    base, changed = advantages(make_learner()), advantages(make_learner(grpo=options))
    assert base.any() and not torch.allclose(base, changed)
    if "leave_one_out" in options:
        assert torch.allclose(changed, base * 4 / 3)
