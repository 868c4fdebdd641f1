"""A judge in this process: a causal LM that reads a question and gives the odds of the words that may answer it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....protocol.errors import ExitCode, ShoalError
from ..models import LoadedModel
from ..policy import pad_left, positions


class LocalReader:
    """Next-token odds of a loaded model, over a few options. Not for two threads at a time."""

    def __init__(self, loaded: LoadedModel, *, batch_size: int = 16) -> None:
        self._loaded, self._batch_size = loaded, batch_size
        self._ids: dict[tuple[str, ...], list[list[int]]] = {}  # options -> token ids of each
        limit = getattr(loaded.model.config, "max_position_embeddings", None)
        self._length_max = int(limit) if limit else 1 << 20

    def close(self) -> None: ...

    @torch.no_grad()
    def probabilities(self, questions: Sequence[str], options: Sequence[str]) -> list[list[float] | None]:
        """One forward pass per question; a question longer than the model's context has no answer.

        Raises:
            ShoalError: an option is no single token of this model.
        """
        option_ids = self._option_ids(tuple(options))
        rows = [self._encode(question) for question in questions]
        fits = [i for i, row in enumerate(rows) if 0 < len(row) <= self._length_max]
        fits.sort(key=lambda i: len(rows[i]))  # less padding
        answers: list[list[float] | None] = [None] * len(rows)
        for start in range(0, len(fits), self._batch_size):
            part = fits[start : start + self._batch_size]
            logits = self._next_logits([rows[i] for i in part])  # [rows, vocabulary]
            odds = torch.stack([torch.logsumexp(logits[:, ids], dim=-1) for ids in option_ids], dim=-1)
            for i, p in zip(part, odds.softmax(-1).tolist(), strict=True):
                answers[i] = p
        return answers

    def _next_logits(self, rows: list[list[int]]) -> torch.Tensor:
        device = self._loaded.device
        ids, lengths = pad_left(rows, self._loaded.pad_id, device)
        width = ids.shape[1]
        mask = torch.arange(width, device=device).unsqueeze(0) >= width - lengths.unsqueeze(1)
        output: Any = self._loaded.model(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=positions(mask),
            logits_to_keep=1,
            use_cache=False,
        )
        return output.logits[:, -1].float()

    def _encode(self, question: str) -> list[int]:
        tokenizer = self._loaded.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            return list(tokenizer(question.rstrip()).input_ids)
        messages = [{"role": "user", "content": question.rstrip()}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    def _option_ids(self, options: tuple[str, ...]) -> list[list[int]]:
        if options not in self._ids:
            self._ids[options] = [self._tokens_of(option) for option in options]
        return self._ids[options]

    def _tokens_of(self, option: str) -> list[int]:
        """The single tokens that write an option, with and without a blank before it."""
        found = set()
        for text in (option, " " + option):
            ids = self._loaded.tokenizer(text, add_special_tokens=False).input_ids
            if len(ids) == 1 and ids[0] != self._loaded.tokenizer.unk_token_id:
                found.add(int(ids[0]))
        if not found:
            raise ShoalError(
                "The judge's model cannot answer with one token.",
                values=f"expected a single token for {option!r}, its tokenizer has none",
                todo="Lower judge.backend.rating_max, or use another model.",
                code=ExitCode.CONFIG,
            )
        return sorted(found)
