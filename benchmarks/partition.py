"""A swarm in ten-minute parts: does every part learn on, and what does healing cost? Curves, figures, and a plot.

    python benchmarks/partition.py run            # all cells that are not on disk; about half a minute each
    python benchmarks/partition.py report         # the table and the plot of docs/partitions.md

In the simulator: nine peers whose learner is a noisy quadratic with a known optimum, on lines of 10 to 60 ms with 1 % loss.
After a minute they are cut into two parts (4 and 5) or three (3, 3 and 3), ten minutes later they are whole again, and a
minute later the run ends. The rate is so low that the parts are still on their way when they meet again; so the loss of the
best part is something to come back to, and what is lost is seen.

"Loss" is that of the shared parameters, without noise, looked at every quarter of a second. A round of gossip mode is one
update of a peer.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median_high
from typing import Any

from shoal.sim import Link, Simulation
from shoal.sim.peer import Peer

FOLDER = Path(__file__).parents[1] / "docs" / "partitions"
PAGE = FOLDER.parent / "partitions.md"
PARTITION_SECONDS = 600.0
LOOK_SECONDS = 0.25
# The loss of two states that learned equally long differs by about this much from noise alone.
TOLERANCE = 1.02
PARTS = {2: (4, 5), 3: (3, 3, 3)}
CELLS = [(mode, parts, rule) for mode in ("ring", "gossip") for parts in (2, 3) for rule in ("heavier", "merge")]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the cells have in common.

    Attributes:
        cut_s: when the swarm is cut.
        after_s: how long it runs on once it is whole.
        step_s: of one inner step of 8 samples.
        steps: inner steps that a peer makes for one round or update.
        stride: events between two looks of the invariant checkers.
    """

    cut_s: float = 60.0
    after_s: float = 60.0
    step_s: float = 2.0
    steps: int = 10
    dimension: int = 32
    learning_rate: float = 0.008
    gossip_seconds: float = 10.0
    membership: str = "lan"
    stride: int = 100

    @property
    def heal_s(self) -> float:
        return self.cut_s + PARTITION_SECONDS


def build(
    mode: str, sizes: Sequence[int], rule: str, seed: int, setting: Setting
) -> tuple[Simulation, list[list[Peer]]]:
    """The simulation, and its peers by part."""
    count, samples = sum(sizes), 8 * setting.steps
    sync: dict[str, Any] = {"mode": mode, "heal": rule, "target_samples": samples}
    if mode == "gossip":
        sync["gossip_seconds"] = setting.gossip_seconds
    else:
        sync |= {"target_samples": samples * count, "round_seconds_max": 2 * setting.steps * setting.step_s}
    run = {
        "sync": sync,
        "quadratic": {"dimension": setting.dimension, "learning_rate": setting.learning_rate},
        "membership": {"preset": setting.membership},
    }
    line = Link(latency_ms=(10, 60), bandwidth_mbps=50, loss=0.01)
    sim = Simulation(seed, run=run, link=line, step_seconds=setting.step_s)
    parts = [sim.add_peers(size) for size in sizes]
    for one, other in combinations(parts, 2):
        sim.partition(one, other, at_s=setting.cut_s, heal_s=setting.heal_s)
    return sim, parts


def measure(mode: str, sizes: Sequence[int], rule: str, seed: int, setting: Setting) -> dict[str, Any]:
    """Run one cell and say what happened.

    Returns (seconds count from the healing):
        learned: loss of every part at the healing over its loss at the cut.
        best: the smallest loss of a part at the healing.
        equal_s: when all state hashes were first equal.
        back_s, back_rounds: from when on no peer's loss was above the best part's, and rounds of the busiest peer until then.
        peak: the largest loss of any peer after the healing, over `best`; peak_s: for how long a peer's was above `best`.
        curves: [seconds, lowest, highest loss] by part, then of all.
        violations, errors: of the simulation.
    """
    sim, parts = build(mode, sizes, rule, seed, setting)
    end_s = setting.heal_s + setting.after_s
    rows: list[tuple[float, list[float], int, list[int]]] = []  # at, losses, different hashes, rounds done

    def look() -> None:
        nodes = [peer.node for peer in sim.peers]
        if all(node is not None and node.rounds is not None for node in nodes):
            states = sim.running_states()
            losses = [peer.learner.loss(s.theta) for peer, s in zip(sim.peers, states, strict=True)]  # type: ignore[union-attr]
            done = [node.rounds.progress.rounds_done for node in nodes if node is not None and node.rounds is not None]
            rows.append((sim.now, losses, len({s.hash for s in states}), done))
        if sim.now < end_s - LOOK_SECONDS:
            sim.at(sim.now + LOOK_SECONDS, look)

    sim.at(5.0, look)
    report = sim.run(until_s=end_s, stride=setting.stride)
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]

    def of_part(losses: list[float], part: int) -> list[float]:
        return losses[edges[part] : edges[part + 1]]

    at_cut = next(row for row in rows if row[0] >= setting.cut_s)
    at_heal = next(row for row in rows if row[0] >= setting.heal_s)
    after = [row for row in rows if row[0] >= setting.heal_s]
    range_ = range(len(sizes))
    best = min(max(of_part(at_heal[1], part)) for part in range_)
    above = [row for row in after if max(row[1]) > TOLERANCE * best]
    back = next((row for row in after if not above or row[0] > above[-1][0]), None)
    equal = next((row[0] for row in after if row[2] == 1), None)
    return {
        "learned": [round(max(of_part(at_heal[1], p)) / max(of_part(at_cut[1], p)), 4) for p in range_],
        "best": round(best, 6),
        "equal_s": None if equal is None else round(equal - setting.heal_s, 2),
        "back_s": None if back is None else round(back[0] - setting.heal_s, 2),
        "back_rounds": None if back is None else max(b - a for a, b in zip(at_heal[3], back[3], strict=True)),
        "peak": round(max(max(row[1]) for row in after) / best, 4),
        "peak_s": round(LOOK_SECONDS * len(above), 2),
        "loss_end": round(max(rows[-1][1]), 6),
        "identical": report.identical,
        "violations": report.violations,
        "errors": report.errors,
        "curves": _curves(rows, edges, setting),
    }


