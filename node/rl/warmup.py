"""A short supervised stage on prompt -> answer pairs, so that RL starts from a model that is sometimes right.

Bounded by steps and by time, and can stop at a sampled reward, so that RL keeps room to improve. Run once, by the
founder of a run: its result is the run's first shared state. Uses an optimizer of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .config import GrpoConfig, WarmupConfig
from .evaluate import measure
from .models import LoadedModel, Progress
from .policy import completion_logps
from .prompts import PromptFormat
from .rewards import Rewards
from .rollout import pairs
from .tasks import Example, Task
from .trainables import Trainables

FIRST_INDEX = 1 << 40  # examples from a part of the training stream that RL does not reach
CHECK_STEPS = 20  # steps between looks at the sampled reward
CHECK_PROMPTS = 128
RATE_END = 0.1  # of the learning rate, reached linearly: the noise of a constant rate would hide what was learned
# Share of the time that counts as none of it when the rate is decayed by time.
TIME_SLACK = 0.25
LOSS_DECAY = 0.95  # of the running mean that is reported


def run_warmup(
    loaded: LoadedModel,
    task: Task,
    *,
    config: WarmupConfig,
    grpo: GrpoConfig,
    prompts: PromptFormat,
    rewards: Rewards,
    trainables: Trainables,
    progress: Progress | None,
    clock: Callable[[], float],
) -> dict[str, float]:
    """Train in place.

    Returns:
        "steps", "seconds", "loss" (running mean of the negative log-likelihood per token) and "nonfinite_steps".
    """
    optimizer = torch.optim.AdamW(trainables.masters, lr=config.learning_rate, weight_decay=0.0)
    start, index, taken, skipped, running = clock(), FIRST_INDEX, 0, 0, math.nan
    for step in range(config.steps):
        if clock() - start >= config.seconds_max:
            break
        if config.target_reward is not None and step and step % CHECK_STEPS == 0:
            sample = [task.train(FIRST_INDEX - 1 - i) for i in range(CHECK_PROMPTS)]
            found = measure(loaded, task, config=grpo, prompts=prompts, rewards=rewards, examples=sample)
            if found["reward"] >= config.target_reward:
                break
        # By time only where steps are clearly too slow: two warm-ups of one seed are to end with the same bits.
        late = ((clock() - start) / config.seconds_max - TIME_SLACK) / (1 - TIME_SLACK)
        done = max(step / config.steps, late)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * (1 - (1 - RATE_END) * min(1.0, done))
        examples = []
        while len(examples) < config.batch_size:
            examples.append(task.train(index))
            index += 1
        loss = _negative_log_likelihood(loaded, task, examples, prompts)
        trainables.zero_grad()
        value = float(loss.detach())
        norm = math.nan
        if math.isfinite(value):
            loss.backward()
            norm = float(trainables.collect_grads())
        if not math.isfinite(norm):
            skipped += 1
            continue
        if norm > 1.0:
            trainables.scale_grads(1.0 / norm)
        optimizer.step()
        trainables.publish()
        taken += 1
        running = value if math.isnan(running) else LOSS_DECAY * running + (1 - LOSS_DECAY) * value
        if progress:
            progress("warm-up", (step + 1) / config.steps)
    trainables.zero_grad()
    return {"steps": float(taken), "seconds": clock() - start, "loss": running, "nonfinite_steps": float(skipped)}


def _negative_log_likelihood(
    loaded: LoadedModel, task: Task, examples: list[Example], prompts: PromptFormat
) -> torch.Tensor:
    """Mean over the tokens of the answers and their end-of-sequence tokens."""
    tokenizer = loaded.tokenizer
    wrap = "<answer>{}</answer>" if task.config.extract == "tag" else "{}"
    end = int(tokenizer.eos_token_id)  # type: ignore[arg-type]
    answers = [
        [*tokenizer(wrap.format(e.answer), add_special_tokens=False).input_ids, end]  # type: ignore[operator]
        for e in examples
    ]
    batch = pairs([prompts.encode(tokenizer, e) for e in examples], answers, pad_id=loaded.pad_id, device=loaded.device)
    logps = completion_logps(loaded.model, batch)
    mask = batch.completion_mask()
    return -torch.where(mask, logps, torch.zeros_like(logps)).sum() / mask.sum()
