"""The page of a report: one HTML file that needs no network, no library and no server.

Covers: which charts there are, what is marked on them, the words around them, the style for light and dark. How a chart is
drawn is `charts.py`'s. The page's policy forbids it to load anything; every text from outside (peers, errors, faults) is
escaped. The few lines of script light up one peer on all charts; without them nothing is missing but that.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from .charts import Band, Segment, bars, colour, lines, matrix, plain, rows, size
from .report import Report

# Longer tables go on in report.json.
ROWS_MAX = 200
PHASES = {
    "training": "train",
    "convening": "convene",
    "exchanging": "exchange",
    "voting": "vote",
    "committing": "commit",
    "downloading": "download",
    "catching_up": "download",
    "waiting": "wait",
    "finished": "done",
}


def page(report: Report) -> str:
    """The whole page. No two runs of one seed differ in it but for the wall time."""
    names = [peer["name"] for peer in report.peers]
    colours = {name: colour(k) for k, name in enumerate(names)}
    bands, marks = _bands(report), _marks(report)
    until = max(report.until_s, 1e-9)

    def over_time(name: str, unit: Any = plain, **options: Any) -> str:
        return lines(report.series.get(name, {}), until=until, bands=bands, colours=colours, unit=unit, **options)

    sections = [
        ("Loss", "Of the local steps, by peer. The thick line is the median.", over_time("loss")),
        ("Reward", "Of the local steps, by peer.", over_time("reward")),
        ("Round", "Round of each peer's shared state.", over_time("round", height=170.0)),
        (
            "Version lag",
            "How far each peer's version is behind the newest one in the swarm.",
            over_time("lag", height=170.0, median=False),
        ),
        (
            "Rounds",
            _legend(("train", "convene", "exchange", "vote", "commit", "download", "wait", "other", "done"))
            + " Nothing: the process is down.",
            rows(_phases(report), names, until=until, bands=bands),
        ),
        (
            "Membership",
            _legend(("alive", "suspect", "dead", "left"))
            + " What the others hold each peer for: the gravest state that at least a third of the observers hold.",
            rows(_members(report), names, until=until, bands=bands),
        ),
        ("Bytes over time", "Sent by each peer's present process.", over_time("bytes", size, logarithmic=False)),
        (
            "Bytes per peer",
            "Sent, from the first second to the last. A triangle marks who was touched by a fault.",
            bars({n: float(report.bytes_sent.get(n, 0)) for n in names}, unit=size, colours=colours, marks=marks),
        ),
        (
            "Bytes per link",
            "From row to column.",
            matrix({(a, b): float(n) for a, b, n in report.bytes_by_link}, names, unit=size, marks=marks),
        ),
    ]
    body = [_head(report), _verdict(report), _peers(names, colours)]
    body += [f"<section><h2>{title}</h2><p>{about}</p>{chart}</section>" for title, about, chart in sections]
    body.append(_faults(report))
    return _PAGE.format(title=escape(_title(report)), style=_STYLE, body="\n".join(body), script=_SCRIPT)


# --- words ------------------------------------------------------------------------------------------------------------


def _title(report: Report) -> str:
    return f"{report.scenario or 'simulation'}, seed {report.seed}"


def _head(report: Report) -> str:
    facts = {
        "peers": f"{len(report.peers)}",
        "virtual time": f"{report.until_s:g} s",
        "real time": f"{report.wall_seconds:.1f} s",
        "states": "identical" if report.identical else "different",
        "round": f"{max(report.rounds.values(), default=0)}",
        "loss": f"{_or_none(report.loss_first)} → {_or_none(report.loss_last)}",
        "last reward": _or_none(report.reward_last),
        "sent": size(sum(report.bytes_sent.values())),
        "events": f"{report.events:,}",
        "faults": f"{len(report.faults)}",
        "trace": report.trace_hash[:16],
    }
    listed = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())
    replay = f"<p>Replay: <code>{escape(report.replay)}</code></p>" if report.replay else ""
    return (
        f'<header><h1>{escape(_title(report))}</h1><button id="theme" type="button">light / dark</button></header>'
        f"<dl>{listed}</dl>{replay}"
    )


def _verdict(report: Report) -> str:
    if report.ok:
        return '<p class="verdict good">No invariant was broken, and everything expected came true.</p>'
    found = [
        f"Invariant {v['invariant']} broken at {v['at_s']:.3f} s, {v['peer'] or 'all'}: {v['text']}"
        for v in report.violations
    ]
    found += [f"Not as expected: {text}" for text in report.unmet]
    found += [f"Unforeseen: {text}" for text in report.errors]
    items = "".join(f"<li><pre>{escape(text)}</pre></li>" for text in found[:ROWS_MAX])
    return f'<div class="verdict bad"><ol>{items}</ol>{_more(len(found))}</div>'


def _peers(names: list[str], colours: dict[str, str]) -> str:
    chips = "".join(
        f'<span class="chip" data-peer="{escape(n)}"><i style="background:{colours[n]}"></i>{escape(n)}</span>'
        for n in names[:ROWS_MAX]
    )
    return f'<nav title="point at a peer to see it on all charts; click to keep it">{chips}{_more(len(names))}</nav>'


def _faults(report: Report) -> str:
    if not report.faults:
        return "<section><h2>Faults</h2><p>None.</p></section>"
    listed = "".join(
        f"<tr><td>{k}</td><td>{escape(str(f['kind']))}</td><td>{escape(_who(f))}</td>"
        f"<td>{f['at_s']:.3f}</td><td>{_end(f)}</td></tr>"
        for k, f in enumerate(report.faults[:ROWS_MAX], 1)
    )
    return (
        "<section><h2>Faults</h2><table><thead><tr><th>#</th><th>kind</th><th>who</th><th>from, s</th><th>until, s</th>"
        f"</tr></thead><tbody>{listed}</tbody></table>{_more(len(report.faults))}</section>"
    )


def _more(count: int) -> str:
    return f"<p>… and {count - ROWS_MAX} more in report.json.</p>" if count > ROWS_MAX else ""


def _legend(names: tuple[str, ...]) -> str:
    chips = "".join(f'<span class="key"><i class="{n}"></i>{n}</span>' for n in names)
    return f'<span class="legend">{chips}</span>'


def _or_none(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _who(fault: dict[str, Any]) -> str:
    who = [str(name) for name in fault["who"]]
    return ", ".join(who) if len(who) <= 12 else f"{', '.join(who[:10])} and {len(who) - 10} more"


def _end(fault: dict[str, Any]) -> str:
    return "for good" if fault["until_s"] is None else f"{fault['until_s']:.3f}"


# --- what the charts show ---------------------------------------------------------------------------------------------


def _bands(report: Report) -> list[Band]:
    return [
        Band(
            at=fault["at_s"],
            until=fault["until_s"],
            tag=f"{k}",
            label=f"{k}: {fault['kind']} {_who(fault)}, {fault['at_s']:g} s to {_end(fault)}",
        )
        for k, fault in enumerate(report.faults, 1)
    ]


def _marks(report: Report) -> dict[str, str]:
    """By peer: the faults that touched it."""
    touched: dict[str, list[str]] = {}
    for k, fault in enumerate(report.faults, 1):
        for name in fault["who"]:
            touched.setdefault(name, []).append(f"{k}: {fault['kind']}")
    return {name: f"{name}: {'; '.join(said[:20])}" for name, said in touched.items()}


def _phases(report: Report) -> Iterator[Segment]:
    for name, phase, start, end, round_ in report.spans:
        label = f"{name}, round {round_}: {phase}, {start:g} s to {end:g} s"
        yield Segment(row=name, start=start, end=end, css=PHASES.get(phase.replace(" ", "_"), "other"), label=label)


def _members(report: Report) -> Iterator[Segment]:
    """One stretch for every change of what the others hold a peer for."""
    held: dict[str, dict[str, str]] = {}
    since: dict[str, tuple[float, str, str]] = {}
    for at, observer, subject, state in report.membership:
        held.setdefault(subject, {})[observer] = state
        css, label = _opinion(subject, held[subject])
        start, before_css, before_label = since.get(subject, (at, css, label))
        if (before_css, before_label) != (css, label) and at > start:
            yield Segment(row=subject, start=start, end=at, css=before_css, label=before_label)
            start = at
        since[subject] = (start, css, label)
    for subject, (start, css, label) in since.items():
        yield Segment(row=subject, start=start, end=report.until_s, css=css, label=label)


def _opinion(subject: str, held: dict[str, str]) -> tuple[str, str]:
    count = {state: list(held.values()).count(state) for state in ("dead", "left", "suspect", "alive")}
    css = next((state for state, n in count.items() if 3 * n >= len(held)), "alive")
    said = ", ".join(f"{state} by {n}" for state, n in count.items() if n)
    return css, f"{subject}: held {said or 'for something else'}"


# --- looks ------------------------------------------------------------------------------------------------------------

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
<script>{script}</script>
</body>
</html>
"""

