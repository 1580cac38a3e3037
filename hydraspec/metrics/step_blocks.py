"""Times of decode steps, in blocks while a run lasts, and their file step_costs.json."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NotRequired, TypedDict, cast

from hydraspec.types import StepRecord

STEPS_OF_BLOCK = 4  # at first; twice as many whenever a round has more than MOST_BLOCKS
MOST_BLOCKS = 16  # of a round
Size = tuple[int, int]  # of a decode step: its requests, and their rows


class BlockRecord(TypedDict):
    """A block in a file; each of `steps` has requests, rows, number of steps, milliseconds."""

    start_s: float
    end_s: float
    steps: list[list[float]]
    mixed_ms: NotRequired[float]


class StepCostsFile(TypedDict):
    """step_costs.json: the blocks of each side of a run."""

    schema_version: int
    method: list[BlockRecord]
    baseline: NotRequired[list[BlockRecord]]


@dataclass(slots=True)
class Block:
    """Decode steps that follow each other: their number and milliseconds by size; `mixed_ms` is the
    decoding requests' share, by rows, of steps that also read prompts."""

    start_s: float
    end_s: float
    sizes: dict[Size, tuple[int, float]] = field(default_factory=dict)
    mixed_ms: float = 0.0

    @property
    def num_steps(self) -> int:
        """The number of steps of all sizes."""
        return sum(count for count, _ in self.sizes.values())

    def add(self, size: Size, count: int, milliseconds: float) -> None:
        """Add `count` steps of a size and their time."""
        before, ms = self.sizes.get(size, (0, 0.0))
        self.sizes[size] = before + count, ms + milliseconds

    def joined(self, later: Block) -> Block:
        """A block that joins this one and the `later` one, which follows it."""
        mixed_ms = self.mixed_ms + later.mixed_ms
        made = Block(self.start_s, later.end_s, dict(self.sizes), mixed_ms)
        for size, (count, ms) in later.sizes.items():
            made.add(size, count, ms)
        return made

    @classmethod
    def of_record(cls, found: BlockRecord) -> Block:
        """The block of a record in a file."""
        made = cls(found["start_s"], found["end_s"], mixed_ms=found.get("mixed_ms", 0.0))
        for requests, rows, count, ms in found["steps"]:
            made.add((int(requests), int(rows)), int(count), ms)
        return made


class StepBlocks:
    """The decode steps of one side of a run, in blocks; of steps that read prompts the time alone.

    Attributes:
        blocks: the blocks of all rounds, in order.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.blocks: list[Block] = []
        self._clock = clock
        self.begin_run()

    def begin_run(self) -> None:
        """Begin a round, whose steps go into new blocks."""
        self._first, self._length = len(self.blocks), STEPS_OF_BLOCK

    def add(self, record: StepRecord, total_ms: float) -> None:
        """Count a step that has just ended."""
        rows = sum(part.num_rows for part in record.requests)
        decoding = [part.num_rows for part in record.requests if not part.is_prefill]
        if not decoding:
            return
        now, of_round = self._clock(), self.blocks[self._first :]
        if len(decoding) < len(record.requests):
            if of_round:
                of_round[-1].mixed_ms += total_ms * sum(decoding) / rows
            return
        if not of_round or of_round[-1].num_steps >= self._length:
            if len(of_round) == MOST_BLOCKS:
                pairs = zip(of_round[::2], of_round[1::2], strict=True)
                self.blocks[self._first :] = [one.joined(other) for one, other in pairs]
                self._length *= 2
            self.blocks.append(Block(now - total_ms / 1000, now))
        self.blocks[-1].end_s = now
        self.blocks[-1].add((len(record.requests), rows), 1, total_ms)


def step_costs_file(sides: Mapping[str, StepBlocks]) -> StepCostsFile:
    """The content of step_costs.json."""
    blocks = {
        name: [
            {
                "start_s": block.start_s,
                "end_s": block.end_s,
                "steps": [[*size, *of] for size, of in block.sizes.items()],
                "mixed_ms": block.mixed_ms,
            }
            for block in side.blocks
        ]
        for name, side in sides.items()
    }
    return cast(StepCostsFile, {"schema_version": 1, **blocks})


def sums(blocks: Iterable[Block]) -> dict[Size, tuple[int, float]]:
    """Numbers of steps and milliseconds of all blocks, by size."""
    total = Block(0.0, 0.0)
    for block in blocks:
        for size, (count, ms) in block.sizes.items():
            total.add(size, count, ms)
    return total.sizes
