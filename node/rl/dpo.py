"""Direct preference optimization (arXiv 2305.18290): a policy learns from preferences without a reward model.

Names, defaults and loss types are those of TRL 1.16's DPOConfig. The reference is the model as it was before the first step,
LoRA or not; its log-probs are computed once for all pairs, so that no second model is kept. Trains on one machine: the result
is an adapter or a model, which a run may start from. Neither reads files (`preferences.py`) nor writes any (`export.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional

from .config import Table
from .models import LoadedModel, Progress
from .policy import Batch, completion_logps, pad_left, pad_right
from .preferences import Preference, Prompt, epochs, is_chat, messages, plain, split
from .trainables import Trainables

DpoLoss = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
]


class DpoConfig(Table):
    """How a policy learns from preferences, with TRL's names."""

    loss_type: DpoLoss = "sigmoid"
    """What the margin between a pair's implicit rewards is put through; "sigmoid" is DPO itself."""
    beta: float = Field(default=0.1, gt=0)
    """How strongly the policy is held to the reference; for "ipo" the regularization tau. Lower moves it further."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs taken to be the wrong way round: for "robust" (0.1 is usual), "exo_pair" (1e-3), "aot"."""
    discopop_tau: float = Field(default=0.05, gt=0)
    """Temperature of "discopop"."""
    learning_rate: float = Field(default=1e-6, gt=0, le=1)
    """AdamW step size at the start, falling linearly to 0. LoRA wants about ten times more."""
    num_train_epochs: int = Field(default=3, ge=1, le=1000)
    """Passes over the pairs."""
    max_steps: int = Field(default=0, ge=0)
    """Optimizer steps in place of epochs; 0 counts epochs."""
    batch_size: int = Field(default=8, ge=1, le=4096)
    """Pairs per forward pass (TRL's per_device_train_batch_size)."""
    gradient_accumulation_steps: int = Field(default=1, ge=1, le=4096)
    """Forward passes per optimizer step, whose losses are averaged."""
    max_length: int = Field(default=1024, ge=2, le=1 << 20)
    """Tokens of prompt and completion together; completions are cut there, and pairs whose prompt alone reaches it left out."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    weight_decay: float = Field(default=0.0, ge=0, lt=1)
    """AdamW's, on all parameters."""
    gradient_checkpointing: bool = True
    """Run the layers again in the backward pass instead of keeping their activations: less memory, more time."""
    held_out: float = Field(default=0.1, ge=0, lt=1)
    """Share of the prompts kept aside, for the figures that are reported."""

    @model_validator(mode="after")
    def _smooth(self) -> DpoConfig:
        if self.loss_type == "exo_pair" and not self.label_smoothing:
            raise ValueError('loss_type = "exo_pair" needs label_smoothing above 0, for example 1e-3')
        return self