_STYLE = """
:root { color-scheme: light dark; --ground: #fbfbf9; --ink: #1d2327; --dim: #68737c; --line: #dcdfe0; --card: #fff;
  --fault: #c2410c; --cell: #1d5fa8; --good: #15803d; --bad: #b91c1c; }
@media (prefers-color-scheme: dark) { :root:not([data-theme=light]) { --ground: #14181b; --ink: #e4e8ea; --dim: #93a0a9;
  --line: #2c3439; --card: #1b2125; --fault: #fb923c; --cell: #6db3ff; --good: #4ade80; --bad: #f87171; } }
:root[data-theme=dark] { color-scheme: dark; --ground: #14181b; --ink: #e4e8ea; --dim: #93a0a9; --line: #2c3439;
  --card: #1b2125; --fault: #fb923c; --cell: #6db3ff; --good: #4ade80; --bad: #f87171; }
:root[data-theme=light] { color-scheme: light; }
body { max-width: 1100px; margin: 0 auto; padding: 16px; background: var(--ground); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
header { display: flex; justify-content: space-between; align-items: baseline; }
h1 { font-size: 1.5rem; margin: .2em 0; } h2 { font-size: 1.05rem; margin: 0; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; margin: 14px 0; }
section > p { color: var(--dim); margin: 2px 0 6px; font-size: .87rem; }
dl { display: flex; flex-wrap: wrap; gap: 6px 26px; margin: 8px 0; } dt { color: var(--dim); font-size: .8rem; }
dd { margin: 0; font-variant-numeric: tabular-nums; }
code, pre { font: 13px ui-monospace, monospace; margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
button { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--line); border-radius: 6px; }
.verdict { border-left: 4px solid; padding: 6px 12px; } .good { border-color: var(--good); } .bad { border-color: var(--bad); }
nav { position: sticky; top: 0; z-index: 1; display: flex; flex-wrap: wrap; gap: 2px 8px; padding: 6px 0; font-size: .8rem;
  background: var(--ground); max-height: 5.6em; overflow: auto; }
.chip { cursor: pointer; padding: 0 4px; border-radius: 4px; } .chip.on { outline: 1px solid var(--ink); }
.chip i, .key i { display: inline-block; width: .75em; height: .75em; margin-right: .3em; border-radius: 2px; }
.key { margin-right: .9em; }
svg { width: 100%; height: auto; display: block; }
.label { fill: var(--dim); font-size: 10.5px; } .grid { stroke: var(--line); fill: none; }
.line { fill: none; stroke-width: 1.3; opacity: .62; stroke-linecap: round; }
.median { fill: none; stroke: var(--ink); stroke-width: 2.2; }
.cell { fill: var(--cell); } .mark { fill: var(--fault); }
.shade, .band rect { fill: var(--fault); fill-opacity: .08; pointer-events: none; } .band rect { fill-opacity: 0; }
.band path { stroke: var(--fault); stroke-opacity: .55; fill: none; } .band:hover rect { fill-opacity: .25; }
.band:hover path { stroke-opacity: 1; stroke-width: 3; }
.tag { fill: var(--fault); font-size: 10px; }
.train, .alive { fill: #2f9e6b; background: #2f9e6b; } .convene { fill: #a78bda; background: #a78bda; }
.exchange { fill: #3b82d0; background: #3b82d0; } .vote { fill: #e0b13a; background: #e0b13a; }
.commit { fill: #d2691e; background: #d2691e; } .download { fill: #22a5b8; background: #22a5b8; }
.wait, .left { fill: #9aa5ac; background: #9aa5ac; } .other { fill: #6b7780; background: #6b7780; }
.done { fill: #b9d8c6; background: #b9d8c6; } .suspect { fill: #e0b13a; background: #e0b13a; }
.dead { fill: #c0392b; background: #c0392b; }
body.focus svg [data-peer]:not(.on) { opacity: .12; } body.focus svg .line.on { opacity: 1; stroke-width: 2.6; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 2px 10px 2px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
"""

_SCRIPT = """
const all = [...document.querySelectorAll('[data-peer]')];
let kept = null;
function light(name) {
  document.body.classList.toggle('focus', name !== null);
  for (const e of all) e.classList.toggle('on', e.dataset.peer === name);
}
for (const chip of document.querySelectorAll('.chip')) {
  chip.addEventListener('mouseenter', () => light(chip.dataset.peer));
  chip.addEventListener('mouseleave', () => light(kept));
  chip.addEventListener('click', () => { kept = kept === chip.dataset.peer ? null : chip.dataset.peer; light(kept); });
}
document.getElementById('theme').addEventListener('click', () => {
  const root = document.documentElement;
  const dark = getComputedStyle(root).colorScheme === 'dark' ||
    (root.dataset.theme === undefined && matchMedia('(prefers-color-scheme: dark)').matches);
  root.dataset.theme = dark ? 'light' : 'dark';
});
"""
