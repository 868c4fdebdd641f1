"""Losses against reference values, and the laws they must obey."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.node.rl.losses import (
    BatchTotals,
    batch_totals,
    group_log_expectation,
    importance_ratio,
    importance_weights,
    policy_loss,
    ratio_distribution,
)

ORACLE = json.loads((Path(__file__).parents[2] / "data" / "grpo_losses.json").read_text())
NAMES: dict[str, str] = {
    "level": "importance_sampling_level",
    "eps": "epsilon",
    "eps_high": "epsilon_high",
    "bc": "use_bias_correction_kl",
    "opsm": "off_policy_mask_threshold",
}


def tensors():
    inputs = ORACLE["inputs"]
    keys = ("logps", "old_logps", "ref_logps", "sampler_logps", "mask", "advantages")
    return {k: torch.tensor(inputs[k], dtype=torch.float64) for k in keys}


def gradient(logps):
    assert logps.grad is not None
    return logps.grad.clone()


@pytest.mark.parametrize("case", ORACLE["cases"], ids=lambda c: c["name"])
def test_reference_values(case):
    t = tensors()
    options: dict[str, Any] = {NAMES.get(str(k), str(k)): v for k, v in case["options"].items()}
    mode = options.pop("mode", None)
    weights = None
    if mode:
        weights = importance_weights(t["old_logps"], t["sampler_logps"], t["mask"], mode=mode, cap=1.2)
    logps = t["logps"].requires_grad_()
    loss, _ = policy_loss(
        logps,
        t["old_logps"],
        t["advantages"],
        t["mask"],
        ref_logps=t["ref_logps"],
        importance_weights=weights,
        max_completion_length=ORACLE["inputs"]["max_completion_length"],
        **options,
    )
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-6)
    assert gradient(logps).norm().item() == pytest.approx(case["grad_norm"], abs=1e-6)
    assert gradient(logps)[0].tolist() == pytest.approx(case["grad_first_row"], abs=1e-6)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo"])
def test_micro_batches_sum_to_the_whole(loss_type):
    t = tensors()
    level = "sequence" if loss_type == "luspo" else "token"
    options = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "beta": 0.04,
        "max_completion_length": 8,
    }
    totals = BatchTotals(rows=3, tokens=float(t["mask"].sum()))

    def part(rows):
        loss, _ = policy_loss(
            t["logps"][rows],
            t["old_logps"][rows],
            t["advantages"][rows],
            t["mask"][rows],
            ref_logps=t["ref_logps"][rows],
            totals=totals,
            **options,
        )
        return loss.item()

    whole = part(slice(None))
    assert part(slice(0, 1)) + part(slice(1, 3)) == pytest.approx(whole, abs=1e-12)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo", "sapo", "vespo"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_nothing_leaks_from_padding(loss_type, poison):
    t = tensors()
    pad = t["mask"] == 0
    clean = t["logps"].clone().requires_grad_()
    dirty = torch.where(pad, torch.tensor(poison, dtype=torch.float64), t["logps"]).requires_grad_()
    results = []
    for logps in (clean, dirty):
        others = [
            torch.where(pad, torch.tensor(poison, dtype=torch.float64), t[k]) if logps is dirty else t[k]
            for k in ("old_logps", "ref_logps", "sampler_logps")
        ]
        weights = importance_weights(others[0], others[2], t["mask"], mode="token_truncate", cap=1.2)
        loss, _ = policy_loss(
            logps, others[0], t["advantages"], t["mask"], ref_logps=others[1], importance_weights=weights,
            loss_type=loss_type, beta=0.04, off_policy_mask_threshold=0.1,
        )  # fmt: skip
        loss.backward()
        results.append((loss.item(), gradient(logps)))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[1][1][pad], torch.zeros(int(pad.sum()), dtype=torch.float64))


def test_unknown_sampler_logprob_means_no_correction():
    t = tensors()
    sampler = t["sampler_logps"].clone()
    sampler[0, 1] = float("nan")
    weights = importance_weights(t["old_logps"], sampler, t["mask"], mode="token_truncate", cap=1.2)
    assert weights[0, 1] == 1.0


def test_weights_are_bounded_or_dropped():
    trainer = torch.tensor([[0.0, -3.0]])
    sampler = torch.tensor([[-3.0, 0.0]])
    mask = torch.ones(1, 2)
    cut = importance_weights(trainer, sampler, mask, mode="token_truncate", cap=2.0, floor=0.5)
    dropped = importance_weights(trainer, sampler, mask, mode="token_mask", cap=2.0, floor=0.5)
    assert cut.tolist() == [[2.0, 0.5]]
    assert dropped.tolist() == [[0.0, 0.0]]
    with pytest.raises(ValueError, match="unknown importance-sampling mode"):
        importance_weights(trainer, sampler, mask, mode="banana", cap=2.0)  # type: ignore[arg-type]


def test_kl_needs_a_reference():
    t = tensors()
    with pytest.raises(ValueError, match="ref_logps"):
        policy_loss(t["logps"], t["old_logps"], t["advantages"], t["mask"], beta=0.1)


def entropies_of(t):
    return torch.tensor([[0.9, 0.1, 2.0, 0.4], [1.5, 0.3, 9.0, 9.0], [0.2, 1.1, 0.6, 9.0]], dtype=torch.float64)


def test_only_the_tokens_of_highest_entropy_act():
    t = tensors()
    t["logps"].requires_grad_()
    loss, stats = policy_loss(
        t["logps"], t["old_logps"], t["advantages"], t["mask"], entropies=entropies_of(t), top_entropy_quantile=0.25
    )
    loss.backward()
    # 9 tokens: the 0.75 quantile is the 7th smallest of 0.1 .2 .3 .4 .6 .9 1.1 1.5 2.0, and padding (9.0) is not among them
    acting = (entropies_of(t) >= 1.1) & (t["mask"] == 1)
    assert int(acting.sum()) == 3
    assert not gradient(t["logps"])[~acting].any()
    plain = t["logps"].detach().clone().requires_grad_()
    full, _ = policy_loss(plain, t["old_logps"], t["advantages"], t["mask"])
    full.backward()
    assert torch.equal(gradient(t["logps"])[acting], gradient(plain)[acting])
    assert stats.entropy == pytest.approx(0.9 + 0.1 + 2.0 + 0.4 + 1.5 + 0.3 + 0.2 + 1.1 + 0.6)


def test_the_entropy_options_do_not_depend_on_the_split():
    t, entropies = tensors(), entropies_of(tensors())
    totals = batch_totals(t["mask"], entropies, top_entropy_quantile=0.5)

    def part(rows):
        loss, _ = policy_loss(
            t["logps"][rows], t["old_logps"][rows], t["advantages"][rows], t["mask"][rows],
            entropies=entropies[rows], totals=totals, top_entropy_quantile=0.5, entropy_coef=0.3,
        )  # fmt: skip
        return loss.item()

    whole = part(slice(None))
    assert part(slice(0, 1)) + part(slice(1, 3)) == pytest.approx(whole, abs=1e-12)
    alone, _ = policy_loss(
        t["logps"], t["old_logps"], t["advantages"], t["mask"], entropies=entropies, top_entropy_quantile=0.5,
        entropy_coef=0.3,
    )  # fmt: skip
    assert alone.item() == pytest.approx(whole, abs=1e-12)


def test_the_entropy_bonus_pushes_entropy_up():
    t = tensors()
    entropies = entropies_of(t).requires_grad_()
    loss, _ = policy_loss(t["logps"], t["old_logps"], t["advantages"], t["mask"], entropies=entropies, entropy_coef=0.3)
    loss.backward()
    assert torch.allclose(gradient(entropies), -0.3 / 9 * t["mask"])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators(estimator):
    """The mean over samples of the policy is the KL divergence to leading order, and its corrected gradient is exact."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    ref = (logits.detach() + 0.1 * torch.randn(7, generator=generator, dtype=torch.float64)).log_softmax(-1)
    logp = logits.log_softmax(-1)
    exact = (logp.exp() * (logp - ref)).sum()
    expected = torch.autograd.grad(exact, logits)[0]
    # An expectation instead of samples: one row per token, weighted by its probability through the advantage-free loss
    logp = logits.log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    value = 0.0
    for token in range(7):
        own, fixed = logp[token].view(1, 1), logp[token].detach().view(1, 1)
        loss, stats = policy_loss(
            own, fixed, torch.zeros(1, dtype=torch.float64), torch.ones(1, 1), ref_logps=ref[token].view(1, 1), beta=1.0,
            kl_estimator=estimator, use_bias_correction_kl=True,
        )  # fmt: skip
        total = total + fixed.exp().squeeze() * loss
        value += float(fixed.exp()) * stats.kl
    assert value == pytest.approx(exact.item(), rel=0.2)
    found = torch.autograd.grad(total, logits)[0]
    if estimator == "k2":  # biased in the second order
        assert torch.allclose(found, expected, atol=3e-3)
    else:
        assert torch.allclose(found, expected, atol=1e-12)


