"""The README's picture: milliseconds per output token on a GPU, native beside vLLM.

    python tests/bench/results_picture.py      # draws docs/results.svg from docs/results.json

A row per target and a panel per method; the panels of a target share their scale.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
TITLES = {"none": "without drafts", "gemma4_mtp": "gemma4_mtp, 2.5 tokens per step"}
NOTE = "lower is better; random weights of the public shapes, drafts with synthetic acceptance"
WIDTH, TOP, PLOT, BELOW = 860, 96, 150, 60
LEFT, PANEL, GAP, BAR = 24, 396, 20, 44

# Colours by class, without CSS variables: converters to PNG know no variables.
STYLE = """
  .page { fill: #ffffff } .line { fill: #c9d0d9 } .native { fill: #2f6fde } .vllm { fill: #9aa3af }
  text { fill: #1b2430; font: 13px system-ui, "Segoe UI", Roboto, Helvetica, sans-serif }
  .title { font-size: 16px; font-weight: 600 }
  .muted { fill: #5c6775 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #12161c } .line { fill: #3a4552 }
    .native { fill: #6ea2ff } .vllm { fill: #7b8796 }
    text { fill: #e4e8ee } .muted { fill: #98a3b2 }
  }
"""


def draw(results: dict[str, Any]) -> str:
    """The picture as SVG, light or dark by the reader's preference."""
    targets = list(dict.fromkeys(row["target"] for row in results["rows"]))
    height = TOP + len(targets) * (PLOT + BELOW) - 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" class="page"/>',
        _text(LEFT, 28, f"Milliseconds per output token, one {results['device']}", "title"),
        _text(LEFT, 50, NOTE, "muted"),
    ]
    for i, engine in enumerate(results["engines"]):
        x = WIDTH - 250 + 110 * i
        parts += [_rect(x, 17, 12, 12, _class(engine)), _text(x + 18, 28, engine)]
    for i, target in enumerate(targets):
        rows = [row for row in results["rows"] if row["target"] == target]
        longest = max(ms for row in rows for ms in row["tpot_ms"])
        bottom = TOP + i * (PLOT + BELOW) + PLOT
        for j, method in enumerate(TITLES):
            of_method = [row for row in rows if row["method"] == method]
            x = LEFT + j * (PANEL + GAP)
            parts.append(_text(x, bottom - PLOT - 4, f"{target}, {TITLES[method]}"))
            parts += _panel(of_method, results["batches"], x, bottom, (PLOT - 24) / longest)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(rows: list[Any], batches: list[int], x: float, bottom: int, scale: float) -> list[str]:
    """Bars of each engine for every batch size, over a line."""
    parts = [_rect(x, bottom, PANEL, 1, "line")]
    for i, batch in enumerate(batches):
        middle = x + PANEL / len(batches) * (i + 0.5)
        parts.append(_text(middle, bottom + 20, f"batch {batch}", "muted", anchor="middle"))
        for j, row in enumerate(rows):
            ms, left = row["tpot_ms"][i], middle + (j - 1) * (BAR + 2)
            size = ms * scale
            parts.append(_rect(left, bottom - size, BAR, size, _class(row["engine"])))
            label = f"{ms:.3g}" if ms >= 10 else f"{ms:.2f}"
            parts.append(_text(left + BAR / 2, bottom - size - 6, label, anchor="middle"))
    return parts


def _class(engine: str) -> str:
    return "native" if engine == "native" else "vllm"


def _rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} class="{kind}"/>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def main() -> None:
    """Draw docs/results.svg again."""
    results = json.loads((DOCS / "results.json").read_text(encoding="utf-8"))
    (DOCS / "results.svg").write_text(draw(results), encoding="utf-8")


if __name__ == "__main__":
    main()
