"""Charts as SVG elements with their geometry, which a template writes. Colours are CSS values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydraspec.study.texts import ci_words, number

WIDTH = 480
WIDEST = 2.5
FEW_DRAFTS = 30  # with fewer a rate is known to 0.1 at best, so that its bar shows their number
LEFT, BOTTOM, TOP = 42, 26, 14  # margins of charts of rates
COLORS = (*(f"var(--p{i})" for i in (2, 4, 1, 3, 0, 5)), "var(--accepted)", "var(--bad)")


@dataclass(slots=True, frozen=True)
class Mark:
    """An SVG element: tag, attributes, text, and the title shown on hovering."""

    tag: str
    attributes: Mapping[str, object]  # those that are None are left out
    text: str = ""
    title: str = ""


@dataclass(slots=True, frozen=True, kw_only=True)
class Chart:
    """A drawing of `width` x `height`; `description` is for readers who cannot see the drawing."""

    height: float
    description: str
    marks: list[Mark]
    legend: Sequence[tuple[str, str]] = ()  # (name, colour)
    width: float = WIDTH


@dataclass(slots=True, frozen=True, kw_only=True)
class Series:
    """The bars of one colour in a grouped bar chart, or a line; None values leave a gap. `title` is
    shown on hovering, or the name if `title` is empty."""

    name: str
    color: str
    values: Sequence[float | None]
    title: str = ""


@dataclass(slots=True, frozen=True, kw_only=True)
class Bar:
    """A horizontal bar; `text` is shown after the bar, `ci95` as a whisker."""

    label: str
    value: float
    text: str
    color: str
    ci95: Sequence[float] | None = None


@dataclass(slots=True, frozen=True, kw_only=True)
class Stack:
    """A stacked horizontal bar; `parts` are (name, milliseconds, colour)."""

    label: str
    parts: Sequence[tuple[str, float, str]]
    text: str


def grouped_bars(labels: Sequence[str], series: Sequence[Series], *, description: str) -> Chart:
    """Chart of rates from 0 to 1 as upright bars in groups, a group per label."""
    height, group = 230, (WIDTH - LEFT) / max(1, len(labels))
    bar = min(46.0, group * 0.78 / len(series))
    middles = [LEFT + group * (i + 0.5) for i in range(len(labels))]
    marks, plot = _rate_axes(height, labels, middles)
    for i, middle in enumerate(middles):
        for j, one in enumerate(series):
            if (value := one.values[i]) is None:
                continue
            x, y = middle + (j - len(series) / 2) * bar, TOP + plot * (1 - value)
            title = f"{one.name}: {value:.1%}"
            marks.append(_bar(x + 1.5, y, bar - 3, plot * value, 3, one.color, title))
            if bar >= 24:
                marks.append(_text(x + bar / 2, y - 4, f"{100 * value:.0f}", "middle"))
    legend = [(one.name, one.color) for one in series]
    return Chart(height=height, description=description, marks=marks, legend=legend)


def curves(labels: Sequence[str], series: Sequence[Series], *, description: str) -> Chart:
    """Chart of rates from 0 to 1: a line per series over the labels, with a dot for each value."""
    height, step = 260, (WIDTH - LEFT - 24) / max(1, len(labels) - 1)
    places = [LEFT + 12 + step * i for i in range(len(labels))]
    marks, plot = _rate_axes(height, labels, places)
    for one in series:
        name = one.title or one.name
        points = [
            (x, TOP + plot * (1 - value), f"{name}: {value:.1%}")
            for x, value in zip(places, one.values, strict=True)
            if value is not None
        ]
        path = _path([(x, y) for x, y, _ in points]) if points else ""
        drawn = {"d": path, "fill": "none", "stroke": one.color, "stroke-width": 2}
        marks.append(Mark("path", drawn, title=name))
        for x, y, title in points:
            at = {"cx": _place(x), "cy": _place(y), "r": 3.5, "fill": one.color}
            marks.append(Mark("circle", at, title=title))
    legend = list(dict.fromkeys((one.name, one.color) for one in series))
    return Chart(height=height, description=description, marks=marks, legend=legend)


def _rate_axes(
    height: float, labels: Sequence[str], places: Sequence[float]
) -> tuple[list[Mark], float]:
    """Grid lines from 0 to 100 % with the labels below, and the height from 0 to 100 %."""
    plot, marks = height - TOP - BOTTOM, []
    for percent in (0, 25, 50, 75, 100):
        y = TOP + plot * (1 - percent / 100)
        marks += [_line(LEFT, WIDTH, y, y), _text(LEFT - 6, y + 4, f"{percent}%", "end", "axis")]
    for label, x in zip(labels, places, strict=True):
        marks.append(_text(x, height - 8, label, "middle", "axis"))
    return marks, plot


def horizontal_bars(
    bars: Sequence[Bar], *, description: str, mark: float | None = None
) -> Chart | None:
    """Chart of bars from 0, one per row, with whiskers for intervals; None without bars. `mark` is
    the value at which a dashed line stands. Intervals are cut at WIDEST times the longest bar.
    """
    if not bars:
        return None
    row, left = 34, _label_width([b.label for b in bars])
    right = 16 + round(7.6 * max(len(bar.text) for bar in bars))
    ends = [b.value for b in bars] + [b.ci95[1] for b in bars if b.ci95] + [mark or 0.0]
    most = min(max(ends), WIDEST * max(b.value for b in bars)) or 1.0
    scale = (WIDTH - left - right) / most
    height = 6 + row * len(bars)
    marks = []
    for i, bar in enumerate(bars):
        y, width = 6 + row * i, max(0.0, bar.value * scale)
        marks.append(_text(left - 10, y + 16, bar.label, "end"))
        marks.append(_bar(left, y, width, 22, 4, bar.color))
        end = left + width
        if bar.ci95:
            low, high = (left + min(value, most) * scale for value in bar.ci95)
            end = max(end, high)
            marks.append(_whisker(max(low, left), high, y + 11))
        marks.append(_text(end + 9, y + 16, bar.text))
    if mark is not None:
        x = left + mark * scale
        marks.append(_dashed(x, x, 0, height))
    return Chart(height=height, description=description, marks=marks)


def counted_bars(
    found: Sequence[tuple[str, float | None, Sequence[float] | None, int]],
    color: str,
    *,
    description: str,
    mark: float | None = None,
) -> Chart | None:
    """Chart of a bar for each (label, mean, interval, number of drafts) whose mean is known; None
    without bars. `mark` is the value at which a dashed line stands."""
    bars = [
        Bar(
            label=label,
            value=mean,
            text=number(mean) + ci_words(ci95) + few_words(count),
            color=color,
            ci95=ci95,
        )
        for label, mean, ci95, count in found
        if mean is not None
    ]
    return horizontal_bars(bars, description=description, mark=mark)


def few_words(num_drafts: int) -> str:
    """Note on the number of drafts that a bar stands for; empty from FEW_DRAFTS."""
    return f" (n={num_drafts})" if num_drafts < FEW_DRAFTS else ""


def stacked_bars(stacks: Sequence[Stack], *, description: str) -> Chart:
    """Chart of stacked horizontal bars on one scale, all of the same parts."""
    row, left, right = 40, _label_width([s.label for s in stacks]), 76
    total = max(sum(value for _, value, _ in stack.parts) for stack in stacks) or 1.0
    scale = (WIDTH - left - right) / total
    marks = []
    for i, stack in enumerate(stacks):
        x, y = float(left), 6 + row * i
        marks.append(_text(left - 10, y + 19, stack.label, "end"))
        for name, value, color in stack.parts:
            width, title = value * scale, f"{name}: {value:.3f} ms"
            marks.append(_bar(x, y, max(0.0, width - 1), 28, 2, color, title))
            x += width
        marks.append(_text(x + 8, y + 19, stack.text))
    height, legend = 6 + row * len(stacks), [(name, color) for name, _, color in stacks[0].parts]
    return Chart(height=height, description=description, marks=marks, legend=legend)


@dataclass(slots=True, frozen=True, kw_only=True)
class Spot:
    """A point of a scatter chart: `title` is shown on hovering, `label` beside the point, and the
    interval `ci95` of `y` as a whisker."""

    x: float
    y: float
    title: str
    label: str = ""
    ci95: Sequence[float] | None = None


@dataclass(slots=True, frozen=True, kw_only=True)
class Points:
    """Points of one colour in a scatter chart, joined by a line in this order, and drawn `shift` to
    the right."""

    name: str
    color: str
    values: Sequence[Spot]
    shift: float = 0.0


def scatter(
    series: Sequence[Points],
    front: Sequence[tuple[float, float]] = (),
    *,
    x_name: str,
    y_name: str,
    description: str,
    x_ticks: Sequence[float] = (),
    level: float | None = None,
) -> Chart:
    """Chart of points, whose axes begin at 0 where 0 is near. Intervals are cut at WIDEST times the
    highest point.

    Args:
        front: (x, y) of points that a dashed line joins, in this order.
        x_ticks: marked values of x; if empty, round values around the points.
        level: y of a dashed horizontal line.
    """
    height, left, bottom, top, right = 330, 58, 42, 26, 30
    spots = [spot for one in series for spot in one.values]
    most = WIDEST * max(spot.y for spot in spots)
    ends = [min(end, most) for spot in spots for end in (*(spot.ci95 or ()), spot.y)]
    y_ticks = _ticks([*ends, *([] if level is None else [level])])
    pad = 0.0 if not x_ticks else 0.12 * (x_ticks[-1] - x_ticks[0]) or 1.0
    x_ticks = x_ticks or _ticks([spot.x for spot in spots])
    x_scale = (WIDTH - left - right) / (x_ticks[-1] - x_ticks[0] + 2 * pad)
    y_scale = (height - top - bottom) / (y_ticks[-1] - y_ticks[0])

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (x - x_ticks[0] + pad) * x_scale, height - bottom - (y - y_ticks[0]) * y_scale

    marks = [_text(4, 12, y_name, kind="axis")]
    marks += [_text(WIDTH - right, height - 6, x_name, "end", "axis")]
    for tick in y_ticks:
        _, y = place(0, tick)
        marks += [_line(left, WIDTH - right, y, y)]
        marks += [_text(left - 6, y + 4, f"{tick:,g}", "end", "axis")]
    for tick in x_ticks:
        x, _ = place(tick, 0)
        marks.append(_text(x, height - bottom + 16, f"{tick:,g}", "middle", "axis"))
    if level is not None:
        _, y = place(0, level)
        marks.append(_dashed(left, WIDTH - right, y, y))
    if len(front) > 1:
        drawn = {"class": "front", "fill": "none", "d": _path([place(x, y) for x, y in front])}
        marks.append(Mark("path", drawn, title="no other job is better at both"))
    taken = [place(spot.x, spot.y) for spot in spots]
    for one in series:
        places = [(x + one.shift, y) for x, y in (place(spot.x, spot.y) for spot in one.values)]
        if len(places) > 1:
            marks.append(Mark("path", {"d": _path(places), "fill": "none", "stroke": one.color}))
        for (x, y), spot in zip(places, one.values, strict=True):
            if spot.ci95:
                low, high = (place(0, min(end, most))[1] for end in spot.ci95)
                marks.append(_upright_whisker(x, low, high, one.color))
            at = {"cx": _place(x), "cy": _place(y), "r": 5, "fill": one.color}
            marks += [Mark("circle", at, title=spot.title), _label(x, y, spot.label, taken)]
    legend = list(dict.fromkeys((one.name, one.color) for one in series))
    return Chart(height=height, description=description, marks=marks, legend=legend)


def _label(x: float, y: float, label: str, taken: list[tuple[float, float]]) -> Mark:
    """A label beside a point, if possible inside the chart and over no other point or label. The
    label's place is added to `taken`."""
    half = 4.0 * len(label)
    others = [other for other in taken if other != (x, y)]

    def is_free(at: tuple[float, float]) -> bool:
        return all(max(abs(at[0] - u) - half, 0) + abs(at[1] - v) > 9 for u, v in others)

    places = [(x + side * (7 + half), y + dy) for dy in (-8, 12) for side in (1, -1)]
    chosen = max(places, key=lambda at: (at[0] + half <= WIDTH, is_free(at)))
    taken.append(chosen)
    return _text(chosen[0], chosen[1] + 4, label, "middle")


