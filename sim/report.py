"""What a simulation found: one dataclass, as JSON and as a page.

Covers: the fields, their way to a dictionary and back, the few lines that a terminal shows, the files of a report folder. The
page itself is made in `report_page.py`. Does not measure anything: `Simulation.run` does.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..protocol.errors import ExitCode, ShoalError

# [[virtual seconds, value], ...] by peer name.
Series = dict[str, list[list[float]]]


@dataclass(kw_only=True)
class Report:
    """One run of a simulation. Everything in it is JSON; only `wall_seconds` differs between two runs of one seed.

    Attributes:
        seed: of the simulation.
        until_s: virtual seconds that were run.
        peers: {"name", "peer_id"} of each, in the order in which they were added.
        identical: whether all honest running peers ended with one and the same state.
        violations: {"invariant", "at_s", "peer", "text"} of every broken invariant, oldest first.
        trace_hash: hex sha-256 of everything that happened, in order.
        events: steps of the event loop.
        wall_seconds: real time.
        loss_first, loss_last, reward_last: means over the honest peers running at the end; None where none said.
        bytes_sent: by peer, headers and datagrams included.
        bytes_by_link: [from, to, bytes].
        state_hashes: hex, by honest running peer.
        rounds: shared-state round, by honest running peer.
        faults: {"kind", "who", "at_s", "until_s"}; `until_s` None means for good.
        series: name of the curve ("loss", "reward", "lag", "bytes", "round") to its points by peer.
        membership: [at_s, observer, subject, state], in order of time.
        spans: [peer, phase, start_s, end_s, round].
        errors: what no part of the program wanted to see, such as an exception in a task.
        replay: the command that runs exactly this again; empty where there is none.
        scenario: title of the scenario; empty for a simulation made in Python.
        unmet: expectations of the scenario that did not come true, one sentence each.
    """

    seed: int
    until_s: float
    peers: list[dict[str, str]]
    identical: bool
    violations: list[dict[str, Any]]
    trace_hash: str
    events: int
    wall_seconds: float
    loss_first: float | None
    loss_last: float | None
    reward_last: float | None
    bytes_sent: dict[str, int]
    bytes_by_link: list[list[Any]]
    state_hashes: dict[str, str]
    rounds: dict[str, int]
    faults: list[dict[str, Any]]
    series: dict[str, Series]
    membership: list[list[Any]]
    spans: list[list[Any]]
    errors: list[str]
    replay: str
    scenario: str = ""
    unmet: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """No invariant was broken, nothing unforeseen happened, and all expectations came true."""
        return not (self.violations or self.errors or self.unmet)

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`: a number that is none (a diverged loss) becomes None."""
        return _finite(asdict(self))

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> Report:
        """Inverse of `to_dict`. Raises ShoalError for keys that are missing or unknown (another version's report)."""
        known = {f.name for f in fields(cls)}
        if tree.keys() != known:
            odd = sorted(known ^ tree.keys())
            raise ShoalError(
                "This is not a report of this version of shoal",
                values=f"found {len(tree)} keys, expected {len(known)}; they differ in {', '.join(map(str, odd[:8]))}",
                todo="Make it again with its replay command.",
            )
        return cls(**tree)

    def summary(self) -> dict[str, Any]:
        """The report without its curves and lists of thousands: what `shoal sim --json` prints."""
        left_out = {"series", "membership", "spans", "bytes_by_link"}
        return {"ok": self.ok, **{k: v for k, v in self.to_dict().items() if k not in left_out}}

    def describe(self) -> str:
        """For a terminal: a handful of lines."""
        speed = len(self.peers) * self.until_s / self.wall_seconds if self.wall_seconds > 0 else 0.0
        lines = [
            f"{self.scenario or 'simulation'}: seed {self.seed}, {len(self.peers)} peers, {self.until_s:g} s virtual "
            f"in {self.wall_seconds:.1f} s ({speed:,.0f} peer-seconds a second)",
            f"  states     {'identical' if self.identical else 'DIFFERENT'}, {_rounds(self.rounds)}",
            f"  loss       {_number(self.loss_first)} -> {_number(self.loss_last)}",
            f"  traffic    {sum(self.bytes_sent.values()):,} bytes sent, {self.events:,} events",
            f"  trace      {self.trace_hash[:16]}",
        ]
        lines += [
            f"  VIOLATION  invariant {v['invariant']} at {v['at_s']:.3f} s, {v['peer'] or 'all'}: {v['text']}"
            for v in self.violations
        ]
        lines += [f"  UNMET      {text}" for text in self.unmet]
        lines += [f"  ERROR      {_one_line(text)}" for text in self.errors]
        if self.replay:
            lines.append(f"  replay     {self.replay}")
        return "\n".join(lines)

    def html(self) -> str:
        """One self-contained page; see `report_page.py`."""
        from .report_page import page

        return page(self)

    def write(self, folder: str | os.PathLike[str]) -> list[Path]:
        """`report.json` and `report.html` in `folder`, which is made. Raises ShoalError when it cannot be written."""
        folder = Path(folder)
        written = [folder / "report.json", folder / "report.html"]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path, text in zip(written, (json.dumps(self.to_dict()), self.html())):
                part = path.with_name(path.name + ".part")
                part.write_text(text, encoding="utf-8")
                os.replace(part, path)
        except OSError as error:
            raise ShoalError(
                "The report cannot be written",
                values=f"{error.filename or folder}: {error.strerror}, expected a folder that can be written",
                todo="Name another with --report.",
                code=ExitCode.DISK,
            ) from None
        return written


def _one_line(text: str) -> str:
    """A traceback's head and its last line; the whole is in report.json."""
    lines = text.strip().splitlines() or [""]
    return lines[0] if len(lines) == 1 else f"{lines[0]}: {lines[-1]}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _rounds(rounds: dict[str, int]) -> str:
    if not rounds:
        return "nobody honest runs"
    low, high = min(rounds.values()), max(rounds.values())
    return f"round {high}" if low == high else f"rounds {low} to {high}"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
