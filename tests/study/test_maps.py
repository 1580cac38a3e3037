"""Maps by batch and context: what a cell says, its colour, and what the page escapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydraspec.study import html
from hydraspec.study.blocks import Section, Study
from hydraspec.study.maps import Cell, map_block, tone

CELLS = {
    (1, 512): Cell("<K>=3 1.50x", 1.5),
    (16, 512): Cell("K=1 0.90x", 0.9),
    (1, 32768): Cell("K=3 1.01x", 1.01),
}


@pytest.mark.parametrize(
    ("ratio", "found"),
    [
        *((None, ""), (1.0, ""), (1.019, ""), (0.985, ""), (0.0, "")),
        *((1.02, "up1"), (1.11, "up2"), (1.4, "up3"), (5.0, "up4")),
        *((0.97, "down1"), (1 / 1.11, "down2"), (1 / 1.4, "down3"), (0.1, "down4")),
    ],
)
def test_a_colour_is_as_strong_above_1_as_below(ratio: float | None, found: str) -> None:
    assert tone(ratio) == found


def test_lines_are_contexts_and_a_missing_cell_does_not_fit() -> None:
    table = map_block("Where", "", CELLS).table
    assert table is not None
    assert table.cells == [
        ["context", "1 at once", "16 at once"],
        ["512", "<K>=3 1.50x", "K=1 0.90x"],
        ["32,768", "K=3 1.01x", "does not fit"],
    ]
    assert [line.tones for line in table.lines] == [["", "up3", "down2"], ["", "", ""]]


def test_the_page_colours_cells_and_escapes_them() -> None:
    made = Study(question="<q>", sections=[Section(title="", blocks=[map_block("W", "", CELLS)])])
    page = html.study_page(made, Path())
    assert '<td class="up3">&lt;K&gt;=3 1.50x</td>' in page
    assert '<td class="down2">K=1 0.90x</td>' in page
    assert "<td>does not fit</td>" in page
    assert "td.down2 {" in page
