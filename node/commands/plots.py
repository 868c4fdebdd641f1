"""Pictures of held-out metrics, as PNG, with matplotlib (the `plot` extra). Does not measure anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...protocol.errors import ExitCode, ShoalError

PASS_PREFIX = "pass_at_"
SIZE_INCHES = (10.0, 4.0)
DOTS_PER_INCH = 120


def require_matplotlib() -> None:
    """Raises ShoalError (DEPENDENCY) where it is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ShoalError(
            "The plot cannot be drawn",
            values=f"{error}; plots need matplotlib",
            todo="pip install 'shoal[plot]', or leave --plot out.",
            code=ExitCode.DEPENDENCY,
        ) from None


def plot_evaluation(path: Path, found: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> None:
    """pass@k and greedy accuracy of one evaluation, beside the run's held-out history where there is one.

    Args:
        path: the PNG file; written whole or not at all.
        found: what `shoal eval` prints.
        history: records of metrics.jsonl; those without an evaluation are passed over.

    Raises:
        ShoalError: matplotlib is missing, or the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    points = [r for r in history if "eval_reward" in r]
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    panels = figure.subplots(1, 2 if points else 1, squeeze=False)[0]
    if points:
        _history(panels[0], points)
    _pass_curve(panels[-1], found)
    scratch = path.with_name(f".{path.name}.partial")
    try:
        figure.savefig(scratch, dpi=DOTS_PER_INCH, format="png")
        scratch.replace(path)
    except OSError as error:
        raise ShoalError(
            "The plot could not be written",
            values=f"{path}: {error}",
            todo="Name a file in a folder that exists and has room.",
            code=ExitCode.DISK,
        ) from error
    finally:
        scratch.unlink(missing_ok=True)


def _history(axes: Any, points: Sequence[Mapping[str, Any]]) -> None:
    rounds = [p["round"] for p in points]
    axes.plot(rounds, [p["eval_reward"] for p in points], marker=".", label="sampled reward")
    axes.plot(rounds, [p["eval_accuracy"] for p in points], marker=".", label="greedy accuracy")
    axes.set(xlabel="round", title="held-out metrics of the run")
    axes.legend()
    axes.grid(alpha=0.3)


def _pass_curve(axes: Any, found: Mapping[str, Any]) -> None:
    curve = sorted((int(k.removeprefix(PASS_PREFIX)), v) for k, v in found.items() if k.startswith(PASS_PREFIX))
    axes.plot([k for k, _ in curve], [v for _, v in curve], marker="o", label="pass@k, sampled")
    axes.axhline(found["accuracy"], linestyle="--", color="grey", label="greedy accuracy")
    axes.set_xscale("log", base=2)
    axes.set_xticks([k for k, _ in curve], [str(k) for k, _ in curve])
    axes.set(xlabel="k", ylim=(0, 1.02), title=f"{found['n']:.0f} held-out prompts")
    axes.legend()
    axes.grid(alpha=0.3)
