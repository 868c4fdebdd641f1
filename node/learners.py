"""Makes the learner that the manifest asks for. torch is imported only for the language model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from ..protocol.errors import ExitCode, ShoalError
from .bandit import BanditLearner
from .config import Config
from .learner import Learner
from .quadratic import QuadraticLearner

Progress = Callable[[str, float], None]


class NodeLearner(Learner, Protocol):
    """A learner as the daemon holds it: with an end."""

    def close(self) -> None: ...


def build(config: Config, peer_id: str, data_dir: Path, progress: Progress) -> NodeLearner:
    """Blocking; loading a real model takes a while. Raises ShoalError."""
    run, node = config.run, config.node
    peer_seed = int.from_bytes(hashlib.sha256(peer_id.encode()).digest()[:8], "big") >> 1
    if run.learner == "quadratic":
        table = run.quadratic
        return QuadraticLearner(
            dimension=table.dimension,
            condition=table.condition,
            noise=table.noise,
            learning_rate=table.learning_rate,
            seed=run.seed,
            peer_seed=peer_seed,
            step_seconds=table.step_seconds,
        )
    if run.learner == "bandit":
        return BanditLearner(**run.bandit.model_dump(), seed=run.seed, peer_seed=peer_seed)
    try:
        from .rl.build import build_learner
    except ImportError as error:
        raise ShoalError(
            "The language-model learner cannot be loaded",
            values=f"{error}; the learner needs torch, transformers, peft and reasoning_gym",
            todo="Reinstall shoal, or use run.learner = 'quadratic' or 'bandit' to see the network alone.",
            code=ExitCode.DEPENDENCY,
        ) from None
    model = run.model
    if node.model_path:
        model = model.model_copy(update={"name": str(Path(node.model_path).expanduser())})
    return build_learner(
        model=model,
        task=node.task or run.task,
        rewards=run.rewards,
        grpo=run.grpo,
        warmup=run.warmup,
        run_seed=run.seed,
        peer_seed=peer_seed,
        rewards_file=Path(node.rewards_file).expanduser() if node.rewards_file else None,
        judge=run.judge,
        judge_backend=node.judge,
        private=node.task is not None,
        preferences_file=Path(node.preferences_file).expanduser() if node.preferences_file else None,
        sampler=node.sampler,
        push_dir=(data_dir / "sampler").absolute(),
        cache_dir=Path("~/.cache/shoal").expanduser(),
        device=node.device,
        threads=node.threads or None,
        progress=progress,
    )


def base_hash_of(learner: Learner) -> bytes:
    """sha-256 of the base weights; of the initial vector where the learner has no other base."""
    known = getattr(learner, "base_hash", None)
    if isinstance(known, bytes):
        return known
    if isinstance(known, str):
        return bytes.fromhex(known)
    return hashlib.sha256(np.ascontiguousarray(learner.initial(), "<f4").tobytes()).digest()


def warm_up(learner: Learner, progress: Progress, clock: Callable[[], float]) -> tuple[np.ndarray, dict[str, float]]:
    """The parameters that the run starts from and what the supervised stage did (empty without one).

    `clock` gives the seconds that limit the stage: virtual ones in the simulator, where real ones would differ every time.
    """
    run = getattr(learner, "warmup", None)
    if run is None:
        return learner.initial(), {}
    result = run(progress, clock=clock)
    return learner.theta(), (result if result.get("steps") else {})  # type: ignore[attr-defined]
