"""Training data with pictures: the questions of workload=images, and scenes with their contents.

A picture's patches are kept in the order of its tokens. Letters: N texts, T rows, P pictures, S
tokens of a picture at most, C patches of a token, W values of a patch, G pictures of a text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from hydraspec.models.pictures.patches import fitted_size, to_image
from hydraspec.workloads import drawn
from hydraspec.zoo.recipe.batches import Sequences, generate_sequences
from hydraspec.zoo.recipe.corpus import ANSWER_MARK, HELD_OUT_BUCKET, NUM_BUCKETS
from hydraspec.zoo.recipe.pictured_recipes import BEGIN_ID, END_ID, FORM, IMAGE_ID
from hydraspec.zoo.recipe.tokenizer import BOS, TURN_END, TURN_START

SLOTS = 64  # S: tokens of the largest picture of the workload
CELLS = FORM.pooling**2  # C
LENGTHS = (136, 152, 216)  # T of texts without a picture, with one and with two
ONE_PICTURE, TWO_PICTURES = ("colour", "count", "place"), ("more",)
QUESTION_SEED, SCENE_SEED = 30_000, 40_000  # of numpy's generator; workloads take the run's seed
ALONE = 0.4  # share of scenes with one shape
UNKNOWN = -1  # a label that no loss has
MOST_SHAPES = 8  # of a kind in a scene; counts are 0 to 7
NUM_CLASSES = 1 + len(drawn.KINDS) * len(drawn.COLOURS)  # the ground, or a shape's kind and colour


@dataclass(frozen=True)
class Pictures:
    """Pictures as the tower reads them; tokens from `num_tokens` on are padding."""

    patches: Tensor  # [P, S, C, W] uint8
    positions: Tensor  # [P, S, C, 2] int16: column and row
    num_tokens: Tensor  # [P] int32

    def rows(self, rows: Tensor) -> Pictures:
        """The pictures at places `rows` [...]."""
        return Pictures(*(getattr(self, f.name)[rows] for f in fields(self)))

    def to(self, device: torch.device) -> Pictures:
        """The same pictures on another device."""
        return Pictures(*(getattr(self, f.name).to(device) for f in fields(self)))

    def copy_(self, other: Pictures) -> None:
        """Overwrite the tensors in place."""
        for f in fields(self):
            getattr(self, f.name).copy_(getattr(other, f.name))

    def __len__(self) -> int:
        return len(self.num_tokens)


def is_held_out(pixels: np.ndarray) -> bool:
    """Returns whether a picture is on the side of the split that no training sees."""
    digest = hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).digest()
    return digest[0] % NUM_BUCKETS == HELD_OUT_BUCKET


def read_pictures(pictures: Sequence[np.ndarray]) -> Pictures:
    """Pictures [height, width, 3] uint8 each, resized and cut."""
    size = (len(pictures), SLOTS, CELLS)
    patches = np.zeros((*size, 3 * FORM.patch_size**2), np.uint8)
    positions = np.zeros((*size, 2), np.int16)
    counts = np.zeros(len(pictures), np.int32)
    for i, pixels in enumerate(pictures):
        image = to_image(pixels, FORM)
        columns = image.positions[:, 0].max() + 1
        order = token_order(len(image.positions) // columns, columns)
        counts[i] = image.num_tokens
        patches[i, : counts[i]] = np.rint(image.patches[order] * 255)
        positions[i, : counts[i]] = image.positions[order]
    return Pictures(*(torch.from_numpy(array) for array in (patches, positions, counts)))


def token_order(rows: int, columns: int) -> np.ndarray:
    """Places [tokens, C] of each token's patches, of `rows` x `columns` patches row by row."""
    pool = FORM.pooling
    places = np.arange(rows * columns).reshape(rows // pool, pool, columns // pool, pool)
    return places.transpose(0, 2, 1, 3).reshape(-1, CELLS)


# ------------------------------------------------------------------ scenes


@dataclass(frozen=True)
class Scenes:
    """Pictures with their contents."""

    pictures: Pictures
    classes: Tensor  # [N, S] int64: at each token's middle
    middles: Tensor  # [N, S] int64: 0, or 1 + the kind of a shape whose middle the token holds
    counts: Tensor  # [N, kinds] int64: shapes of each kind
    colours: Tensor  # [N, kinds] int64: that of all shapes of the kind; UNKNOWN: they differ
    places: Tensor  # [N, kinds, 2] int64: row and column, in thirds; UNKNOWN: not one shape alone

    @property
    def tokens(self) -> Tensor:
        """A tensor on the data's device."""
        return self.classes

    def to(self, device: torch.device) -> Scenes:
        """The same scenes on another device."""
        return Scenes(*(getattr(self, f.name).to(device) for f in fields(self)))

    def sample(self, batch_size: int, generator: torch.Generator) -> Scenes:
        """A batch drawn with replacement."""
        device = self.classes.device
        rows = torch.randint(len(self.counts), (batch_size,), generator=generator, device=device)
        return self.rows(rows)

    def rows(self, rows: Tensor) -> Scenes:
        """The scenes at places `rows` [B]."""
        contents = (getattr(self, f.name)[rows] for f in fields(self) if f.name != "pictures")
        return Scenes(self.pictures.rows(rows), *contents)

    def copy_(self, other: Scenes) -> None:
        """Overwrite the tensors in place."""
        for f in fields(self):
            getattr(self, f.name).copy_(getattr(other, f.name))


def make_scenes(count: int) -> Scenes:
    """`count` scenes on the training side of the split."""
    rng = np.random.default_rng(SCENE_SEED)
    pictures: list[np.ndarray] = []
    classes, middles = np.zeros((2, count, SLOTS), np.int64)
    counts = np.zeros((count, len(drawn.KINDS)), np.int64)
    colours = np.full((count, len(drawn.KINDS)), UNKNOWN, np.int64)
    places = np.full((count, len(drawn.KINDS), 2), UNKNOWN, np.int64)
    while len(pictures) < count:
        size, shapes = _scene(rng)
        pixels = drawn.draw(size, shapes)
        if is_held_out(pixels):
            continue
        i, fitted = len(pictures), fitted_size(pixels.shape[0], pixels.shape[1], FORM)
        seen = _contents(size, shapes, fitted)
        classes[i, : len(seen[0])], middles[i, : len(seen[1])] = seen
        for k, kind in enumerate(drawn.KINDS):
            own = [shape for shape in shapes if shape.kind == kind]
            counts[i, k] = len(own)
            if len({shape.colour for shape in own}) == 1:
                colours[i, k] = list(drawn.COLOURS).index(own[0].colour)
            if len(own) == 1:
                places[i, k] = own[0].row * 3 // size[0], own[0].column * 3 // size[1]
        pictures.append(pixels)
    arrays = (classes, middles, counts, colours, places)
    contents = (torch.from_numpy(array) for array in arrays)
    return Scenes(read_pictures(pictures), *contents)


def _scene(rng: np.random.Generator) -> tuple[tuple[int, int], list[drawn.Shape]]:
    """Size and shapes; the two kinds, of one colour each or mixed; often one shape alone."""
    size = drawn.SIZES[rng.integers(len(drawn.SIZES))]
    colours, mixed = list(drawn.COLOURS), rng.random() < 0.5
    first = int(rng.integers(1, drawn.MOST + 1))
    kinds = [drawn.KINDS[k] for k in rng.permutation(2)]
    named = [kinds[0]] * first + [kinds[1]] * int(rng.integers(0, 3))
    if rng.random() < ALONE:
        named = kinds[:1]
    chosen = rng.integers(len(colours), size=len(named) if mixed else 2)
    cells = rng.choice(size[0] * size[1], len(named), replace=False).tolist()
    return size, [
        drawn.Shape(kind, colours[chosen[i if mixed else kinds.index(kind)]], *divmod(c, size[1]))
        for i, (kind, c) in enumerate(zip(named, cells, strict=True))
    ]


def _contents(
    size: tuple[int, int], shapes: Sequence[drawn.Shape], fitted: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Classes and middles [tokens] of a picture of `size` cells that has `fitted` tokens."""
    classes, middles = np.zeros((2, *fitted), np.int64)
    row, column = ((np.arange(n) + 0.5) * cells / n for n, cells in zip(fitted, size, strict=True))
    for shape in shapes:
        kind, colour = drawn.KINDS.index(shape.kind), list(drawn.COLOURS).index(shape.colour)
        near = np.hypot(row[:, None] - (shape.row + 0.5), column[None] - (shape.column + 0.5))
        classes[near < 0.4] = 1 + kind * len(drawn.COLOURS) + colour
        middles[np.unravel_index(near.argmin(), near.shape)] = 1 + kind
    return classes.ravel(), middles.ravel()


# ------------------------------------------------------------------ questions


@dataclass(frozen=True)
class PicturedTexts(Sequences):
    """Rendered conversations, each with the same number of pictures. `places` says of a batch's
    rows where they stand in its pictures' rows [N * G * S], -1 for text."""

    places: Tensor  # [N, T] int32
    pictures: Pictures  # N * G of them

    def to(self, device: torch.device) -> PicturedTexts:
        """The same texts on another device."""
        own = (self.places.to(device), self.pictures.to(device))
        return PicturedTexts(*_fields(super().to(device)), *own)

    def rows(self, rows: Tensor) -> PicturedTexts:
        """The texts at places `rows` [B], tokens and places as int64."""
        per_text = len(self.pictures) // len(self.tokens)
        numbers = torch.arange(len(rows), device=rows.device)[:, None]
        span = per_text * SLOTS  # rows of a text's pictures
        first = self.places[rows].long()
        places = torch.where(first < 0, first, first % max(span, 1) + numbers * span)
        which = rows[:, None] * per_text + torch.arange(per_text, device=rows.device)
        return PicturedTexts(
            *_fields(super().rows(rows)), places, self.pictures.rows(which.flatten())
        )

    def sample(self, batch_size: int, generator: torch.Generator) -> PicturedTexts:
        """A batch drawn with replacement."""
        device = self.tokens.device
        rows = torch.randint(len(self.tokens), (batch_size,), generator=generator, device=device)
        return self.rows(rows)

    def copy_(self, other: Sequences) -> None:
        """Overwrite the tensors in place."""
        assert isinstance(other, PicturedTexts)
        super().copy_(other)
        self.places.copy_(other.places)
        self.pictures.copy_(other.pictures)


def _fields(data: Sequences) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return data.tokens, data.prompt_length, data.length, data.index


@dataclass(frozen=True)
class Mixture:
    """Texts with no picture, with one and with two, of which batches hold fixed shares."""

    parts: tuple[PicturedTexts, ...]
    shares: tuple[int, ...]

    @property
    def tokens(self) -> Tensor:
        """A tensor on the data's device."""
        return self.parts[0].tokens

    def to(self, device: torch.device) -> Mixture:
        """The same texts on another device."""
        return replace(self, parts=tuple(part.to(device) for part in self.parts))

    def sample(self, batch_size: int, generator: torch.Generator) -> Mixture:
        """A batch of which each part has its share."""
        unit = batch_size // sum(self.shares)
        pairs = zip(self.parts, self.shares, strict=True)
        return replace(self, parts=tuple(p.sample(n * unit, generator) for p, n in pairs))

    def copy_(self, other: Mixture) -> None:
        """Overwrite the tensors in place."""
        for part, given in zip(self.parts, other.parts, strict=True):
            part.copy_(given)


def questions(seed: int, *, held_out: bool) -> Iterator[drawn.Question]:
    """Endless questions without a held-out picture, or each with one at least."""
    index = 0
    while True:
        asked = drawn.question(seed, index)
        index += 1
        if any(map(is_held_out, asked.pictures)) is held_out:
            yield asked


def places_among_others(count: int, seed: int) -> list[drawn.Question]:
    """`count` questions of category place on pictures with shapes of the other kind beside: the
    workload's own have few pictures, and are learned by heart."""
    rng = np.random.default_rng([QUESTION_SEED, seed])
    found: list[drawn.Question] = []
    number = 0
    while len(found) < count:
        number += 1
        asked = drawn.question(QUESTION_SEED + seed, 4 * number + 2)  # of category place
        kind = next(kind for kind in drawn.KINDS if kind in asked.text)
        other = next(each for each in drawn.KINDS if each != kind)
        cells = rng.permutation(9)[: 1 + int(rng.integers(1, 5))].tolist()
        colours = rng.choice(list(drawn.COLOURS), len(cells)).tolist()
        shapes = [
            drawn.Shape(other if i else kind, colour, *divmod(cell, 3))
            for i, (cell, colour) in enumerate(zip(cells, colours, strict=True))
        ]
        pixels = drawn.draw((3, 3), shapes)
        answer = f"{drawn.ROWS[shapes[0].row]} {drawn.COLUMNS[shapes[0].column]}"
        if not is_held_out(pixels):
            found.append(replace(asked, pictures=[pixels], answer=answer))
    return found


def render(tokens: PreTrainedTokenizerFast, asked: drawn.Question) -> tuple[list[int], list[int]]:
    """Token ids of the prompt, with placeholders in place, and of the response."""
    ids = tokens(f"{BOS}{TURN_START}user\n", add_special_tokens=False)["input_ids"]
    for pixels in asked.pictures:
        rows, columns = fitted_size(pixels.shape[0], pixels.shape[1], FORM)
        ids = [*ids, BEGIN_ID, *[IMAGE_ID] * (rows * columns), END_ID]
    rest = f"{asked.text}{TURN_END}\n{TURN_START}model\n"
    ids += tokens(rest, add_special_tokens=False)["input_ids"]
    said = f"{ANSWER_MARK} {asked.answer}{TURN_END}\n"
    return ids, list(tokens(said, add_special_tokens=False)["input_ids"])


def make_texts(
    tokens: PreTrainedTokenizerFast, asked: Sequence[drawn.Question], length: int
) -> PicturedTexts:
    """Rendered questions, of which all have equally many pictures, padded to `length` rows."""
    ids = np.zeros((len(asked), length), np.int16)
    places = np.full((len(asked), length), -1, np.int32)
    ends = np.zeros((2, len(asked)), np.int32)
    for i, one in enumerate(asked):
        prompt, response = render(tokens, one)
        ids[i, : len(prompt) + len(response)] = [*prompt, *response]
        ends[:, i] = len(prompt), len(prompt) + len(response)
        begins = np.flatnonzero(ids[i] == BEGIN_ID)
        for picture, (first, last) in enumerate(
            zip(begins, np.flatnonzero(ids[i] == END_ID), strict=True)
        ):
            inner = np.arange(last - first - 1)
            places[i, first + 1 : last] = picture * SLOTS + inner
    pictures = read_pictures([pixels for one in asked for pixels in one.pictures])
    return PicturedTexts(
        torch.from_numpy(ids),
        torch.from_numpy(ends[0]),
        torch.from_numpy(ends[1]),
        torch.arange(len(asked)),
        torch.from_numpy(places),
        pictures,
    )


def without_pictures(data: Sequences) -> PicturedTexts:
    """Texts of the corpus, as texts with no picture."""
    places = torch.full_like(data.tokens, -1, dtype=torch.int32)
    return PicturedTexts(*_fields(data), places, read_pictures([]))


def make_mixture(folder: Path, count: int, seed: int, shares: tuple[int, ...]) -> Mixture:
    """`count` texts in all, a part of them for each share; folder: the tokenizer's."""
    tokens = PreTrainedTokenizerFast.from_pretrained(str(folder))
    counts = [count * share // sum(shares) for share in shares]
    found: dict[str, list[drawn.Question]] = {}
    wanted = {c: counts[1] // len(ONE_PICTURE) + 1 for c in ONE_PICTURE}
    wanted |= {c: counts[2] for c in TWO_PICTURES}
    for asked in questions(QUESTION_SEED + seed, held_out=False):
        kept = found.setdefault(asked.category, [])
        if len(kept) < wanted[asked.category]:
            kept.append(asked)
        if all(len(found.get(c, ())) == n for c, n in wanted.items()):
            break
    one, two = (
        [asked for category in group for asked in found[category]]
        for group in (ONE_PICTURE, TWO_PICTURES)
    )
    half = len(found["place"]) // 2
    one = [asked for asked in one if asked.category != "place"] + found["place"][half:]
    one += places_among_others(2 * half, seed)
    plain = generate_sequences(folder, counts[0], seed)
    parts = (
        without_pictures(plain),
        make_texts(tokens, one, LENGTHS[1]),
        make_texts(tokens, two, LENGTHS[2]),
    )
    return Mixture(parts, shares)
