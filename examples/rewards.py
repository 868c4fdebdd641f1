"""A reward file as TRL's GRPOTrainer takes it; shoal takes it as it is.

    [run.rewards]
    functions = ["task", "digits_only", "near", "hard_ones_count_twice"]   # "task" is built in
    [node]
    rewards_file = "examples/rewards.py"

Functions get what TRL gives: prompts, completions, completion_ids, every column of the data set, trainer_state,
log_metric and log_extra. Prompts and completions are texts, or lists of messages where the model has a chat template.
"""

import asyncio
import re


def text_of(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def digits_only(completions, **kwargs):
    """The share of the characters that are digits."""
    texts = [text_of(completion).strip() for completion in completions]
    return [sum(c.isdigit() for c in text) / len(text) if text else 0.0 for text in texts]


def near(prompts, completions, answer, trainer_state=None, log_metric=None, **kwargs):
    """1 for the right number, less the farther off it is; does not apply where there is no number. `answer` is a column."""
    numbers = [re.search(r"-?\d+", text_of(completion)) for completion in completions]
    if log_metric is not None:
        log_metric("has_number", sum(n is not None for n in numbers) / len(numbers))
        log_metric("conversational", float(not isinstance(prompts[0], str)))
        log_metric("global_step", trainer_state.global_step)
    return [None if n is None else 1 / (1 + abs(int(n[0]) - int(a))) for n, a in zip(numbers, answer)]


async def hard_ones_count_twice(completions, answer, level, **kwargs):
    """1 for the right answer to a hard question; does not apply to others. Async: such functions of a file run together."""
    await asyncio.sleep(0)  # here one would wait for a service
    return [
        float(text_of(completion).strip() == str(a)) if which == "hard" else None
        for completion, a, which in zip(completions, answer, level)
    ]
