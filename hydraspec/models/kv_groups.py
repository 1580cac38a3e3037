"""KV groups, layers that share a block table, and inputs that they share in a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from hydraspec_kernels.attention import AttentionPlan, GroupShape, TiledPlan, plan_attention
from torch import Tensor

from hydraspec.types import KVGroupSpec, Rows

SLIDING, FULL = "sliding_attention", "full_attention"  # kinds of layers, as config.json names them
KINDS = (SLIDING, FULL)  # the order of groups
TARGET_GROUPS = {SLIDING: "sliding", FULL: "full"}
DRAFT_GROUPS = {SLIDING: "draft_sliding", FULL: "draft_full"}
MTP_GROUPS = {FULL: "mtp"}

BlockSize: TypeAlias = int | Callable[[str], int]  # tokens of a block, or those by a group's name


class RopeTable(NamedTuple):
    """Rotary table of the rows' positions, and what else of queries depends on positions."""

    cos: Tensor  # [T, 1, H]
    sin: Tensor  # [T, 1, H], first half negated
    query_scale: Tensor | None = None  # [T, 1] factors of queries; None: all are 1


def group_layers(
    layers: Mapping[int, str],
    names: Mapping[str, str],
    block_size: BlockSize,
    shape_of: Callable[[str, int], GroupShape],
) -> tuple[dict[str, GroupShape], list[KVGroupSpec]]:
    """Groups layers that own KV (index -> kind) by kind. Returns the attention shape of each kind,
    and the groups' records for the engine in the order of KINDS. shape_of takes kind and block
    size.
    """
    shapes, specs = {}, []
    for kind in KINDS:
        owners = tuple(i for i, each in layers.items() if each == kind)
        if not owners:
            continue
        name = names[kind]
        size = block_size if isinstance(block_size, int) else block_size(name)
        shape = shapes[kind] = shape_of(kind, size)
        specs.append(KVGroupSpec(name=name, layers=owners, shape=shape))
    return shapes, specs


@dataclass(slots=True)
class GroupPass:
    """Inputs that the layers of a KV group share in one forward pass."""

    cos: Tensor  # [T, 1, H]
    sin: Tensor  # [T, 1, H], first half negated
    plan: AttentionPlan
    cache_rows: Tensor  # [T] to write, -1 for rows that write none
    has_padding: bool = False  # known on the host: cache_rows may contain -1
    query_scale: Tensor | None = None  # [T, 1] factors of queries; None: all are 1
    # [2, Hkv], of another model's e4m3 cache that all layers of the group read; None: a layer's own
    kv_scales: Tensor | None = None
    rows_per_request: int = 0  # where all requests have equally many; 0: they do not
    _targets: tuple[Tensor, Tensor] | None = None  # [T] rows to write, and which are padding

    def write(self, cache: Tensor, rows: Tensor) -> None:
        """Writes rows [T, ...] into cache [num_rows, ...]. Padding writes zeros into row 0, which
        is the null block's and holds zeros.
        """
        if not self.has_padding:
            cache.index_copy_(0, self.cache_rows, rows)
            return
        if self._targets is None:
            self._targets = (self.cache_rows.clamp(min=0), self.cache_rows < 0)
        targets, is_padding = self._targets
        shape = (-1, *(1,) * (rows.dim() - 1))
        cache.index_copy_(0, targets, rows.masked_fill(is_padding.view(shape), 0.0))


def group_passes(
    shapes: Mapping[str, GroupShape],
    rows: Rows,
    tables: Mapping[str, RopeTable],
    dtype: torch.dtype,
) -> dict[str, GroupPass]:
    """The shared inputs of every kind of layers; tables are rotary tables of rows.positions."""
    assert shapes, "call kv_groups before forward"
    equal = rows.segments[0].rows_per_request if len(rows.segments) == 1 else 0
    passes = {}
    ahead = None if rows.encoded is None else rows.encoded.sees_until
    for g, (kind, shape) in enumerate(shapes.items()):
        plan = plan_attention(
            shape,
            rows.segments,
            rows.block_tables[g],
            rows.seq_lens,
            rows.positions,
            dtype,
            rows.query_start_loc,
            ahead if kind == SLIDING else None,
        )
        cos, sin, scale = tables[kind]
        written, padded = rows.slot_mapping[g], rows.has_padding
        passes[kind] = GroupPass(cos, sin, plan, written, padded, scale, rows_per_request=equal)
    return passes


def writing_passes(
    shapes: Mapping[str, GroupShape], rows: Rows, tables: Mapping[str, RopeTable]
) -> dict[str, GroupPass]:
    """The shared inputs of every kind of layers where rows write keys and values, and attend to
    nothing."""
    assert shapes, "call kv_groups before writing"
    passes = {}
    for g, (kind, shape) in enumerate(shapes.items()):
        cos, sin, scale = tables[kind]
        nothing = TiledPlan(shape, 0, [])
        passes[kind] = GroupPass(cos, sin, nothing, rows.slot_mapping[g], rows.has_padding, scale)
    return passes
