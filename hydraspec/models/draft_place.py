"""Division of draft heads over tensor-parallel ranks: parts are divided, or held whole by every
rank (docs/adr/0022).

With a divided part, a rank reads fewer bytes in a pass, but ranks have to add or exchange results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from hydraspec.models.base import TargetModel
from hydraspec.models.parts import Divided, Weights, held
from hydraspec.models.place import Place
from hydraspec.parallel.group import SOLO

# Measured on H200s, in CUDA graphs: weights as decoding reads them, and a sum or an exchange of a
# few rows over 2 or 4 ranks.
BYTES_PER_US = 4.4e6
REDUCTION_US = 6.5


def is_worth_dividing(place: Place, num_bytes: int, num_reductions: int) -> bool:
    """Returns whether reading its share of `num_bytes` saves a rank more time than the reductions
    take. On a CPU the answer is always yes, so that tests run every part that can be divided.
    """
    if place.device.type == "cpu":
        return True
    saved_us = num_bytes * (1 - 1 / place.group.size) / BYTES_PER_US
    return saved_us > num_reductions * REDUCTION_US


def target_place(target: TargetModel, *, is_quantised: bool = False) -> Place:
    """The place of a draft head that is divided over the same ranks as its target. The head's own
    checkpoint says whether it is quantised."""
    group = target.vocabulary.group
    return Place(target.dtype, target.device, group, is_quantised=is_quantised)


def whole(place: Place) -> Place:
    """The same place without other ranks, for weights that every rank holds whole."""
    return replace(place, group=SOLO)


def layers_place(
    target: TargetModel,
    divided: Divided,
    layers: Callable[[Place], Sequence[Weights]],
    *,
    is_quantised: bool = False,
) -> Place:
    """The place of decoder layers that have their own KV cache.

    layers: builds them in a place (here without memory). A layer that is divided takes two sums
    over ranks. Layers that the ranks cannot divide evenly are held whole.
    """
    place = target_place(target, is_quantised=is_quantised)
    size = place.group.size
    if size == 1:
        return place
    built = layers(Place(place.dtype, torch.device("meta")))
    weights = [held(weight) for layer in built for weight in layer.tensors().values()]
    num_bytes = sum(weight.nbytes for weight in weights)
    is_divided = divided.obstacle(size) is None and is_worth_dividing(
        place, num_bytes, 2 * len(built)
    )
    return place if is_divided else whole(place)


def head_place(target: TargetModel, num_rows: int, width: int) -> Place:
    """The place of a draft head's own output projection [num_rows, width]. If it is divided, each
    choice of tokens takes one exchange between ranks.
    """
    place = target_place(target)
    num_bytes = num_rows * width * place.dtype.itemsize
    return place if is_worth_dividing(place, num_bytes, 1) else whole(place)
