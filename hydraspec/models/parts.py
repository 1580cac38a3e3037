"""Weights by their names in a checkpoint, and the slice of each that a rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hydraspec.errors import ConfigurationError


@dataclass(slots=True, frozen=True)
class Share:
    """The range of a dimension that a rank holds."""

    size: int  # of the whole dimension
    first: int
    count: int

    @property
    def is_part(self) -> bool:
        """Returns whether other ranks hold the rest."""
        return self.count != self.size

    def times(self, width: int) -> Share:
        """The share of a dimension in which each entry, such as a head, takes `width` places."""
        return Share(self.size * width, self.first * width, self.count * width)


def undivided(size: int | Share) -> Share:
    """The share of a dimension of that size that every rank holds whole; a share stays as it is."""
    return size if isinstance(size, Share) else Share(size, 0, size)


@dataclass(slots=True, frozen=True)
class Part:
    """A rank's slice of a checkpoint's tensor, along one dimension; of a matrix also some columns,
    where pipeline stages divide those.
    """

    tensor: Tensor  # this rank's slice, with dimensions in the checkpoint's order
    dim: int
    share: Share
    repeats: int = 1  # the dimension holds as many blocks of share.size, each cut alike
    columns: Share | None = None  # with dim 0; None: all of them

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        sizes = list(self.tensor.shape)
        sizes[self.dim] = self.share.size * self.repeats
        if self.columns is not None:
            sizes[1] = self.columns.size
        return tuple(sizes)

    def read(self, whole: Callable[[tuple[slice, ...]], Tensor]) -> Tensor:
        """This rank's slice of a whole tensor; `whole` reads the region that slices give."""
        share, before = self.share, (slice(None),) * self.dim
        after: tuple[slice, ...] = ()
        if self.columns is not None:
            after = (slice(self.columns.first, self.columns.first + self.columns.count),)
        starts = (share.first + share.size * block for block in range(self.repeats))
        found = [whole((*before, slice(start, start + share.count), *after)) for start in starts]
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)

    def empty_whole(self) -> Tensor:
        """An empty whole tensor whose dimensions have this part's order of strides, the order in
        which random numbers are drawn.
        """
        strides = self.tensor.stride()
        order = sorted(range(len(strides)), key=lambda d: -strides[d])
        stored = self.tensor.new_empty([self.shape[d] for d in order])
        return stored.permute([order.index(d) for d in range(len(order))])


Weight = Tensor | Part
Tensors = dict[str, Weight]


def divided(tensor: Tensor, dim: int, share: Share, repeats: int = 1) -> Weight:
    """A weight of which this rank holds `share` of dimension `dim`; see `Part`."""
    return Part(tensor, dim, share, repeats) if share.is_part else tensor


def divided_matrix(rows: Tensor, inputs: Share, outputs: Share) -> Weight:
    """A matrix [n, k] of which this rank holds a share of the inputs k or of the outputs n."""
    return divided(rows, 1, inputs) if inputs.is_part else divided(rows, 0, outputs)


class Weights:
    """Part of a model that names its weights.

    Attributes:
        names: attribute -> what the checkpoint puts before the names of this part's weights, or a
            tensor's whole name. Lists are numbered ("layers." -> "layers.0."); an attribute that is
            None has no weights.
        quantization: of a whole model, how its quantised matrices are stored, by kind, such as
            "q_proj"; None: all are in float.
        quantization_notes: of a whole model, what a user should know of its files' formats.
        kv_cache_note: of a whole model, on a kv_cache_scheme that its config announces and a cache
            in the model's type does not apply; empty: there is none.
    """

    names: Mapping[str, str] = {}
    quantization: Mapping[str, str] | None = None
    quantization_notes: tuple[str, ...] = ()
    kv_cache_note: str = ""

    def tensors(self) -> Tensors:
        """Weights by their names in the checkpoint below this part, in the checkpoint's layout."""
        found: Tensors = {}
        for attribute, name in self.names.items():
            part = getattr(self, attribute)
            if isinstance(part, Tensor):
                found[name] = part
        for prefix, part in self.parts():
            found |= prefixed(prefix, part.tensors())
        return found

    def parts(self) -> Iterator[tuple[str, Weights]]:
        """Yields the parts that have weights, each with what stands before their names."""
        for attribute, name in self.names.items():
            part = getattr(self, attribute)
            if isinstance(part, list):
                yield from ((f"{name}{i}.", each) for i, each in enumerate(part))
            elif part is not None and not isinstance(part, Tensor):
                yield name, part

    def matrices(self) -> Iterator[tuple[str, Any]]:
        """Yields every part that a checkpoint may hold quantised (linear maps, routed experts) with
        what stands before its names."""
        for prefix, part in self.parts():
            yield from ((prefix + name, matrix) for name, matrix in part.matrices())

    def unpack(self) -> None:
        """Turns quantised matrices into float ones, whose rows are not rounded."""
        for _, part in self.matrices():
            part.unpack()

    def canonical_name(self, name: str) -> str | None:
        """The model's name of a checkpoint's tensor; None if the model has no such part."""
        return name

    def ignores(self, name: str) -> bool:
        """Returns whether a checkpoint may hold this tensor without its being needed."""
        return False

    def memory_bytes(self) -> int:
        """Bytes of weights held; tied ones count once."""
        return memory_bytes(self.tensors())


def prefixed(prefix: str, tensors: Tensors) -> Tensors:
    """The tensors by their names with `prefix` before each."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def held(weight: Weight) -> Tensor:
    """The tensor that this rank holds of a weight."""
    return weight.tensor if isinstance(weight, Part) else weight


def memory_bytes(tensors: Mapping[str, Weight]) -> int:
    """Bytes of the tensors' storages on this rank, each counted once."""
    storages = (held(weight).untyped_storage() for weight in tensors.values())
    present = (storage for storage in storages if storage.device.type != "meta")
    return sum({storage.data_ptr(): storage.nbytes() for storage in present}.values())


@dataclass(slots=True, frozen=True)
class Divided:
    """Dimensions of a model that tensor-parallel ranks divide, by the keys of its config."""

    num_heads: int
    num_kv_heads: Mapping[str, int]  # divided, or held by several ranks
    widths: Mapping[str, int]

    def obstacle(self, size: int) -> str | None:
        """Words for a dimension that `size` ranks cannot divide; None if there is none."""
        if self.num_heads % size:
            return f"num_attention_heads is {self.num_heads}"
        for key, count in self.num_kv_heads.items():
            if count % size and size % count:
                return f"{key} is {count}, neither a multiple nor a divisor of it"
        return next((f"{key} is {n}" for key, n in self.widths.items() if n % size), None)

    def sizes(self) -> list[int]:
        """The numbers of ranks that can share the model."""
        return [n for n in range(1, self.num_heads + 1) if self.obstacle(n) is None]

    def check(self, size: int, where: str) -> None:
        """Raises ConfigurationError if `size` ranks cannot share the checkpoint `where`."""
        obstacle = self.obstacle(size)
        if obstacle is not None:
            raise ConfigurationError(
                f"parallelism.tensor={size} does not divide checkpoint {where!r}: {obstacle}\n"
                f"  allowed: {', '.join(map(str, self.sizes()))}\n"
                "  to do: choose one of them, or another target",
                key="parallelism.tensor",
            )


@dataclass(slots=True, frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder's shape, as far as all families agree."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    max_position_embeddings: int
    rms_norm_eps: float
    tied: bool  # the head is the embedding table
