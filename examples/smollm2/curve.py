"""Draws the reward curve of a run from its peers' data directories as PNG and, with the figures, as JSON.

python examples/smollm2/curve.py /data/a /data/b --parameters 2442240 --out examples/smollm2
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from shoal.node.store.metrics import read_metrics

DENSE_BYTES_PER_PARAMETER = 4  # fp32


def summarize(folders: list[Path], parameters: int) -> dict[str, Any]:
    """Rewards by round (weighted by samples over the peers), and bytes against what a dense fp32 ring would have sent."""
    histories = [read_metrics(folder) for folder in folders]
    rounds: dict[int, dict[str, float]] = {}
    dense = 0
    for history in histories:
        for record in history:
            if not record.get("samples"):
                continue
            row = rounds.setdefault(record["round"], {"samples": 0, "reward": 0.0, "steps": 0})
            row["samples"] += record["samples"]
            row["steps"] += record["steps"]
            row["reward"] += record["reward"] * record["samples"]
    for record in histories[0]:
        # A ring all-reduce among n sends 2(n - 1) times the vector, all peers together.
        dense += 2 * max(0, record.get("roster", 1) - 1) * DENSE_BYTES_PER_PARAMETER * parameters
    curve = [
        {"round": r, "reward": row["reward"] / row["samples"], "samples": row["samples"], "steps": row["steps"]}
        for r, row in sorted(rounds.items())
    ]
    third = max(1, len(curve) // 6)
    evaluations = [r for r in histories[0] if "eval_accuracy" in r]
    sent = sum(history[-1]["bytes"]["round"] for history in histories)
    return {
        "peers": len(folders),
        "rounds": curve[-1]["round"],
        "steps": sum(row["steps"] for row in curve),
        "parameters": parameters,
        "reward_first": _mean(curve[:third]),
        "reward_last": _mean(curve[-third:]),
        "rounds_in_a_mean": third,
        "accuracy_first": evaluations[0]["eval_accuracy"],
        "accuracy_last": evaluations[-1]["eval_accuracy"],
        "bytes_sent": sent,
        "bytes_dense": dense,
        "times_fewer": round(dense / sent, 1) if sent else None,  # a lone peer sends nothing
        "state_bytes": sum(history[-1]["bytes"]["state"] for history in histories),
        "curve": curve,
    }


def _mean(rows: list[dict[str, float]]) -> float:
    return sum(r["reward"] * r["samples"] for r in rows) / sum(r["samples"] for r in rows)


def draw(summary: dict[str, Any], path: Path) -> None:
    """Write the curve as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), dpi=130)
    axes.plot([r["round"] for r in summary["curve"]], [r["reward"] for r in summary["curve"]], marker="o", ms=3)
    axes.set_xlabel("round")
    axes.set_ylabel("mean reward of sampled completions")
    axes.set_title(f"SmolLM2-135M + LoRA, peers: {summary['peers']}, inner steps in all: {summary['steps']}")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="data directories of the peers")
    parser.add_argument(
        "--parameters", type=int, required=True, help="trained parameters, as `shoal status` shows them"
    )
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--name", default="curve", help="of the JSON and PNG file")
    options = parser.parse_args()
    summary = summarize(options.folders, options.parameters)
    (options.out / f"{options.name}.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw(summary, options.out / f"{options.name}.png")
    print(json.dumps({k: v for k, v in summary.items() if k != "curve"}))


if __name__ == "__main__":
    main()
