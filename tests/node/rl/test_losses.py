"""Losses against reference values, and the laws they must obey."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.node.rl.losses import BatchTotals, importance_weights, policy_loss

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
