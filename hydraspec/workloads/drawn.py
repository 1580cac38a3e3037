"""workload=images: pictures of coloured shapes, drawn from a seed, and questions on them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hydraspec.config.schema import WorkloadConfig
from hydraspec.pictures import png_url
from hydraspec.types import IMAGE

STREAM = 0x64726177  # mixed with the run's seed
COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (240, 210, 40),
    "black": (20, 20, 20),
    "white": (255, 255, 255),
}
BACKGROUND = (170, 170, 170)
KINDS = ("circle", "square")
CELL = 32  # pixels of a side; a shape lies in a cell
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")
SIZES = ((3, 3), (3, 4), (4, 3), (3, 5))  # rows and columns of cells
MOST = 5  # shapes that are counted
FORM = 'Reply only "answer is" and {}, in lower case.'


@dataclass(slots=True, frozen=True)
class Shape:
    """A shape in a cell of a picture."""

    kind: str  # in KINDS
    colour: str  # in COLOURS
    row: int
    column: int


@dataclass(slots=True, frozen=True, kw_only=True)
class Question:
    """Pictures with a question on them, and its answer."""

    category: str
    pictures: Sequence[np.ndarray]  # [height, width, 3] uint8 each
    text: str
    answer: str


def draw(size: tuple[int, int], shapes: Sequence[Shape]) -> np.ndarray:
    """Pixels [height, width, 3] uint8 of a picture of `size` cells (rows, columns)."""
    pixels = np.empty((size[0] * CELL, size[1] * CELL, 3), np.uint8)
    pixels[:] = BACKGROUND
    off = np.arange(CELL) - (CELL - 1) / 2  # from the middle of the cell
    radius = 0.4 * CELL
    masks = {
        "circle": np.add.outer(off**2, off**2) <= radius**2,
        "square": np.maximum.outer(np.abs(off), np.abs(off)) <= 0.8 * radius,
    }
    for shape in shapes:
        cell = pixels[shape.row * CELL :, shape.column * CELL :][:CELL, :CELL]
        cell[masks[shape.kind]] = COLOURS[shape.colour]
    return pixels


def question(seed: int, index: int) -> Question:
    """Question `index` of a run with `seed`; categories take turns."""
    rng = np.random.default_rng([seed, STREAM, index])
    return (_colour, _count, _place, _more)[index % 4](rng)


def lines(config: WorkloadConfig, seed: int) -> Iterator[dict[str, object]]:
    """The objects of the workload's lines."""
    for index in range(config.num_requests):
        asked = question(seed, index)
        pictures = [{"type": IMAGE, IMAGE: png_url(pixels)} for pixels in asked.pictures]
        content = [*pictures, {"type": "text", "text": asked.text}]
        yield {
            "messages": [{"role": "user", "content": content}],
            "category": asked.category,
            "answer": asked.answer,
        }


def _colour(rng: np.random.Generator) -> Question:
    size, kind, colour = _size(rng), _one(rng, KINDS), _one(rng, COLOURS)
    return Question(
        category="colour",
        pictures=[draw(size, _placed(rng, size, [(kind, colour)]))],
        text=f"What colour is the {kind}? {FORM.format('the colour')}",
        answer=colour,
    )


def _count(rng: np.random.Generator) -> Question:
    """Counts one kind of shapes beside some of the other kind."""
    size, kind = _size(rng), _one(rng, KINDS)
    other = next(each for each in KINDS if each != kind)
    count = int(rng.integers(1, MOST + 1))
    named = [(kind, _one(rng, COLOURS)) for _ in range(count)]
    named += [(other, _one(rng, COLOURS)) for _ in range(rng.integers(0, 3))]
    return Question(
        category="count",
        pictures=[draw(size, _placed(rng, size, named))],
        text=f"How many {kind}s are there? {FORM.format('the number in digits')}",
        answer=str(count),
    )


def _place(rng: np.random.Generator) -> Question:
    """Asks for the place in a picture of three by three cells."""
    kind, row, column = _one(rng, KINDS), int(rng.integers(3)), int(rng.integers(3))
    shape = Shape(kind, _one(rng, COLOURS), row, column)
    places = f"{' or '.join(ROWS)}, then {' or '.join(COLUMNS)}"
    return Question(
        category="place",
        pictures=[draw((3, 3), [shape])],
        text=f"Where is the {kind}? {FORM.format(places)}",
        answer=f"{ROWS[row]} {COLUMNS[column]}",
    )


def _more(rng: np.random.Generator) -> Question:
    """Asks which of two pictures has more shapes."""
    kind, colour = _one(rng, KINDS), _one(rng, COLOURS)
    counts = rng.choice(np.arange(1, MOST + 1), 2, replace=False).tolist()
    sizes = [_size(rng) for _ in counts]
    return Question(
        category="more",
        pictures=[
            draw(size, _placed(rng, size, [(kind, colour)] * count))
            for size, count in zip(sizes, counts, strict=True)
        ],
        text=f"Which picture has more {kind}s? {FORM.format('first or second')}",
        answer="first" if counts[0] > counts[1] else "second",
    )


def _size(rng: np.random.Generator) -> tuple[int, int]:
    return SIZES[int(rng.integers(len(SIZES)))]


def _one(rng: np.random.Generator, names: Collection[str]) -> str:
    return list(names)[int(rng.integers(len(names)))]


def _placed(
    rng: np.random.Generator, size: tuple[int, int], named: Sequence[tuple[str, str]]
) -> list[Shape]:
    """Shapes of these kinds and colours, in different cells."""
    cells = rng.choice(size[0] * size[1], len(named), replace=False).tolist()
    return [
        Shape(kind, colour, *divmod(cell, size[1]))
        for (kind, colour), cell in zip(named, cells, strict=True)
    ]
