"""Tables and plots of what convergence.py has put on disk, into docs/convergence.md and docs/convergence/.

    python benchmarks/convergence_report.py              # also prints the tables

A standard error is that of the difference of two means over the seeds, sqrt(s1^2 / n + s2^2 / n). "Worse by" is in units of
it: below 2 counts as no worse than dense. "Difference to dense" is the
mean over the seeds of the difference to dense with the same seed, with the standard error of that mean: what the seeds have
in common is gone from it, so it is the sharper figure.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from convergence import FOLDER, STUDIES, Study, label, read_figures

PAGE = FOLDER.parent / "convergence.md"
WITHIN = 2.0  # standard errors
COLOURS = {"dense": "black", "short": "tab:blue", "long": "tab:red"}

Runs = dict[str, Any]  # seed -> run


def final(runs: Runs, measure: str, mark: int = -1) -> list[float]:
    """The measure at a mark, one figure a seed, in the order of the seeds."""
    return [runs[seed]["curve"][mark][measure] for seed in sorted(runs, key=int)]


def error_of_mean(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def worse_by(study: Study, dense: Sequence[float], other: Sequence[float]) -> float:
    """How many standard errors `other` is worse than `dense`; negative: better."""
    difference = statistics.mean(other) - statistics.mean(dense)
    error = math.hypot(error_of_mean(dense), error_of_mean(other))
    return (difference if study.lower_is_better else -difference) / error if error else 0.0


def caught_up(study: Study, dense: Runs, other: Runs) -> int | None:
    """The first measured round from which on, to the end, it is less than two standard errors worse than dense."""
    first = None
    for mark, point in enumerate(next(iter(dense.values()))["curve"]):
        if mark == 0:
            continue
        if worse_by(study, final(dense, study.measure, mark), final(other, study.measure, mark)) >= WITHIN:
            first = None
        elif first is None:
            first = point["round"]
    return first


def table(study: Study, figures: dict[str, Any]) -> str:
    """Markdown, a row an exchange."""
    exchanges = figures[study.name]
    dense = final(exchanges["dense"], study.measure)
    rows = [
        f"| exchange | {study.measure} at the end | worse by | difference to dense "
        "| no worse from round | MB sent | of dense's |",
        "|---|---|---|---|---|---|---|",
    ]
    sent_dense = statistics.mean(final(exchanges["dense"], "bytes"))
    for exchange in study.exchanges:
        runs = exchanges[exchange.name]
        values = final(runs, study.measure)
        sent = statistics.mean(final(runs, "bytes"))
        row = [label(exchange.name), f"{statistics.mean(values):.4f} ± {error_of_mean(values):.4f}"]
        if exchange.name == "dense":
            row += ["", "", ""]
        else:
            paired = [b - a for a, b in zip(dense, values, strict=True)]
            since = caught_up(study, exchanges["dense"], runs)
            row.append(f"{worse_by(study, dense, values):+.1f} SE".replace("-0.0", "+0.0"))
            row.append(f"{statistics.mean(paired):+.4f} ± {error_of_mean(paired):.4f}".replace("-0.0000", "+0.0000"))
            row.append("never" if since is None else str(since))
        row += [f"{sent / 1e6:.3g}", "" if exchange.name == "dense" else f"1/{sent_dense / sent:.0f}"]
        if any(run["voids"] for run in runs.values()):
            row[0] += f" ({sum(run['voids'] for run in runs.values())} updates void)"
        rows.append("| " + " | ".join(row) + " |")
    return "\n".join(rows)


def heading(study: Study, figures: dict[str, Any]) -> str:
    runs = figures[study.name]["dense"]
    size = next(iter(runs.values()))["parameters"]
    start = statistics.mean(final(runs, study.measure, 0))
    return (
        f"**{study.marks[-1]} rounds of {study.inner_steps} inner step{'s' if study.inner_steps > 1 else ''}**, "
        f"{len(runs)} seeds, {size:,} parameters; {study.measure} at the start {start:.4f}"
    )


def tables(learner: str) -> str:
    """All studies of one learner, as they stand in the page."""
    figures = read_figures(learner)
    parts = []
    for study in STUDIES:
        if study.learner == learner and complete(study, figures):
            parts.append(f"{heading(study, figures)}\n\n{table(study, figures)}")
    return "\n\n".join(parts)


def complete(study: Study, figures: dict[str, Any]) -> bool:
    """Whether every exchange has the same seeds, at least two."""
    seeds = [sorted(figures.get(study.name, {}).get(e.name, {})) for e in study.exchanges]
    return len(seeds[0]) >= 2 and all(s == seeds[0] for s in seeds)


def draw(learner: str, path: Path) -> None:
    """Mean and standard error against rounds (left) and bytes (right), a row a study. Same input, same bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = read_figures(learner)
    studies = [s for s in STUDIES if s.learner == learner and complete(s, figures)]
    figure, axes = pyplot.subplots(len(studies), 2, figsize=(10, 3.1 * len(studies)), dpi=80, squeeze=False)
    for (left, right), study in zip(axes, studies, strict=True):
        for exchange in study.exchanges:
            runs = figures[study.name][exchange.name]
            points = range(len(next(iter(runs.values()))["curve"]))
            columns = [final(runs, study.measure, mark) for mark in points]
            mean = [statistics.mean(c) for c in columns]
            error = [error_of_mean(c) for c in columns]
            for axis, key in ((left, "round"), (right, "bytes")):
                first = int(key == "bytes")  # nothing is sent before the first round, and a logarithm has no zero
                at = [statistics.mean(final(runs, key, mark)) for mark in points[first:]]
                style = {"color": COLOURS[exchange.preset], "ls": "-" if exchange.feedback else ":"}
                axis.plot(at, mean[first:], label=label(exchange.name), **style)
                low, high = ([m + sign * e for m, e in zip(mean, error, strict=True)] for sign in (-1, 1))
                axis.fill_between(at, low[first:], high[first:], color=style["color"], alpha=0.15, lw=0)
        left.set_title(f"{study.marks[-1]} rounds of {study.inner_steps}", fontsize=9)
        left.set_xlabel("round")
        right.set_xlabel("bytes sent, all replicas together")
        right.set_xscale("log")
        for axis in (left, right):
            axis.set_ylabel(study.measure)
            axis.grid(alpha=0.3)
            if study.log:
                axis.set_yscale("log")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)


def with_tables(page: str) -> str:
    """The page with the tables between its markers replaced."""
    return re.sub(
        r"(<!-- figures of (\w+) -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}{tables(m[2])}\n{m[3]}", page, flags=re.S
    )


def main() -> None:
    for learner in dict.fromkeys(study.learner for study in STUDIES):
        if tables(learner):
            print(f"{learner}\n\n{tables(learner)}\n")
            draw(learner, FOLDER / f"{learner}.png")
    if PAGE.exists():
        PAGE.write_text(with_tables(PAGE.read_text()))
    print(json.dumps({s.name: complete(s, read_figures(s.learner)) for s in STUDIES}))


if __name__ == "__main__":
    main()
