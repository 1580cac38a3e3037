"""Aux hidden states: how layers are counted, and the collector of a target's forward pass.

Id i is the residual stream after i decoder layers, un-normed: 0 is the embedding output as the
first layer reads it, num_layers what the final norm reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hydraspec.errors import CheckpointError


class AuxCollector:
    """Keeps copies of the requested states: later layers write into the stream in place."""

    def __init__(self, ids: Sequence[int], num_layers: int) -> None:
        assert all(0 <= i <= num_layers for i in ids), f"aux ids {ids} of {num_layers} layers"
        self.ids = ids
        self._found: dict[int, Tensor] = {}

    def see(self, i: int, h: Tensor) -> None:
        """Keeps a copy of the stream h [T, D] after i layers, if id i is requested."""
        if i in self.ids:
            self._found[i] = h.clone()

    def keep(self, ids: Sequence[int], states: Sequence[Tensor]) -> None:
        """Adds the states [T, D] of `ids` that earlier pipeline stages collected."""
        self._found.update(zip(ids, states, strict=True))

    def states(self) -> list[Tensor]:
        """The collected states, [T, D] for each requested id, in the order of the ids."""
        return [self._found[i] for i in self.ids]


def ids_of_layer_outputs(layers: Sequence[int]) -> tuple[int, ...]:
    """Aux ids of "output of layer j, counted from 0" lists (`target_layer_ids`, as DFlash, DSpark
    and SGLang write them): the output of layer j is the stream after j + 1 layers.
    """
    return tuple(j + 1 for j in layers)


def default_aux_layer_ids(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's layers where a checkpoint names none: low, middle and high (its authors' code)."""
    return (2, num_layers // 2, num_layers - 3)


def check_aux_layer_ids(ids: Sequence[int], num_layers: int, where: str) -> None:
    """Raises CheckpointError if the draft checkpoint `where` reads a state the target lacks."""
    beyond = [i for i in ids if not 0 <= i <= num_layers]
    if beyond:
        raise CheckpointError(
            f"draft checkpoint {where!r} reads the target's hidden states after layers "
            f"{list(ids)}; the target has {num_layers} layers, so {beyond} is not among 0 to "
            f"{num_layers}: give the draft that was made for this target"
        )