def _curves(rows: list[tuple[float, list[float], int, list[int]]], edges: list[int], setting: Setting) -> list[Any]:
    """Every ten seconds, and all of the first half minute after the healing: [seconds, [lowest, highest] of every part]."""
    curves, next_at = [], 0.0
    for at, losses, _, _ in rows:
        if at >= next_at or 0 <= at - setting.heal_s <= 30:
            groups = [losses[a:b] for a, b in zip(edges, edges[1:], strict=False)]
            curves.append([round(at, 2), *([round(min(g), 5), round(max(g), 5)] for g in groups)])
            next_at = at + 10.0
    return curves


# --- figures, table, plot ---------------------------------------------------------------------------------------------


def name_of(mode: str, parts: int, rule: str) -> str:
    return f"{mode}-{parts}-{rule}"


def read_figures() -> dict[str, Any]:
    """{cell: {seed: figures}}."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def run_missing(seeds: int, runs_max: int) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for seed in range(seeds):
        for mode, parts, rule in CELLS:
            path = FOLDER / f"{name_of(mode, parts, rule)}.json"
            figures = json.loads(path.read_text()) if path.exists() else {}
            if str(seed) not in figures and runs_max > 0:
                runs_max -= 1
                figures[str(seed)] = found = measure(mode, PARTS[parts], rule, seed, Setting())
                text = ",\n".join(f" {json.dumps(s)}: {json.dumps(one)}" for s, one in sorted(figures.items()))
                path.write_text("{\n" + text + "\n}\n")
                print(path.stem, seed, json.dumps({k: v for k, v in found.items() if k != "curves"}), flush=True)


def table(figures: dict[str, Any]) -> str:
    """Markdown, a row a cell: the median of its seeds, and the range."""
    rows = [
        "| mode | parts | rule | loss of each part, times | hashes equal after | back at the best part's after "
        "| highest on the way | above the best part's for | seeds | violations |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for mode, parts, rule in CELLS:
        seeds = list(figures.get(name_of(mode, parts, rule), {}).values())
        if not seeds:
            continue

        def middle(key: str, unit: str, seeds: list[Any] = seeds) -> str:
            found = sorted(math.inf if s[key] is None else s[key] for s in seeds)
            low, mid, high = ("never" if x == math.inf else f"{x:g}" for x in (found[0], median_high(found), found[-1]))
            return f"{mid} ({low} to {high}){unit}"

        learned = max(max(s["learned"]) for s in seeds)
        rows.append(
            f"| {mode} | {parts} | {rule} | {learned:.2f} | {middle('equal_s', ' s')} | {middle('back_s', ' s')}, "
            f"{middle('back_rounds', ' rounds')} | {middle('peak', ' times')} | {middle('peak_s', ' s')} "
            f"| {len(seeds)} | {sum(len(s['violations']) + len(s['errors']) for s in seeds)} |"
        )
    return "\n".join(rows)


def draw(figures: dict[str, Any], path: Path) -> None:
    """A panel a cell: every part's loss as a band from its best to its worst peer; left the whole run, right the healing."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heal_s, cut_s = Setting().heal_s, Setting().cut_s
    cells = [cell for cell in CELLS if name_of(*cell) in figures]
    figure, axes = pyplot.subplots(len(cells), 2, figsize=(10, 2.3 * len(cells)), dpi=70, squeeze=False)
    for (whole, close), cell in zip(axes, cells, strict=True):
        found = next(iter(figures[name_of(*cell)].values()))
        curves = found["curves"]
        at = [row[0] - heal_s for row in curves]
        for axis in (whole, close):
            for part in range(len(curves[0]) - 1):
                low, high = ([row[part + 1][i] for row in curves] for i in (0, 1))
                colour = f"C{part}"
                axis.fill_between(at, low, high, color=colour, alpha=0.25, lw=0)
                axis.plot(at, high, color=colour, lw=1, label=f"part {part + 1}")
            axis.axhline(found["best"], color="black", lw=0.6, ls=":")
            axis.axvline(0, color="grey", lw=0.6)
            axis.set_yscale("log")
            axis.grid(alpha=0.3)
        whole.axvline(cut_s - heal_s, color="grey", lw=0.6)
        whole.set_title(f"{cell[0]}, {cell[1]} parts, {cell[2]}", fontsize=9)
        close.set_xlim(-2, 30)
        whole.set_ylabel("loss")
    axes[0][0].legend(fontsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("seconds from the healing")
    figure.tight_layout()
    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs-max", type=int, default=1000, help="stop after so many runs; the next call goes on")
    args = parser.parse_args()
    if args.what == "run":
        return run_missing(args.seeds, args.runs_max)
    figures = read_figures()
    print(table(figures))
    draw(figures, FOLDER / "curves.png")
    if PAGE.exists():
        page = re.sub(
            r"(<!-- figures -->\n).*?(<!-- end -->)",
            lambda m: f"{m[1]}{table(figures)}\n{m[2]}",
            PAGE.read_text(),
            flags=re.S,
        )
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
