"""Direct preference optimization (arXiv 2305.18290): a policy learns from preferences without a reward model.

Names, defaults and loss types are those of TRL 1.16's DPOConfig; the losses are in `dpo_losses.py`. The reference is the
model as it was before the first step, LoRA or not; its log-probs are computed once for all pairs, so that no second model is
kept. Trains on one machine: the result is an adapter or a model, which a run may start from. Neither reads files
(`preferences.py`) nor writes any (`export.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from .config import Table
from .dpo_losses import ANY_DIVERGENCE, SORTED, Divergence, DpoLoss, PairLogps, discount_tail, dpo_loss, pair_weights
from .models import LoadedModel, Progress
from .policy import Batch, pad_left, pad_right, token_scores
from .preferences import Preference, Prompt, epochs, is_chat, messages, plain, split
from .trainables import Trainables


class DpoConfig(Table):
    """How a policy learns from preferences, with TRL's names."""

    loss_type: tuple[DpoLoss, ...] = Field(default=("sigmoid",), min_length=1)
    """What the margin between a pair's implicit rewards is put through; "sigmoid" is DPO itself. One name, or several whose
    losses are added up, as in MPO ("sigmoid", "bco_pair", "sft")."""
    loss_weights: tuple[float, ...] | None = None
    """What each of several losses is multiplied with (MPO: 0.8, 0.2, 1.0); all 1 without."""
    beta: float = Field(default=0.1, gt=0)
    """How strongly the policy is held to the reference; for "ipo" the regularization tau. Lower moves it further."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs taken to be the wrong way round: for "robust" (0.1 is usual), "exo_pair" (1e-3), "aot"."""
    discopop_tau: float = Field(default=0.05, gt=0)
    """Temperature of "discopop"."""
    f_divergence_type: Divergence = "reverse_kl"
    """How distance from the reference is measured (f-DPO)."""
    f_alpha_divergence_coef: float = 0.5
    """The alpha of "alpha_divergence"."""
    use_weighting: bool = False
    """Weigh each pair by how likely the policy is to write it itself (WPO): for pairs that come from other models."""
    ld_alpha: float | None = Field(default=None, ge=0, le=1)
    """Weight of a completion's tokens beyond the other's length (LD-DPO), against learning that longer is better; None is 1."""
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

    @field_validator("loss_type", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _agree(self) -> DpoConfig:
        types = set(self.loss_type)
        if "exo_pair" in types and not self.label_smoothing:
            raise ValueError('loss_type = "exo_pair" needs label_smoothing above 0, for example 1e-3')
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_type):
            raise ValueError(f"{len(self.loss_weights)} loss_weights; expected one for each of {list(self.loss_type)}")
        if self.f_divergence_type != "reverse_kl" and not types <= ANY_DIVERGENCE:
            raise ValueError(
                f'f_divergence_type = "{self.f_divergence_type}" with {sorted(types - ANY_DIVERGENCE)}; '
                f"expected only loss types of {sorted(ANY_DIVERGENCE)}"
            )
        if self.use_weighting and types & SORTED:
            raise ValueError(
                f"use_weighting with {sorted(types & SORTED)}, which sort pairs; expected other loss types"
            )
        return self


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
        _logps(loaded, pairs, config, recompute=config.gradient_checkpointing),
        beta=config.beta,
        loss_type=config.loss_type,
        loss_weights=config.loss_weights,
        label_smoothing=config.label_smoothing,
        discopop_tau=config.discopop_tau,
        f_divergence_type=config.f_divergence_type,
        f_alpha_divergence_coef=config.f_alpha_divergence_coef,
    ).mean()


def _logps(
    loaded: LoadedModel, pairs: Sequence[_Pair], config: DpoConfig | None = None, *, recompute: bool = False
) -> PairLogps:
    """Of the model as it is; a pair's prompt is run once for both completions, where the model allows it."""
    config = config or DpoConfig()
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
    scores = token_scores(loaded.model, batch, with_log_sum_squares=config.use_weighting, recompute=recompute)
    chosen, rejected = scores.logps.chunk(2)
    lengths = chosen_lengths, rejected_lengths = completion_lengths[:n], completion_lengths[n:]
    whole, weights = scores.logps.sum(-1)[:n], None
    if scores.log_sum_squares is not None:
        squares = scores.log_sum_squares
        weights = pair_weights((chosen, rejected), (squares[:n], squares[n:]), lengths)
    sums = discount_tail(chosen, rejected, lengths, 1.0 if config.ld_alpha is None else config.ld_alpha)
    return PairLogps(
        chosen=sums[0],
        rejected=sums[1],
        ref_chosen=torch.tensor([p.ref_chosen for p in pairs], device=device),
        ref_rejected=torch.tensor([p.ref_rejected for p in pairs], device=device),
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
        chosen_whole=whole,
        weights=weights,
    )


@torch.no_grad()
def _with_reference(loaded: LoadedModel, pairs: Sequence[_Pair], config: DpoConfig, report: Progress) -> list[_Pair]:
    """The same pairs with the log-probs of the model as it is now."""
    done: list[_Pair] = []
    for start in range(0, len(pairs), config.batch_size):
        part = pairs[start : start + config.batch_size]
        found = _logps(loaded, part, config)
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
        found = _logps(loaded, part, config)
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
