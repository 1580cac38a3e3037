"""Maps of a ratio by batch size and context length: tables whose cells are coloured by it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydraspec.study.blocks import Block, Line, Table

DOES_NOT_FIT = "does not fit"
# Least |log2| of a ratio for each tone: 2 %, 10 %, 30 % and 80 % above or below 1.
TONES = tuple(math.log2(each) for each in (1.02, 1.1, 1.3, 1.8))


@dataclass(slots=True, frozen=True)
class Cell:
    """The text of a cell and the ratio that colours it, above 1 good; None: not coloured."""

    text: str
    ratio: float | None = None


def tone(ratio: float | None) -> str:
    """The CSS class of a ratio: up1 to up4, down1 to down4, or none within 2 % of 1."""
    if ratio is None or ratio <= 0:
        return ""
    strength = sum(abs(math.log2(ratio)) >= least for least in TONES)
    return f"{'up' if ratio > 1 else 'down'}{strength}" if strength else ""


def map_block(
    title: str,
    note: str,
    cells: Mapping[tuple[int, int], Cell],
    *,
    sentences: Sequence[str] = (),
) -> Block:
    """A block with a line for each context and a column for each batch, by (batch, context); a cell
    that is not there says that its KV does not fit."""
    batches = sorted({batch for batch, _ in cells})
    contexts = sorted({context for _, context in cells})
    missing = Cell(DOES_NOT_FIT)
    lines = []
    for context in contexts:
        row = [cells.get((batch, context), missing) for batch in batches]
        lines.append(
            Line(
                cells=[f"{context:,}", *(cell.text for cell in row)],
                tones=["", *(tone(cell.ratio) for cell in row)],
            )
        )
    header = ["context", *(f"{batch} at once" for batch in batches)]
    table = Table(header=header, lines=lines)
    return Block(title=title, note=note, sentences=sentences, table=table)