def test_group_expectation_is_gepos_coefficient():
    """learner probability / (sum q^2 / sum q), both as geometric means over the tokens."""
    t = tensors()
    group = torch.tensor([4, 4, 7])
    lengths = t["mask"].sum(-1)
    q = ((t["sampler_logps"] * t["mask"]).sum(-1) / lengths).exp()
    p = ((t["logps"] * t["mask"]).sum(-1) / lengths).exp()
    denominators = torch.stack([(q[:2] ** 2).sum() / q[:2].sum()] * 2 + [q[2]])
    weights = importance_weights(
        t["old_logps"], t["sampler_logps"], t["mask"], mode="group_expectation", cap=None,
        group_log_expectation=group_log_expectation(t["sampler_logps"], t["mask"], group),
    )  # fmt: skip
    logps = t["logps"].requires_grad_()
    loss, _ = policy_loss(
        logps, t["old_logps"], t["advantages"], t["mask"], importance_weights=weights, loss_type="luspo",
        importance_sampling_level="sequence", epsilon=0.999, epsilon_high=1e9,
    )  # fmt: skip
    assert loss.item() == pytest.approx(float(-(p / denominators * t["advantages"] * lengths).sum() / 3), abs=1e-12)
    with pytest.raises(ValueError, match="group_log_expectation"):
        importance_ratio(t["old_logps"], t["sampler_logps"], t["mask"], mode="group_expectation")


