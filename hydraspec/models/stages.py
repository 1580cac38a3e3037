"""The split of decoder layers into pipeline stages.

Layers that share KV stay with the layer whose KV they read, and the layers whose KV a drafter
reads are on the last stage, which drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hydraspec.errors import ConfigurationError

KEY = "parallelism.pipeline_layers"


@dataclass(slots=True, frozen=True, kw_only=True)
class Stage:
    """A pipeline stage, number `index` of `count`, and constraints of the split into stages."""

    index: int = 0
    count: int = 1
    num_layers: tuple[int, ...] | None = None  # of each stage; None: balanced
    drafts: bool = False  # a drafter runs on the last stage and may share the embedding
    drafter_reads_kv: bool = False  # the drafter reads KV of the last KV owner of each kind

    @property
    def is_first(self) -> bool:
        """Returns whether this is the first stage, which embeds tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Returns whether this is the last stage, which has the final norm and the head."""
        return self.index == self.count - 1


WHOLE = Stage()


@dataclass(slots=True, frozen=True, kw_only=True)
class LayerFacts:
    """Facts of a model with `len(num_bytes)` layers that decide its split into stages."""

    num_bytes: Sequence[int]  # of each layer's weights
    head_bytes: int  # read by the last stage beside its layers
    kv_sources: Sequence[int]  # for each layer the one whose KV it reads: itself, unless it shares
    kinds: Sequence[str]


def layers_of_stage(stage: Stage, facts: LayerFacts) -> range:
    """Range of the layers that `stage` holds.

    Raises:
        ConfigurationError: the split is impossible; the message names possible ones.
    """
    total, legal, last = len(facts.num_bytes), _borders(facts), len(facts.num_bytes) - 1
    if stage.drafter_reads_kv:
        last = min(drafter_sources(facts))
    balanced = _balanced(stage.count, facts, legal, last)
    if stage.num_layers is None:
        if balanced is None:
            most = len([border for border in legal if border <= last]) + 1
            raise ConfigurationError(
                f"parallelism.pipeline={stage.count} does not go with the target's {total} layers"
                f"{_reason(facts, stage)}\n  allowed: 1 to {most}\n"
                "  to do: take fewer stages"
            )
        bounds = balanced
    else:
        bounds = [0, *accumulate(stage.num_layers)]
        fits = len(stage.num_layers) == stage.count and bounds[-1] == total
        fits = fits and min(stage.num_layers) > 0 and set(bounds[1:-1]) <= set(legal)
        if not fits or (stage.count > 1 and bounds[-2] > last):
            raise _refused_split(stage, facts, legal, last, balanced)
    return range(bounds[stage.index], bounds[stage.index + 1])


def check_whole(split: tuple[int, ...], num_layers: int) -> None:
    """Raises ConfigurationError for a split into one stage unless it has all of the layers."""
    if split != (num_layers,):
        raise ConfigurationError(
            f"{KEY}={list(split)} is no split of the target's {num_layers} layers into one stage\n"
            f"  allowed: null, or [{num_layers}]\n  to do: leave the key out"
        )


def drafter_sources(facts: LayerFacts) -> list[int]:
    """The last layer of each kind that writes KV: what a drafter without its own KV reads."""
    owners = {facts.kinds[i]: i for i, source in enumerate(facts.kv_sources) if source == i}
    return sorted(owners.values())


def _borders(facts: LayerFacts) -> list[int]:
    """Numbers of layers after which a stage may end: no later layer reads KV of an earlier one."""
    found: list[int] = []
    earliest = total = len(facts.kv_sources)
    for layer in range(total - 1, 0, -1):
        earliest = min(earliest, facts.kv_sources[layer])
        if earliest >= layer:
            found.append(layer)
    return found[::-1]


def _balanced(count: int, facts: LayerFacts, legal: Sequence[int], last: int) -> list[int] | None:
    """Bounds [count + 1] of the split whose largest stage is smallest; None where there is none."""
    total = len(facts.num_bytes)
    before = [0, *accumulate(facts.num_bytes)]
    places = [*legal, total]
    # By end of the stages so far: the largest stage, the sum of squares, the bounds.
    best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [0])}
    for number in range(count):
        is_last = number == count - 1
        reached: dict[int, tuple[int, int, list[int]]] = {}
        for start, (largest, squares, bounds) in best.items():
            if is_last and start > last:
                continue
            for end in [total] if is_last else places[:-1]:
                if end <= start:
                    continue
                size = before[end] - before[start] + (facts.head_bytes if is_last else 0)
                found = max(largest, size), squares + size * size, [*bounds, end]
                reached[end] = min(found, reached.get(end, found))
        best = reached
    return best[total][2] if total in best else None


def _reason(facts: LayerFacts, stage: Stage) -> str:
    reasons = []
    shared = [i for i, source in enumerate(facts.kv_sources) if source != i]
    if shared:
        first = min(facts.kv_sources[i] for i in shared)
        reasons.append(f"layers {shared[0]} to {shared[-1]} read KV of layers from {first} on")
    if stage.drafter_reads_kv:
        sources = ", ".join(map(str, drafter_sources(facts)))
        reasons.append(f"the drafter reads KV of layers {sources}, which the last stage must hold")
    return f": {'; '.join(reasons)}" if reasons else ""


def _refused_split(
    stage: Stage,
    facts: LayerFacts,
    legal: Sequence[int],
    last: int,
    balanced: Sequence[int] | None,
) -> ConfigurationError:
    total = len(facts.num_bytes)
    given = list(stage.num_layers or ())
    ends = [border for border in legal if border <= last]
    allowed = (
        f"{stage.count} numbers that add up to {total}, where stages end after "
        f"{_ranges(legal)} layers"
    )
    if ends != list(legal):
        allowed += f", the one before the last after {_ranges(ends)}"
    remedy = "take fewer stages"
    if balanced is not None:
        split = [end - start for start, end in pairwise(balanced)]
        remedy = f"set it to {split}, or to null for a balanced split"
    return ConfigurationError(
        f"{KEY}={given} is no split of the target's {total} layers over "
        f"{stage.count} stages{_reason(facts, stage)}\n  allowed: {allowed}\n  to do: {remedy}"
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Text of ascending numbers, such as `1 to 4, 7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return ", ".join(shown) or "no"