@dataclass(frozen=True, kw_only=True)
class PairLogps:
    """Log-probs of n pairs, summed over each completion's tokens; fp32 or fp64 [n].

    Attributes:
        chosen_lengths, rejected_lengths: tokens of the completions, [n].
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor


def dpo_loss(
    logps: PairLogps,
    *,
    beta: float = 0.1,
    loss_type: DpoLoss = "sigmoid",
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
) -> Tensor:
    """Loss of each pair, [n]; what is minimized is its mean.

    "aot", "aot_unpaired" and "sft" look at all pairs together: their single values mean nothing, their mean does.

    Raises:
        ValueError: "exo_pair" without label_smoothing.
    """
    chosen, rejected = logps.chosen - logps.ref_chosen, logps.rejected - logps.ref_rejected
    margin = beta * (chosen - rejected)
    log_sigmoid = functional.logsigmoid
    match loss_type:
        case "sigmoid":
            return -log_sigmoid(margin)
        case "hinge":
            return torch.relu(1 - margin)
        case "ipo":  # arXiv 2310.12036, equation 17, per token
            return (chosen / logps.chosen_lengths - rejected / logps.rejected_lengths - 1 / (2 * beta)) ** 2
        case "sigmoid_norm":
            return -log_sigmoid(beta * (chosen / logps.chosen_lengths - rejected / logps.rejected_lengths))
        case "exo_pair":  # arXiv 2402.00856, equation 16
            right, wrong = torch.sigmoid(margin), torch.sigmoid(-margin)
            return right * (log_sigmoid(margin) - math.log1p(-label_smoothing)) + wrong * (
                log_sigmoid(-margin) - math.log(label_smoothing)
            )
        case "nca_pair":  # arXiv 2402.05369
            return -log_sigmoid(beta * chosen) - 0.5 * (log_sigmoid(-beta * chosen) + log_sigmoid(-beta * rejected))
        case "robust":  # arXiv 2403.00409
            kept, flipped = (1 - label_smoothing) * log_sigmoid(margin), label_smoothing * log_sigmoid(-margin)
            return (flipped - kept) / (1 - 2 * label_smoothing)
        case "bco_pair":  # arXiv 2404.04656, without its running shift
            return -log_sigmoid(beta * chosen) - log_sigmoid(-beta * rejected)
        case "sppo_hard":  # arXiv 2405.00675, equation 4.7 with certain preferences
            return (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2
        case "aot":  # arXiv 2406.05882
            policy = (logps.chosen - logps.rejected).sort().values
            return _smoothed(beta * (policy - (logps.ref_chosen - logps.ref_rejected).sort().values), label_smoothing)
        case "aot_unpaired":
            return _smoothed(beta * (chosen.sort().values - rejected.sort().values), label_smoothing)
        case "apo_zero":  # arXiv 2408.06266, equation 7
            return 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
        case "apo_down":  # the same, equation 8
            return torch.sigmoid(beta * chosen) + 1 - torch.sigmoid(margin)
        case "discopop":  # arXiv 2406.08414, equation 5
            blend = torch.sigmoid(margin / discopop_tau)
            return -log_sigmoid(margin) * (1 - blend) + torch.exp(-margin) * blend
        case "sft":
            return (-logps.chosen.sum() / logps.chosen_lengths.sum()).expand(len(chosen))


def _smoothed(margin: Tensor, smoothing: float) -> Tensor:
    return -functional.logsigmoid(margin) * (1 - smoothing) - functional.logsigmoid(-margin) * smoothing


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """Token ids, and the sums of the reference's log-probs."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    ref_chosen: float = math.nan
    ref_rejected: float = math.nan


def train_dpo(
    loaded: LoadedModel,
    preferences: Sequence[Preference],
    config: DpoConfig,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Train in place on shuffled epochs.

    Returns:
        "steps", "pairs", "held_out", "too_long" (pairs left out), "nonfinite_steps", "loss" (mean of the last tenth of the
        steps); and of the held-out pairs, under TRL's names, "eval_loss", "eval_rewards/accuracies" (share of pairs whose
        chosen completion gained more against the reference), "eval_rewards/margins" and "eval_logps/chosen".

    Raises:
        ValueError: no pair fits into `max_length`.
    """
    report = progress or (lambda stage, share: None)
    sides = split(preferences, config.held_out, seed)
    train, test = ([p for p in (_encode(loaded, p, config.max_length) for p in side) if p] for side in sides)
    too_long = len(preferences) - len(train) - len(test)
    if not train:
        raise ValueError(f"none of {len(preferences)} pairs has a prompt shorter than max_length = {config.max_length}")
    train = _with_reference(loaded, train, config, report)
    test = _with_reference(loaded, test, config, report)
    if loaded.is_lora and any(c.lora_dropout > 0 for c in loaded.model.peft_config.values()):
        loaded.model.train()
    try:
        losses, skipped = _optimize(loaded, train, config, seed, report)
    finally:
        loaded.model.eval()
    tail = losses[-max(1, len(losses) // 10) :]
    return {
        "steps": float(len(losses)),
        "pairs": float(len(train)),
        "held_out": float(len(test)),
        "too_long": float(too_long),
        "nonfinite_steps": float(skipped),
        "loss": math.fsum(tail) / len(tail) if tail else math.nan,
        **_evaluate(loaded, test, config),
    }


def _optimize(
    loaded: LoadedModel, train: Sequence[_Pair], config: DpoConfig, seed: int, report: Progress
) -> tuple[list[float], int]:
    """Losses of the steps taken, and how many were not finite."""
    trainables = Trainables(loaded.model)
    optimizer = torch.optim.AdamW(trainables.masters, lr=config.learning_rate, weight_decay=config.weight_decay)
    passes = -(-len(train) // config.batch_size)
    steps = config.max_steps or -(-config.num_train_epochs * passes // config.gradient_accumulation_steps)
    batches = epochs(train, config.batch_size, seed)
    losses: list[float] = []
    skipped = 0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * (1 - step / steps)
        trainables.zero_grad()
        total = 0.0
        for _ in range(config.gradient_accumulation_steps):
            loss = _loss(loaded, next(batches), config) / config.gradient_accumulation_steps
            loss.backward()
            total += float(loss.detach())
        norm = float(trainables.collect_grads())
        if not math.isfinite(norm + total):
            skipped += 1
            continue
        if norm > config.max_grad_norm:
            trainables.scale_grads(config.max_grad_norm / norm)
        optimizer.step()
        trainables.publish()
        losses.append(total)
        report("preferences", (step + 1) / steps)
    trainables.zero_grad()
    return losses, skipped


def _loss(loaded: LoadedModel, pairs: Sequence[_Pair], config: DpoConfig) -> Tensor:
    return dpo_loss(
        _logps(loaded, pairs, recompute=config.gradient_checkpointing),
        beta=config.beta,
        loss_type=config.loss_type,
        label_smoothing=config.label_smoothing,
        discopop_tau=config.discopop_tau,
    ).mean()


def _logps(loaded: LoadedModel, pairs: Sequence[_Pair], *, recompute: bool = False) -> PairLogps:
    """Of the model as it is; a pair's prompt is run once for both completions, where the model allows it."""
    device, n = loaded.device, len(pairs)
    prompt_ids, prompt_lengths = pad_left([p.prompt for p in pairs], loaded.pad_id, device)
    replies = [p.chosen for p in pairs] + [p.rejected for p in pairs]
    completion_ids, completion_lengths = pad_right(replies, loaded.pad_id, device)
    batch = Batch(
        prompt_ids=prompt_ids,
        prompt_lengths=prompt_lengths,
        prompt_of=torch.arange(n, device=device).repeat(2),
        completion_ids=completion_ids,
        completion_lengths=completion_lengths,
    )
    chosen, rejected = completion_logps(loaded.model, batch, recompute=recompute).sum(-1).chunk(2)
    chosen_lengths, rejected_lengths = completion_lengths.chunk(2)
    return PairLogps(
        chosen=chosen,
        rejected=rejected,
        ref_chosen=torch.tensor([p.ref_chosen for p in pairs], device=device),
        ref_rejected=torch.tensor([p.ref_rejected for p in pairs], device=device),
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
    )


