"""Puts a `GrpoLearner` together from the configuration tables."""

from __future__ import annotations

from pathlib import Path

import torch

from .config import GrpoConfig, ModelConfig, RewardsConfig, TaskConfig, WarmupConfig
from .evaluate import is_tiny
from .learner import GrpoLearner
from .models import Progress, load_model
from .prompts import prompt_format
from .rewards import Rewards
from .tasks import load_task


def build_learner(
    *,
    model: ModelConfig,
    task: TaskConfig,
    rewards: RewardsConfig,
    grpo: GrpoConfig,
    warmup: WarmupConfig,
    run_seed: int,
    peer_seed: int,
    rewards_file: Path | None = None,
    cache_dir: Path | None = None,
    device: str = "auto",
    threads: int | None = None,
    progress: Progress | None = None,
) -> GrpoLearner:
    """Load model and task, check rewards, return the learner.

    Args:
        run_seed: equal on all peers: weights of `tiny`, LoRA's A, the data stream and its split.
        peer_seed: different on each: sampling.
        rewards_file: this node's reward file.
        cache_dir: for converted GGUF files.
        threads: torch's CPU threads, a setting of the whole process; None leaves it.

    Raises:
        ShoalError: anything named by the tables is missing or unusable.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    source = load_task(task, seed=run_seed)  # first: it is cheap and often what is wrong
    scorer = Rewards(rewards, source, rewards_file, length_max=grpo.max_completion_length)
    try:
        loaded = load_model(model, seed=run_seed, cache_dir=cache_dir, device=device, progress=progress)
        return GrpoLearner(
            loaded,
            source,
            grpo=grpo,
            warmup=warmup,
            prompts=prompt_format(task, loaded.tokenizer, is_tiny=is_tiny(loaded)),
            rewards=scorer,
            peer_seed=peer_seed,
        )
    except BaseException:
        scorer.close()
        raise
