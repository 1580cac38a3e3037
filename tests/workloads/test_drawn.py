"""workload=images: pictures are drawn from the seed, and answers are what the pictures show."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hydraspec.config.schema import RunConfig, WorkloadConfig
from hydraspec.models.pictures.decoding import decode
from hydraspec.workloads.drawn import BACKGROUND, CELL, COLOURS, COLUMNS, ROWS, question
from hydraspec.workloads.reading import depends_on_seed, read

CATEGORIES = ("colour", "count", "place", "more")


def shapes_in(pixels: np.ndarray) -> list[tuple[str, str, int, int]]:
    """Kind, colour, row and column of each cell's shape, read from the pixels: a circle reaches
    farther along the cell's middle than a square, and less far along its diagonal."""
    found = []
    names = {value: name for name, value in COLOURS.items()}
    for row in range(pixels.shape[0] // CELL):
        for column in range(pixels.shape[1] // CELL):
            cell = pixels[row * CELL :, column * CELL :][:CELL, :CELL]
            middle = tuple(map(int, cell[CELL // 2, CELL // 2]))
            if middle == BACKGROUND:
                assert (cell == BACKGROUND).all()
                continue
            along = (cell[CELL // 2] == middle).all(axis=1).sum()
            diagonal = (cell[np.arange(CELL), np.arange(CELL)] == middle).all(axis=1).sum()
            found.append(("square" if along == diagonal else "circle", names[middle], row, column))
    return found


@pytest.mark.parametrize("index", range(80))
def test_answers_are_what_the_pictures_show(index: int) -> None:
    asked = question(5, index)
    assert asked.category == CATEGORIES[index % 4]
    kind = "circle" if "circle" in asked.text else "square"
    of_kind = [[s for s in shapes_in(p) if s[0] == kind] for p in asked.pictures]
    if asked.category == "colour":
        assert [s[1] for s in of_kind[0]] == [asked.answer]
    elif asked.category == "count":
        assert len(of_kind[0]) == int(asked.answer)
    elif asked.category == "place":
        ((_, _, row, column),) = of_kind[0]
        assert asked.answer == f"{ROWS[row]} {COLUMNS[column]}"
    else:
        first, second = map(len, of_kind)
        assert first != second
        assert asked.answer == ("first" if first > second else "second")


def test_every_answer_occurs() -> None:
    """A question with one answer would be scored right without a look at the picture."""
    answers: dict[str, set[str]] = {name: set() for name in CATEGORIES}
    for index in range(400):
        asked = question(0, index)
        answers[asked.category].add(asked.answer)
    assert [len(answers[name]) for name in CATEGORIES] == [len(COLOURS), 5, 9, 2]


def test_lines_are_requests_with_the_pictures_drawn(config: RunConfig) -> None:
    config.workload = WorkloadConfig(name="images", num_requests=6)
    workload = read(config)
    assert workload is not None
    assert [len(request.pictures) for request in workload.requests] == [1, 1, 1, 2, 1, 1]
    assert workload.places["4"] == "workload=images:5"
    for request in workload.requests:
        asked = question(config.seed, request.index)
        assert (request.category, request.answer) == (asked.category, asked.answer)
        assert request.messages is not None
        assert request.messages[0]["content"][-1] == {"type": "text", "text": asked.text}
        for picture, pixels in zip(request.pictures, asked.pictures, strict=True):
            np.testing.assert_array_equal(decode(picture.content), pixels)


def test_another_seed_draws_others(config: RunConfig) -> None:
    config.workload = WorkloadConfig(name="images", num_requests=4)
    assert depends_on_seed(config)
    runs = [read(replace(config, seed=seed)) for seed in (0, 0, 1)]
    contents = [[r.pictures for r in run.requests] for run in runs if run is not None]
    assert contents[0] == contents[1] != contents[2]
