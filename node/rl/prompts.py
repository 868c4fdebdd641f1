"""From a task's example to what the model reads: chat template, plain text, or the short form for the tiny model.

Does not decide what is sampled (`rollout.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from .config import TaskConfig
from .tasks import Example

_BLANKS_AROUND_SYMBOLS = re.compile(r"\s*([^\w\s])\s*")


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """How prompts are written for one model.

    Attributes:
        kind: "chat", "plain" or "short"; never "auto".
    """

    kind: Literal["chat", "plain", "short"]
    template: str
    system_prompt: str

    def message(self, example: Example) -> str | list[dict[str, str]]:
        """What reward functions see as the prompt: a conversation for "chat", else the text."""
        text = self.template.replace("{prompt}", example.prompt)
        if self.kind == "chat":
            system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
            return [*system, {"role": "user", "content": text}]
        return shorten(text) if self.kind == "short" else text

    def encode(self, tokenizer: Any, example: Example) -> list[int]:
        """Token ids of the prompt, ready for the model to continue."""
        message = self.message(example)
        if isinstance(message, str):
            return list(tokenizer(message).input_ids)
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    def completion(self, text: str) -> str | list[dict[str, str]]:
        """What reward functions see as the completion, in the same form as the prompt."""
        return [{"role": "assistant", "content": text}] if self.kind == "chat" else text


def prompt_format(config: TaskConfig, tokenizer: Any, *, is_tiny: bool) -> PromptFormat:
    """Resolve "auto": short for the built-in model, chat where the tokenizer has a template, else plain."""
    kind = config.prompt_format
    if kind == "auto":
        kind = "short" if is_tiny else "chat" if getattr(tokenizer, "chat_template", None) else "plain"
    return PromptFormat(kind=kind, template=config.prompt_template, system_prompt=config.system_prompt)


def shorten(text: str) -> str:
    """Keep what follows the last colon that is followed by text, without blanks around symbols.

    "State the final answer to the following arithmetic problem: 3 + 4 =" becomes "3+4=".
    """
    parts = [p for p in (part.strip() for part in text.split(":")) if p]
    return _BLANKS_AROUND_SYMBOLS.sub(r"\1", parts[-1]) if parts else text
