"""`shoal export` and `shoal eval`: from the newest checkpoint of a data directory; the node need not run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...protocol.errors import ExitCode, ShoalError
from .. import config as configuration
from ..config import Config
from ..config_file import load_config
from ..observe.progress import bar
from ..store.checkpoint import Checkpoint, Checkpoints


def _open(data_dir: Path) -> tuple[Config, Checkpoint]:
    manifest = data_dir / "manifest.json"
    checkpoint = Checkpoints(data_dir / "checkpoints").newest() if manifest.exists() else None
    if checkpoint is None:
        lacks = "checkpoint" if manifest.exists() else "manifest"
        raise ShoalError(
            "There is no state to read",
            values=f"{data_dir} has no {lacks}, expected a node's data directory",
            todo="Name the right one with --data-dir, or let the node run for a round first.",
            code=ExitCode.CONFIG,
        )
    run = configuration.run_from_manifest(manifest.read_bytes())
    if run.learner != "grpo":
        raise ShoalError(
            "This run has no language model",
            values=f"learner = {run.learner!r}, expected 'grpo'",
            todo="Export and evaluation are for language models.",
            code=ExitCode.CONFIG,
        )
    import os

    return load_config(None, (), os.environ).model_copy(update={"run": run}), checkpoint


def _learner(config: Config, checkpoint: Checkpoint, data_dir: Path) -> Any:
    from .. import learners

    with bar("loading the model") as show:
        learner = learners.build(config, "export", data_dir, lambda stage, share: show(share, 1.0, stage))
    if learner.layout.size != checkpoint.state.theta.size:
        raise ShoalError(
            "The checkpoint does not fit the model",
            values=f"checkpoint has {checkpoint.state.theta.size} parameters, the model {learner.layout.size}",
            todo="Set SHOAL_NODE__MODEL_PATH to the model of the run.",
            code=ExitCode.MISMATCH,
        )
    learner.load(checkpoint.state.theta)
    return learner


@contextmanager
def newest_policy(data_dir: Path) -> Iterator[tuple[Any, str]]:
    """The model of the newest state, and the name of its base. Raises ShoalError."""
    config, checkpoint = _open(data_dir)
    # To train on: what scores completions in the run (judges, reward files) is not needed, and costs memory.
    run = config.run.model_copy(update={"rewards": type(config.run.rewards)()})
    learner = _learner(config.model_copy(update={"run": run}), checkpoint, data_dir)
    try:
        yield learner.loaded, config.node.model_path or config.run.model.name
    finally:
        learner.close()


def run_export(data_dir: Path, out: Path, *, merged: bool) -> dict[str, Any]:
    """Write the newest state as a PEFT adapter or a whole model. Raises ShoalError."""
    from ..rl.export import export_adapter, export_merged

    config, checkpoint = _open(data_dir)
    learner = _learner(config, checkpoint, data_dir)
    try:
        whole = merged or not learner.loaded.is_lora
        if whole:
            export_merged(learner.loaded, out)
        else:
            export_adapter(learner.loaded, out, base=config.node.model_path or config.run.model.name)
    finally:
        learner.close()
    return {"folder": str(out), "kind": "model" if whole else "adapter", "round": checkpoint.state.round}


def run_eval(
    data_dir: Path,
    *,
    adapter: Path | None,
    model: str | None,
    task: str | None,
    size: int | None,
    samples: int | None = None,
    plot: Path | None = None,
) -> dict[str, Any]:
    """Held-out metrics of the newest state, of an adapter on the run's model, or of any model. Raises ShoalError.

    Args:
        samples: completions drawn for each prompt, in place of the task's `eval_generations`.
        plot: where to write a picture of them, as PNG; with the run's history where the newest state is measured.
    """
    if plot is not None:
        from .plots import require_matplotlib

        require_matplotlib()  # before the minutes of work whose result it is to show
    found = _measure(data_dir, adapter=adapter, model=model, task=task, size=size, samples=samples)
    if plot is not None:
        from ..store.metrics import read_metrics
        from .plots import plot_evaluation

        plot_evaluation(plot, found, read_metrics(data_dir) if "round" in found and task is None else [])
        found["plot"] = str(plot)
    return found


def _measure(
    data_dir: Path, *, adapter: Path | None, model: str | None, task: str | None, size: int | None, samples: int | None
) -> dict[str, Any]:
    import os

    from ..rl.config import ModelConfig, TaskConfig
    from ..rl.evaluate import evaluate_model

    checkpoint = None
    if model is None:
        config, checkpoint = _open(data_dir)
    else:
        config = load_config(None, (), os.environ)
    run = config.run
    changes: dict[str, Any] = {"name": task, "options": {}} if task else {}
    if size is not None:
        changes["eval_size"] = size
    if samples is not None:
        changes["eval_generations"] = samples
    wanted = TaskConfig.model_validate({**(config.node.task or run.task).model_dump(), **changes})
    if checkpoint is not None and adapter is None:
        changed = config.model_copy(update={"run": run.model_copy(update={"task": wanted})})
        learner = _learner(changed, checkpoint, data_dir)
        try:
            return {"round": checkpoint.state.round, **learner.evaluate()}
        finally:
            learner.close()
    name = model or config.node.model_path or run.model.name
    with bar("loading the model") as show:
        return evaluate_model(
            ModelConfig.model_validate({**run.model.model_dump(), "name": name, "lora": None}),
            wanted,
            grpo=run.grpo,
            rewards=run.rewards,
            run_seed=run.seed,
            adapter=adapter,
            rewards_file=Path(config.node.rewards_file) if config.node.rewards_file else None,
            cache_dir=Path("~/.cache/shoal").expanduser(),
            device=config.node.device,
            progress=lambda stage, share: show(share, 1.0, stage),
        )
