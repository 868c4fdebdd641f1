"""Charts as inline SVG, drawn here so that a report needs no library and no network.

Covers: lines over time, rows over time (Gantt and the like), bars, a matrix; axes with round figures; bands that mark faults;
thinning, so that a thousand peers still make a page that a browser opens. Does not know what the figures mean:
`report_page.py` does. All text goes through `escape`; shapes are classed and styled by the page's style sheet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 1040.0
LEFT, RIGHT, TOP, BOTTOM = 92.0, 16.0, 20.0, 26.0
# More points than pixels cannot be seen.
POINTS_MAX = 480
# A matrix with more cells cannot be read: neighbours share one.
MATRIX_MAX = 64
# Shapes narrower than this (pixels) are drawn together with the one before.
NARROW = 0.4
LOG_FROM_RATIO = 50.0

Point = Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Band:
    """A stretch of time to be marked. `until` None: to the end. `label` is shown on hovering, `tag` above the chart."""

    at: float
    until: float | None
    label: str
    tag: str


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Part of a row. `css`: its class."""

    row: str
    start: float
    end: float
    css: str
    label: str


@dataclass(frozen=True)
class Scale:
    """From values to pixels; `low` goes to `start`, `high` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log10(x) if self.log else x for x in (self.low, self.high, max(value, self.low)))
        return self.start + (value - low) / ((high - low) or 1.0) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round figures inside: powers of ten on a log scale, else steps of 1, 2 or 5."""
        if self.log:
            powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            step = max(1, len(powers) // 6)
            return [10.0**p for p in powers][::step]
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        rough = span / 8
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


def colour(index: int) -> str:
    """Of the index-th peer: neighbours differ (golden angle), and all can be seen on light and on dark."""
    return f"hsl({index * 137.508 % 360:.0f} 62% 50%)"


def plain(value: float) -> str:
    """A figure for an axis."""
    return f"{value:.4g}" if abs(value) < 1e6 else f"{value:.2e}"


def size(value: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000 or unit == "GB":
            return f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def thinned(points: Sequence[Point], most: int = POINTS_MAX) -> list[Point]:
    """At most about `most` points with the same outline: lowest and highest of each stretch, in order."""
    if len(points) <= most:
        return list(points)
    stretch = math.ceil(len(points) / (most / 2))
    kept: list[Point] = []
    for at in range(0, len(points), stretch):
        part = range(at, min(at + stretch, len(points)))
        ends = {min(part, key=lambda k: points[k][1]), max(part, key=lambda k: points[k][1])}
        kept += [points[k] for k in sorted(ends)]
    return kept


def unbroken(points: Sequence[Point]) -> list[Sequence[Point]]:
    """Cut where nothing was said for five times as long as usual: the process was down, and no line says otherwise."""
    steps = sorted(b[0] - a[0] for a, b in zip(points, points[1:]))
    if not steps:
        return [points]
    long = 5 * steps[len(steps) // 2]
    cuts = [k for k in range(1, len(points)) if points[k][0] - points[k - 1][0] > long]
    return [points[a:b] for a, b in zip([0, *cuts], [*cuts, len(points)])]


# --- charts -----------------------------------------------------------------------------------------------------------


def lines(
    series: Mapping[str, Sequence[Point]],
    *,
    until: float,
    bands: Sequence[Band] = (),
    colours: dict[str, str],
    unit: Callable[[float], str] = plain,
    height: float = 230.0,
    median: bool = True,
    logarithmic: bool = True,
) -> str:
    """One thin line a name and a thick one for their median, over time.

    A wide range of positive values gets a log axis, unless `logarithmic` is off.
    """
    clean = {n: [p for p in points if _number(p[0]) and _number(p[1])] for n, points in series.items()}
    values = [p[1] for points in clean.values() for p in points]
    if not values:
        return '<p class="none">Nobody said anything about this.</p>'
    low, high = min(values), max(values)
    log = logarithmic and low > 0 and high / low > LOG_FROM_RATIO
    if not log:
        low, high = (min(low, 0.0), high) if low > -high / 4 else (low, high)
        high = high if high > low else low + 1.0
    x = Scale(0.0, max(until, 1e-9), LEFT, WIDTH - RIGHT)
    y = Scale(low, high, height - BOTTOM, TOP, log)
    drawn = [_bands(bands, x, height), _axes(x, y, height, unit)]
    for name, points in clean.items():
        if points:
            way = "".join(_way(thinned(run), x, y) for run in unbroken(points))
            style = f'style="stroke:{escape(colours.get(name, "gray"))}"'
            drawn.append(
                f'<path class="line" data-peer="{escape(name)}" {style} d="{way}"><title>{escape(name)}</title></path>'
            )
    if median and len(clean) > 2:
        drawn.append(f'<path class="median" d="{_way(_median(list(clean.values()), until), x, y)}"/>')
    return _svg(drawn, height)


def rows(
    segments: Iterable[Segment],
    names: Sequence[str],
    *,
    until: float,
    bands: Sequence[Band] = (),
    row_height: float | None = None,
) -> str:
    """A row for each name, in it coloured stretches of time."""
    if not names:
        return '<p class="none">There are no peers.</p>'
    each = row_height or max(3.0, min(16.0, 1400.0 / len(names)))
    height = TOP + each * len(names) + BOTTOM
    x = Scale(0.0, max(until, 1e-9), LEFT, WIDTH - RIGHT)
    top = {name: TOP + each * k for k, name in enumerate(names)}
    drawn = [_time_axis(x, height)]
    label_every = math.ceil(9.0 / each)
    for k, name in enumerate(names):
        if k % label_every == 0:
            drawn.append(
                f'<text class="label" data-peer="{escape(name)}" x="{LEFT - 6:.0f}" '
                f'y="{top[name] + each / 2 + 3:.1f}" text-anchor="end">{escape(_short(name))}</text>'
            )
    reached = dict.fromkeys(names, -1.0)
    for part in segments:
        left, right = x(part.start), x(min(part.end, until))
        if part.row not in top or right - reached[part.row] < NARROW:
            continue
        if 0 <= left - reached[part.row] < 2 * NARROW:
            left = reached[part.row]  # what was left out in between leaves no hole
        reached[part.row] = right
        drawn.append(
            f'<rect class="{escape(part.css)}" data-peer="{escape(part.row)}" x="{left:.1f}" y="{top[part.row]:.1f}" '
            f'width="{max(right - left, NARROW):.1f}" height="{max(each - 1, 2):.1f}">'
            f"<title>{escape(part.label)}</title></rect>"
        )
    drawn.append(_bands(bands, x, height))
    return _svg(drawn, height)


def bars(
    values: dict[str, float], *, unit: Callable[[float], str], colours: dict[str, str], marks: dict[str, str]
) -> str:
    """Upright bars. A name in `marks` gets a triangle that says so on hovering."""
    if not values:
        return '<p class="none">There are no peers.</p>'
    height = 190.0
    y = Scale(0.0, max([*values.values(), 1e-9]), height - BOTTOM, TOP)
    each = min(72.0, (WIDTH - LEFT - RIGHT) / len(values))
    drawn = [_value_axis(y, unit)]
    label_every = math.ceil(26.0 / each)
    for k, (name, value) in enumerate(values.items()):
        left, top = LEFT + each * k, y(value)
        drawn.append(
            f'<rect class="bar" data-peer="{escape(name)}" style="fill:{escape(colours.get(name, "gray"))}" '
            f'x="{left + each * 0.1:.1f}" y="{top:.1f}" width="{each * 0.8:.1f}" height="{height - BOTTOM - top:.1f}">'
            f"<title>{escape(f'{name}: {unit(value)}')}</title></rect>"
        )
        middle = left + each / 2
        if k % label_every == 0:
            drawn.append(_text(_short(name), middle, height - BOTTOM + 14, "middle"))
        if name in marks:
            drawn.append(
                f'<path class="mark" d="M{middle:.1f} {top - 3:.1f}l-4 -7h8z"><title>{escape(marks[name])}</title></path>'
            )
    return _svg(drawn, height)


def matrix(
    cells: dict[tuple[str, str], float], names: Sequence[str], *, unit: Callable[[float], str], marks: dict[str, str]
) -> str:
    """Rows send to columns; the darker, the more. Many names share rows and columns. Marked names carry a triangle."""
    if not names or not cells:
        return '<p class="none">Nothing was sent.</p>'
    share = math.ceil(len(names) / MATRIX_MAX)
    groups = [names[k : k + share] for k in range(0, len(names), share)]
    place = {name: k for k, group in enumerate(groups) for name in group}
    sums: dict[tuple[int, int], float] = {}
    for (source, target), value in cells.items():
        if source in place and target in place:
            key = place[source], place[target]
            sums[key] = sums.get(key, 0.0) + value
    most = max(sums.values(), default=0.0) or 1.0
    titles = [g[0] if len(g) == 1 else f"{g[0]}-{g[-1]}" for g in groups]
    each = max(9.0, min(30.0, 560.0 / len(groups)))
    height = TOP + each * len(groups) + BOTTOM + 8
    drawn = []
    label_every = math.ceil(26.0 / each)
    for k, title in enumerate(titles):
        at = each * k + each / 2
        mark = next((marks[name] for name in groups[k] if name in marks), None)
        if share > 1 or each >= 9:
            drawn.append(_text(_short(title), LEFT - 14, TOP + at + 3, "end"))
        if k % label_every == 0:
            drawn.append(_text(_short(title), LEFT + at, TOP + each * len(groups) + 14, "middle"))
        if mark is not None:
            drawn.append(
                f'<path class="mark" d="M{LEFT - 2:.1f} {TOP + at:.1f}l-7 -4v8z"><title>{escape(mark)}</title></path>'
            )
    for (row, column), value in sorted(sums.items()):
        drawn.append(
            f'<rect class="cell" x="{LEFT + each * column:.1f}" y="{TOP + each * row:.1f}" width="{each - 1:.1f}" '
            f'height="{each - 1:.1f}" style="fill-opacity:{0.06 + 0.94 * math.sqrt(value / most):.2f}">'
            f"<title>{escape(f'{titles[row]} to {titles[column]}: {unit(value)}')}</title></rect>"
        )
    return _svg(drawn, height)


# --- parts ------------------------------------------------------------------------------------------------------------


def _svg(parts: Iterable[str], height: float) -> str:
    inside = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" preserveAspectRatio="xMidYMin">{inside}</svg>'


def _text(text: str, x: float, y: float, anchor: str) -> str:
    return f'<text class="label" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _axes(x: Scale, y: Scale, height: float, unit: Callable[[float], str]) -> str:
    return _time_axis(x, height) + _value_axis(y, unit)


def _time_axis(x: Scale, height: float) -> str:
    drawn = []
    for tick in x.ticks():
        drawn.append(f'<path class="grid" d="M{x(tick):.1f} {TOP}V{height - BOTTOM:.1f}"/>')
        drawn.append(_text(f"{tick:g} s", x(tick), height - BOTTOM + 14, "middle"))
    return "".join(drawn)


def _value_axis(y: Scale, unit: Callable[[float], str]) -> str:
    drawn = []
    for tick in y.ticks():
        drawn.append(f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}"/>')
        drawn.append(_text(unit(tick), LEFT - 6, y(tick) + 3, "end"))
    return "".join(drawn)


def _bands(bands: Sequence[Band], x: Scale, height: float) -> str:
    """Their union is shaded, once, so that a hundred overlapping ones still let the chart be seen; each has a line where it
    begins, and lights up when one points at that. Tags that would cover each other are left out."""
    inside = sorted((b for b in bands if b.at <= x.high), key=lambda b: b.at)
    spans = [(x(max(0.0, b.at)), x(x.high if b.until is None else min(x.high, b.until))) for b in inside]
    tall = f'y="{TOP}" height="{height - TOP - BOTTOM:.1f}"'
    drawn = [f'<rect class="shade" x="{a:.1f}" {tall} width="{max(b - a, 1.0):.1f}"/>' for a, b in _union(spans)]
    free = LEFT - 1
    for band, (left, right) in zip(inside, spans):
        tag = ""
        if left >= free:
            tag = f'<text class="tag" x="{left:.1f}" y="{TOP - 7}">{escape(band.tag)}</text>'
            free = left + 7.0 * len(band.tag) + 4
        drawn.append(
            f'<g class="band"><rect x="{left:.1f}" {tall} width="{max(right - left, 1.0):.1f}"/>'
            f'<path d="M{left:.1f} {TOP - 4}V{height - BOTTOM:.1f}"/>{tag}<title>{escape(band.label)}</title></g>'
        )
    return "".join(drawn)


def _union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of intervals sorted by their start."""
    merged: list[tuple[float, float]] = []
    for start, end in spans:
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _way(points: Sequence[Point], x: Scale, y: Scale) -> str:
    """The last stroke has no length, so that a lone point is a dot."""
    return "M" + "L".join(f"{x(p[0]):.1f} {y(p[1]):.1f}" for p in points) + "h0"


def _median(series: Sequence[Sequence[Point]], until: float) -> list[Point]:
    """Over all lines that have begun, at a hundred and twenty times; a line keeps its last value."""
    found: list[Point] = []
    places = [0] * len(series)
    for step in range(121):
        at = until * step / 120
        now = []
        for k, points in enumerate(series):
            while places[k] < len(points) and points[places[k]][0] <= at:
                places[k] += 1
            if places[k]:
                now.append(points[places[k] - 1][1])
        if now:
            found.append((at, sorted(now)[len(now) // 2]))
    return found


def _number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _short(name: str) -> str:
    return name if len(name) <= 12 else name[:11] + "…"