def test_group_expectation_survives_what_the_sampler_could_not_score():
    sampler = torch.tensor([[float("nan"), -1.0], [-2.0, float("nan")], [float("nan"), float("nan")]])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    found = group_log_expectation(sampler, mask, torch.zeros(3, dtype=torch.int64))
    q = torch.tensor([-1.0, -2.0]).exp()
    assert found.exp().squeeze(1).tolist() == pytest.approx([((q**2).sum() / q.sum()).item()] * 3, rel=1e-6)
    weights = importance_weights(
        torch.zeros(3, 2), sampler, mask, mode="group_expectation", cap=2.0, group_log_expectation=found
    )
    assert weights.squeeze(1).tolist() == pytest.approx([2.0, 2.0, 1.0])


def test_the_distribution_of_ratios_sees_tokens_that_count():
    ratio = torch.tensor([[1.0, 2.0, 100.0], [3.0, 4.0, 5.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    found = ratio_distribution(ratio, mask)
    assert found == {"mean": 3.0, "min": 1.0, "p05": 1.0, "median": 3.0, "p95": 5.0, "max": 5.0}
    by_row = ratio_distribution(torch.tensor([[2.0], [float("inf")]]), torch.tensor([[1, 0], [0, 0]]))
    assert by_row["max"] == 2.0
    assert ratio_distribution(ratio, torch.zeros(2, 3)) == {}
    assert ratio_distribution(torch.tensor([[float("inf")]]), torch.ones(1, 1))["max"] < 1e9


def test_advantages_per_token():
    t = tensors()
    wide = t["advantages"].unsqueeze(1).expand(3, 4)
    by_row, _ = policy_loss(t["logps"], t["old_logps"], t["advantages"], t["mask"])
    by_token, _ = policy_loss(t["logps"], t["old_logps"], wide, t["mask"])
    assert by_row.item() == by_token.item()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"top_entropy_quantile": 0.5}, "needs entropies"),
        ({"entropy_coef": 0.1}, "needs entropies"),
        ({"loss_type": "banana"}, "loss_type"),
        ({"importance_sampling_level": "banana"}, "importance_sampling_level"),
        ({"kl_estimator": "k9", "beta": 0.1}, "kl_estimator"),
    ],
)
def test_options_that_cannot_be(options, text):
    t = tensors()
    with pytest.raises(ValueError, match=text):
        policy_loss(t["logps"], t["old_logps"], t["advantages"], t["mask"], ref_logps=t["ref_logps"], **options)
