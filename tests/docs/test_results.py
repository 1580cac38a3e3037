"""docs/results.json is what docs/log/ reports, and what docs/results.md and the picture show."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "docs" / "results.json").read_text(encoding="utf-8"))
ROWS = [*RESULTS["rows"], *RESULTS["heads"]]


def read(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_the_picture_is_drawn_from_the_figures() -> None:
    draw = runpy.run_path(str(ROOT / "tests" / "bench" / "results_picture.py"))["draw"]
    assert read("results.svg") == draw(RESULTS), "run tests/bench/results_picture.py"
    assert "docs/results.svg" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_figure_stands_in_the_log() -> None:
    pages = [f"log/{path.name}" for path in (ROOT / "docs" / "log").glob("*.md")]
    log = [line for page in pages for line in read(page).splitlines() if line.startswith("| ")]
    for row in ROWS:
        figures = [f"{ms:.3f}" for ms in row["tpot_ms"]]
        figures += [f"{row['prefill_s']:.4f} s", f"{row['cold_start_s']:.1f} s"]
        assert any(line.endswith(f"| {' | '.join(figures)} |") for line in log), row


def test_the_table_has_the_same_figures_rounded() -> None:
    table = read("results.md").splitlines()
    for row in ROWS:
        times = [f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}" for ms in row["tpot_ms"]]
        named = f"| {row['target']}, {row['method']}, {row['engine']} | {' | '.join(times)} |"
        assert any(line.startswith(named) for line in table), named