def _ticks(values: Sequence[float]) -> list[float]:
    """Four to eight round values that span `values`; they begin at 0 where the lowest is below a
    quarter of the highest."""
    low, high = min(values), max(values)
    if high <= 0:
        return [0.0, 1.0]
    low = 0.0 if low < high / 4 else min(low, high * 0.98)
    step = 10.0 ** math.floor(math.log10((high - low) / 3))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if (high - low) / (step * factor) <= 6)
    first, last = math.floor(round(low / step, 9)), math.ceil(round(high / step, 9))
    return [round(step * i, 12) for i in range(first, last + 1)]


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def _label_width(labels: Sequence[str]) -> int:
    return min(300, 24 + round(7.8 * max((len(label) for label in labels), default=0)))


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str | None = None) -> Mark:
    at = {"class": kind, "x": _place(x), "y": _place(y), "text-anchor": anchor}
    return Mark("text", at, text)


def _bar(
    x: float, y: float, width: float, height: float, radius: float, color: str, title: str = ""
) -> Mark:
    at = {"x": _place(x), "y": _place(y), "width": _place(width), "height": _place(height)}
    return Mark("rect", {**at, "rx": radius, "fill": color}, title=title)


def _line(x1: float, x2: float, y1: float, y2: float) -> Mark:
    ends = {"x1": _place(x1), "x2": _place(x2), "y1": _place(y1), "y2": _place(y2)}
    return Mark("line", {"class": "grid", **ends})


def _dashed(x1: float, x2: float, y1: float, y2: float) -> Mark:
    ends = {"x1": _place(x1), "x2": _place(x2), "y1": _place(y1), "y2": _place(y2)}
    return Mark("line", {"class": "front", **ends})


def _upright_whisker(x: float, low: float, high: float, color: str) -> Mark:
    path = f"M{x - 4:.1f} {low:.1f}H{x + 4:.1f}M{x:.1f} {low:.1f}V{high:.1f}"
    path += f"M{x - 4:.1f} {high:.1f}H{x + 4:.1f}"
    return Mark("path", {"fill": "none", "d": path, "stroke": color, "stroke-width": 1.4})


def _whisker(low: float, high: float, y: float) -> Mark:
    path = f"M{low:.1f} {y - 5}V{y + 5}M{low:.1f} {y}H{high:.1f}M{high:.1f} {y - 5}V{y + 5}"
    return Mark("path", {"class": "whisker", "fill": "none", "d": path})


def _place(value: float) -> str:
    return f"{value:.1f}"
