"""Charts as inline SVG, drawn from plain numbers. Colours are CSS variables of report_style."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 480


@dataclass(slots=True, frozen=True, kw_only=True)
class Series:
    """One colour of a grouped bar chart; null values leave a gap."""

    name: str
    color: str
    values: Sequence[float | None]


@dataclass(slots=True, frozen=True, kw_only=True)
class Bar:
    """One horizontal bar, with its interval if there is one."""

    label: str
    value: float
    text: str
    color: str
    ci95: Sequence[float] | None = None


@dataclass(slots=True, frozen=True, kw_only=True)
class Stack:
    """One stacked horizontal bar: (part, value, colour)."""

    label: str
    parts: Sequence[tuple[str, float, str]]
    text: str


def grouped_bars(labels: Sequence[str], series: Sequence[Series], *, description: str) -> str:
    """Rates from 0 to 1 as upright bars in groups, a group per label."""
    height, left, bottom, top = 230, 38, 26, 14
    plot = height - top - bottom
    parts = []
    for percent in (0, 25, 50, 75, 100):
        y = top + plot * (1 - percent / 100)
        parts.append(f'<line class="grid" x1="{left}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="axis" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{percent}%</text>'
        )
    group = (WIDTH - left) / max(1, len(labels))
    bar = min(46.0, group * 0.78 / len(series))
    for i, label in enumerate(labels):
        middle = left + group * (i + 0.5)
        parts.append(
            f'<text class="axis" x="{middle:.1f}" y="{height - 8}" text-anchor="middle">'
            f"{escape(label)}</text>"
        )
        for j, one in enumerate(series):
            value = one.values[i]
            if value is None:
                continue
            x, size = middle + (j - len(series) / 2) * bar, plot * value
            y = top + plot - size
            parts.append(
                f'<rect x="{x + 1.5:.1f}" y="{y:.1f}" width="{bar - 3:.1f}" height="{size:.1f}" '
                f'rx="3" fill="{one.color}"><title>{escape(one.name)}: {value:.1%}</title></rect>'
            )
            if bar >= 24:
                parts.append(
                    f'<text x="{x + bar / 2:.1f}" y="{y - 4:.1f}" text-anchor="middle">'
                    f"{100 * value:.0f}</text>"
                )
    return _svg(height, parts, description)


def horizontal_bars(
    bars: Sequence[Bar], *, description: str, origin: float = 0.0, mark: float | None = None
) -> str:
    """A bar per row from `origin`, with a whisker for its interval; `mark` is a dashed line."""
    row, left, right = 34, _label_width([b.label for b in bars]), 92
    ends = [b.value for b in bars] + [b.ci95[1] for b in bars if b.ci95] + [mark or origin]
    span = max(ends) - origin or 1.0
    scale = (WIDTH - left - right) / span
    parts = []
    for number, bar in enumerate(bars):
        y = 6 + row * number
        width = max(0.0, (bar.value - origin) * scale)
        end = left + width
        parts.append(
            f'<text x="{left - 10}" y="{y + 16}" text-anchor="end">{escape(bar.label)}</text>'
            f'<rect x="{left}" y="{y}" width="{width:.1f}" height="22" rx="4" fill="{bar.color}"/>'
        )
        if bar.ci95:
            low, high = (left + (value - origin) * scale for value in bar.ci95)
            end = max(end, high)
            parts.append(_whisker(max(low, left), high, y + 11))
        parts.append(f'<text x="{end + 9:.1f}" y="{y + 16}">{escape(bar.text)}</text>')
    height = 6 + row * len(bars)
    if mark is not None:
        x = left + (mark - origin) * scale
        parts.append(
            f'<line class="grid" stroke-dasharray="4 3" x1="{x:.1f}" x2="{x:.1f}" y1="0" '
            f'y2="{height}"/>'
        )
    return _svg(height, parts, description)


def stacked_bars(stacks: Sequence[Stack], *, description: str) -> str:
    """Stacked horizontal bars on one scale."""
    row, left, right = 40, _label_width([s.label for s in stacks]), 76
    total = max((sum(value for _, value, _ in stack.parts) for stack in stacks), default=0) or 1
    scale = (WIDTH - left - right) / total
    parts = []
    for number, stack in enumerate(stacks):
        x, y = float(left), 6 + row * number
        parts.append(
            f'<text x="{left - 10}" y="{y + 19}" text-anchor="end">{escape(stack.label)}</text>'
        )
        for name, value, color in stack.parts:
            width = value * scale
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(0.0, width - 1):.1f}" height="28" rx="2" '
                f'fill="{color}"><title>{escape(name)}: {value:.3f} ms</title></rect>'
            )
            x += width
        parts.append(f'<text x="{x + 8:.1f}" y="{y + 19}">{escape(stack.text)}</text>')
    return _svg(6 + row * len(stacks), parts, description)


def _label_width(labels: Sequence[str]) -> int:
    return min(230, 24 + round(7.8 * max((len(label) for label in labels), default=0)))


def _whisker(low: float, high: float, y: float) -> str:
    return (
        f'<path class="whisker" fill="none" d="M{low:.1f} {y - 5}V{y + 5}M{low:.1f} {y}'
        f'H{high:.1f}M{high:.1f} {y - 5}V{y + 5}"/>'
    )


def _svg(height: float, parts: Sequence[str], description: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(description)}">'
        f"{''.join(parts)}</svg>"
    )
