"""Random shapes, masks and options against the loss of an installed TRL 1.16, in fp64.

TRL is no dependency of shoal: without it these tests are skipped. Run them with `pip install trl==1.16.0` in the
environment and `SHOAL_LONG=1 pytest tests/node/rl/test_losses_trl.py`.
"""

import importlib.metadata
import importlib.util
from types import SimpleNamespace

import pytest
import torch

from shoal.node.rl.losses import importance_weights, policy_loss

VERSION = importlib.metadata.version("trl") if importlib.util.find_spec("trl") else "none"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not VERSION.startswith("1.16"), reason=f"needs trl 1.16, found {VERSION}"),
]
CASES = 500
LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo"]
MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class OneProcess:
    """The part of an accelerator that TRL's loss asks for."""

    num_processes = 1
    sync_gradients = True

    def gather(self, tensor):
        return tensor

    gather_for_metrics = gather

    def pad_across_processes(self, tensor, dim=0, pad_index=0):
        return tensor

    def reduce(self, tensor, reduction="sum"):
        return tensor


def draw(seed):
    """One random case: tensors and options under TRL's names."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low, high):
        return low + (high - low) * float(torch.rand(1, generator=generator, dtype=torch.float64))

    def pick(choices):
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    rows, width = 1 + int(uniform(0, 6)), 1 + int(uniform(0, 9))
    lengths = torch.randint(0, width + 1, (rows,), generator=generator)
    lengths[int(uniform(0, rows))] = width
    mask = (torch.arange(width) < lengths.unsqueeze(1)).long()
    if pick([True, False, False]):
        mask = mask * (torch.rand(rows, width, generator=generator) < 0.8)  # as tool tokens do

    def noisy(base, spread):
        return base + spread * torch.randn(rows, width, generator=generator, dtype=torch.float64)

    old = -3 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    spread = pick([0.0, 0.05, 0.5])
    sampler = noisy(old, pick([0.0, 0.1, 0.6]))
    if pick([True, False, False, False]):
        sampler[torch.rand(rows, width, generator=generator) < 0.1] = torch.nan
    loss_type = pick(LOSSES)
    level = "token" if loss_type == "vespo" else "sequence" if loss_type == "luspo" else pick(["token", "sequence"])
    options = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "epsilon": pick([0.2, 3e-4, 0.1]),
        "epsilon_high": pick([None, 0.28, 5.0]),
        "delta": pick([None, None, 1.3, 8.0]),
        "beta": pick([0.0, 0.04, 0.5]),
        "use_bias_correction_kl": pick([True, False]),
        "off_policy_mask_threshold": pick([None, None, 0.05, 0.3]),
        "top_entropy_quantile": pick([1.0, 1.0, 0.5, 0.2, 0.0]),
        "entropy_coef": pick([0.0, 0.0, 0.01, -0.1]),
        "sapo_temperature_pos": pick([1.0, 0.5]),
        "sapo_temperature_neg": pick([1.05, 2.0]),
        "vespo_k_pos": pick([2.0, 1.5]),
        "vespo_lambda_pos": pick([3.0, 1.0]),
        "vespo_k_neg": pick([3.0, 0.5]),
        "vespo_lambda_neg": pick([2.0, 4.0]),
        "max_completion_length": width + pick([0, 3]),
    }
    mode = pick([None, *(m for m in MODES if loss_type != "vespo" or m.startswith("token"))])
    return SimpleNamespace(
        logps=noisy(old, spread),
        old_logps=old,
        sampler_logps=sampler,
        ref_logps=noisy(old, 0.3),
        entropies=torch.rand(rows, width, generator=generator).double(),  # exact in fp32: TRL's quantile is fp32
        advantages=torch.where(
            torch.rand(rows, generator=generator) < 0.1, 0.0, torch.randn(rows, generator=generator)
        ).double(),
        mask=mask,
        options=options,
        mode=mode,
        cap=pick([3.0, 1.2]),
        floor=pick([None, None, 0.7]),
    )


def weights_of(case):
    if case.mode is None:
        return None
    return importance_weights(
        case.old_logps, case.sampler_logps, case.mask, mode=case.mode, cap=case.cap, floor=case.floor
    )


def trl_loss(case, logps, entropies):
    """The loss as TRL's own code computes it, its model call replaced by the tensors of the case."""
    from collections import defaultdict

    from trl import GRPOTrainer

    options = SimpleNamespace(**case.options, steps_per_generation=1)
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    high = options.epsilon if options.epsilon_high is None else options.epsilon_high
    vars(trainer).update(
        args=options,
        accelerator=OneProcess(),
        model=SimpleNamespace(training=True),
        loss_type=options.loss_type,
        importance_sampling_level=options.importance_sampling_level,
        epsilon_low=options.epsilon,
        epsilon_high=high,
        beta=options.beta,
        off_policy_mask_threshold=options.off_policy_mask_threshold,
        top_entropy_quantile=options.top_entropy_quantile,
        max_completion_length=options.max_completion_length,
        use_vllm=case.mode is not None,
        vllm_importance_sampling_correction=case.mode is not None,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        entropy_coef=options.entropy_coef,
        _entropy_bonus_enabled=options.entropy_coef != 0,
        current_gradient_accumulation_steps=1,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logps, entropies, None),
    )
    rows = len(case.mask)
    inputs = {
        "prompt_ids": torch.zeros(rows, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(rows, 1, dtype=torch.int64),
        "completion_ids": torch.zeros_like(case.mask),
        "completion_mask": case.mask,
        "advantages": case.advantages,
        "old_per_token_logps": case.old_logps,
        "ref_per_token_logps": case.ref_logps,
        "num_items_in_batch": case.mask.sum(),
    }
    if case.mode is not None:
        inputs |= {"sampling_per_token_logps": case.sampler_logps, "importance_sampling_ratio": weights_of(case)}
    return trainer._compute_loss(None, inputs)


@pytest.mark.parametrize("seed", range(CASES))
def test_loss_and_gradient_equal_trls(seed):
    case = draw(seed)
    theirs = [x.clone().requires_grad_() for x in (case.logps, case.entropies)]
    ours = [x.clone().requires_grad_() for x in (case.logps, case.entropies)]
    expected = trl_loss(case, *theirs)
    found, _ = policy_loss(
        ours[0],
        case.old_logps,
        case.advantages,
        case.mask,
        ref_logps=case.ref_logps,
        sampler_logps=case.sampler_logps if case.mode is not None else None,
        importance_weights=weights_of(case),
        entropies=ours[1],
        **case.options,
    )
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)
    expected.backward()
    found.backward()
    for own, other in zip(ours, theirs):
        zeros = torch.zeros_like(own)
        assert torch.allclose(own.grad if own.grad is not None else zeros,
                              other.grad if other.grad is not None else zeros, rtol=0, atol=1e-6)  # fmt: skip
