"""A Bradley-Terry reward model: trained on preferences, then a reward (RLHF).

A causal LM's body with one linear score at the last token of prompt and completion, kept in transformers' own form (a
sequence classifier with one label), so that published reward models of that kind load as well. The probability that A is
better than B is sigmoid(score(A) - score(B)) (Bradley and Terry 1952; as in InstructGPT, arXiv 2203.02155, equation 1).
Scores have no fixed zero: only differences mean something, and group-relative advantages use nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ...protocol.errors import ExitCode, ShoalError
from .config import LoraConfig
from .models import LoadedModel, Progress, add_lora, pick_device
from .policy import pad_right
from .preferences import Preference, Prompt, as_prompt, epochs, is_chat, messages, plain, split
from .rewards import Batch

ROWS_MAX = 32  # texts per forward pass when scoring


class RewardModel:
    """Scores of texts.

    Attributes:
        model: a sequence classifier with one label.
        tokenizer: of the same model.
    """

    def __init__(self, model: Any, tokenizer: Any, device: torch.device) -> None:
        self.model, self.tokenizer, self._device = model, tokenizer, device
        self._head = model.score
        limit = getattr(model.config, "max_position_embeddings", None)
        self._length_max = int(limit) if limit else 1 << 20

    @classmethod
    def on(cls, loaded: LoadedModel, *, lora: LoraConfig | None = None, seed: int = 0) -> RewardModel:
        """The body of a language model with a new head, which is zero: all texts are equal at first.

        Args:
            lora: train these adapters in the body in place of its weights; `merge` makes them part of it.

        Raises:
            ShoalError: transformers has no sequence classifier of this kind.
        """
        source = loaded.model.get_base_model() if loaded.is_lora else loaded.model
        config = type(source.config)(**source.config.to_dict())
        config.num_labels, config.pad_token_id = 1, loaded.pad_id
        try:
            with torch.random.fork_rng(devices=[]):
                model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
            _check_head(model, source.config.model_type)
        except ValueError as error:
            raise _unusable(str(source.config.model_type), str(error).splitlines()[0]) from error
        model.base_model.load_state_dict(source.base_model.state_dict())
        torch.nn.init.zeros_(model.score.weight)
        if lora is not None:
            setattr(model, model.base_model_prefix, add_lora(model.base_model, lora, seed=seed, task_type=None))
        return cls(model.to(loaded.device).eval(), loaded.tokenizer, loaded.device)

    @classmethod
    def load(cls, folder: Path, *, device: str = "auto") -> RewardModel:
        """From a folder written by `save`, or of any sequence classifier with one label on a causal LM.

        Raises:
            ShoalError: there is none.
        """
        target = pick_device(device)
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
            model = AutoModelForSequenceClassification.from_pretrained(
                str(folder), trust_remote_code=False, use_safetensors=True, dtype=torch.float32
            )
            _check_head(model, str(folder))
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
            raise _unusable(str(folder), str(error).splitlines()[0] if str(error) else repr(error)) from error
        return cls(model.to(target).eval().requires_grad_(False), tokenizer, target)

    def merge(self) -> None:
        """Make adapters, where there are any, part of the weights."""
        body = self.model.base_model
        if isinstance(body, PeftModel):
            setattr(self.model, self.model.base_model_prefix, body.merge_and_unload())

    def trained(self) -> list[Tensor]:
        """What training moves, from now on with a gradient: adapters and head, or all weights."""
        adapters = isinstance(self.model.base_model, PeftModel)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not adapters or ".lora_" in name or name.startswith("score."))
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def save(self, folder: Path) -> None:
        """Write weights, with adapters merged, and tokenizer."""
        self.merge()
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def __call__(self, batch: Batch) -> list[float | None]:
        """The reward "reward_model": one score per completion; None for one that does not fit or is not finite."""
        texts = [(as_prompt(prompt), text) for prompt, text in zip(batch.prompts, batch.texts, strict=True)]
        distinct = list(dict.fromkeys(texts))
        known = dict(zip(distinct, self.score(distinct), strict=True))
        return [known[text] for text in texts]

    @torch.no_grad()
    def score(self, texts: Sequence[tuple[Prompt, str]]) -> list[float | None]:
        """Scores of (prompt, completion)."""
        rows = [self._encode(*text) for text in texts]
        fits = sorted((i for i, row in enumerate(rows) if len(row) <= self._length_max), key=lambda i: len(rows[i]))
        scores: list[float | None] = [None] * len(rows)
        for start in range(0, len(fits), ROWS_MAX):
            part = fits[start : start + ROWS_MAX]
            for i, value in zip(part, self._scores([rows[i] for i in part]).tolist(), strict=True):
                scores[i] = value if math.isfinite(value) else None
        return scores

    def loss(self, pairs: Sequence[Preference]) -> tuple[Tensor, float]:
        """Mean of -log sigmoid(score(chosen) - score(rejected)), with gradient; and the share of pairs in order."""
        rows = [self._encode(p.prompt, p.chosen) for p in pairs] + [self._encode(p.prompt, p.rejected) for p in pairs]
        chosen, rejected = self._scores([row[-self._length_max :] for row in rows]).chunk(2)
        margin = chosen - rejected
        return -functional.logsigmoid(margin).mean(), float((margin > 0).float().mean())

    def _scores(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """fp32 [rows]. The last token is found by length, not by looking for padding, which may equal a real token."""
        ids, lengths = pad_right(rows, int(self.tokenizer.pad_token_id or 0), self._device)
        mask = torch.arange(ids.shape[1], device=self._device).unsqueeze(0) < lengths.unsqueeze(1)
        hidden = self.model.base_model(input_ids=ids, attention_mask=mask.long(), use_cache=False).last_hidden_state
        last = hidden[torch.arange(len(ids), device=self._device), lengths - 1]
        return self._head(last).squeeze(-1).float()

    def _encode(self, prompt: Prompt, completion: str) -> list[int]:
        tokenizer = self.tokenizer
        if is_chat(prompt, tokenizer):
            talk = [*messages(prompt), {"role": "assistant", "content": completion}]
            return list(
                tokenizer(tokenizer.apply_chat_template(talk, tokenize=False), add_special_tokens=False).input_ids
            )
        return [*tokenizer(plain(prompt) + completion).input_ids, int(tokenizer.eos_token_id)]


def train_reward_model(
    reward_model: RewardModel,
    preferences: Sequence[Preference],
    *,
    steps: int,
    learning_rate: float = 1e-5,
    batch_size: int = 16,
    weight_decay: float = 0.0,
    held_out: float = 0.1,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Train in place on shuffled epochs.

    Args:
        held_out: share of the prompts kept aside for "accuracy"; a prompt is on one side alone.

    Returns:
        "loss" (mean of the last tenth of the steps), "accuracy" (share of held-out pairs in order), "pairs", "held_out".
    """
    train, test = split(preferences, held_out, seed)
    trained = reward_model.trained()
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=weight_decay)
    losses: list[float] = []
    for step, batch in zip(range(steps), epochs(train, batch_size, seed), strict=False):
        loss, _ = reward_model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        if torch.isfinite(norm):
            optimizer.step()
            losses.append(float(loss.detach()))
        if progress:
            progress("reward model", (step + 1) / steps)
    reward_model.model.requires_grad_(False)
    tail = losses[-max(1, len(losses) // 10) :]
    right = 0.0
    with torch.no_grad():
        for start in range(0, len(test), batch_size):
            part = test[start : start + batch_size]
            right += reward_model.loss(part)[1] * len(part)
    return {
        "loss": math.fsum(tail) / len(tail) if tail else math.nan,
        "accuracy": right / len(test) if test else math.nan,
        "pairs": float(len(train)),
        "held_out": float(len(test)),
    }


def _check_head(model: Any, name: str) -> None:
    weight = getattr(getattr(model, "score", None), "weight", None)
    if weight is None or weight.shape[0] != 1:
        shape = None if weight is None else tuple(weight.shape)
        raise ValueError(f"{name}: the head is {shape}, expected one score")


def _unusable(name: str, cause: str) -> ShoalError:
    return ShoalError(
        f"There is no reward model in {name}.",
        values=f"expected a sequence classifier with one label and safetensors weights; got: {cause}",
        todo="Correct rewards.reward_model; `shoal reward-model` writes one.",
        code=ExitCode.DEPENDENCY,
    )
