"""Puts a `GrpoLearner` together from the configuration tables."""

from __future__ import annotations

from pathlib import Path

import torch

from .config import (
    GrpoConfig,
    JudgeBackend,
    JudgeConfig,
    ModelConfig,
    RewardsConfig,
    SamplerConfig,
    TaskConfig,
    WarmupConfig,
)
from .evaluate import is_tiny
from .learner import GrpoLearner
from .models import LoadedModel, Progress, load_model
from .preferences import PreferenceLog
from .prompts import prompt_format
from .rewards import Rewards, Scorer
from .rollout import Sampler
from .server_sampler import ServerSampler
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
    judge: JudgeConfig | None = None,
    judge_backend: JudgeBackend | None = None,
    private: bool = False,
    preferences_file: Path | None = None,
    sampler: SamplerConfig | None = None,
    push_dir: Path | None = None,
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
        judge: how the reward "judge" works, where it is used; `judge_backend` replaces its backend on this node.
        private: the task is this node's private data: no peer is asked to judge it.
        preferences_file: where to append what judges prefer.
        sampler: where completions come from; None or kind "builtin": the trainer itself.
        push_dir: where a server's sampler puts what it pushes, if its table names no folder.
        cache_dir: for converted GGUF files.
        threads: torch's CPU threads, a setting of the whole process; None leaves it.

    Raises:
        ShoalError: anything named by the tables is missing or unusable.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    source = load_task(task, seed=run_seed)  # first: it is cheap and often what is wrong
    models = model_rewards(
        rewards,
        judge or JudgeConfig(),
        judge_backend,
        seed=run_seed,
        rewards_file=rewards_file,
        private=private,
        preferences_file=preferences_file,
        cache_dir=cache_dir,
        device=device,
        progress=progress,
    )
    scorer = Rewards(rewards, source, rewards_file, length_max=grpo.max_completion_length, models=models)
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
            sampler=_sampler(loaded, sampler, push_dir),
        )
    except BaseException:
        scorer.close()
        raise


def _sampler(loaded: LoadedModel, config: SamplerConfig | None, push_dir: Path | None) -> Sampler | None:
    """None where the learner is to sample from its own model."""
    if config is None or config.kind == "builtin":
        return None
    folder = Path(config.push_dir).expanduser() if config.push_dir else push_dir
    if folder is None:
        raise ValueError("a server's sampler needs push_dir")
    return ServerSampler(loaded, config, folder)


def model_rewards(
    rewards: RewardsConfig,
    judge: JudgeConfig,
    judge_backend: JudgeBackend | None,
    *,
    seed: int,
    rewards_file: Path | None,
    private: bool,
    preferences_file: Path | None,
    cache_dir: Path | None,
    device: str,
    progress: Progress | None,
) -> dict[str, Scorer]:
    """The rewards of a run that are models: "judge", "reward_model"; by name, those that it uses.

    Raises:
        ShoalError: a model is not there.
    """
    found: dict[str, Scorer] = {}
    if "judge" in rewards.functions:
        from .judges.reward import JudgeReward, build_judge

        own = build_judge(
            judge_backend or judge.backend,
            judge.principles,
            seed=seed,
            rewards_file=rewards_file,
            cache_dir=cache_dir,
            device=device,
            progress=progress,
        )
        log = PreferenceLog(preferences_file) if preferences_file is not None else None
        found["judge"] = JudgeReward(judge, own, private=private, preferences=log)
    if "reward_model" in rewards.functions:
        from .reward_model import RewardModel

        found["reward_model"] = RewardModel.load(Path(rewards.reward_model).expanduser(), device=device)
    return found