@torch.no_grad()
def _with_reference(loaded: LoadedModel, pairs: Sequence[_Pair], config: DpoConfig, report: Progress) -> list[_Pair]:
    """The same pairs with the log-probs of the model as it is now."""
    done: list[_Pair] = []
    for start in range(0, len(pairs), config.batch_size):
        part = pairs[start : start + config.batch_size]
        found = _logps(loaded, part)
        for pair, chosen, rejected in zip(part, found.chosen.tolist(), found.rejected.tolist(), strict=True):
            fields = {"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected}
            done.append(_Pair(**fields, ref_chosen=chosen, ref_rejected=rejected))
        report("reference", len(done) / len(pairs))
    return done


@torch.no_grad()
def _evaluate(loaded: LoadedModel, pairs: Sequence[_Pair], config: DpoConfig) -> dict[str, float]:
    sums = dict.fromkeys(("eval_loss", "eval_rewards/accuracies", "eval_rewards/margins", "eval_logps/chosen"), 0.0)
    for start in range(0, len(pairs), config.batch_size):
        part = pairs[start : start + config.batch_size]
        found = _logps(loaded, part)
        margins = config.beta * ((found.chosen - found.ref_chosen) - (found.rejected - found.ref_rejected))
        sums["eval_loss"] += float(_loss(loaded, part, config)) * len(part)
        sums["eval_rewards/accuracies"] += float((margins > 0).sum())
        sums["eval_rewards/margins"] += float(margins.sum())
        sums["eval_logps/chosen"] += float(found.chosen.sum())
    return {name: total / len(pairs) if pairs else math.nan for name, total in sums.items()}


def _encode(loaded: LoadedModel, preference: Preference, max_length: int) -> _Pair | None:
    """A pair's token ids as a sampler would have made them: completions end with the end-of-sequence token."""
    tokenizer = loaded.tokenizer
    prompt = encode_prompt(tokenizer, preference.prompt)
    if not 0 < len(prompt) < max_length:
        return None

    def reply(text: str) -> list[int]:
        ids = [*tokenizer(text, add_special_tokens=False).input_ids, int(tokenizer.eos_token_id)]
        return ids[: max_length - len(prompt)]

    return _Pair(prompt=prompt, chosen=reply(preference.chosen), rejected=reply(preference.rejected))


def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a prompt, ready for the model to continue, as a run's policy reads it."""
    if is_chat(prompt, tokenizer):
        text = tokenizer.apply_chat_template(messages(prompt), tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False).input_ids)
    return list(tokenizer(plain(prompt)).input_ids)
