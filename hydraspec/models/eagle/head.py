"""EAGLE heads: EAGLE-3 (Li et al. 2025), P-EAGLE on top of it, and EAGLE-1 (Li et al. 2024).

A draft row at position t reads the token at t + 1 and the target's state at t, rotates at t and
writes its KV there. EAGLE-1 reads the target's final-norm output (cnets.py of the authors' code:
the state that enters the target's head), EAGLE-3 a few states from within the target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from hydraspec_kernels.attention import GroupShape
from hydraspec_kernels.embedding import embed
from hydraspec_kernels.linear import linear
from hydraspec_kernels.rope import rope_table
from hydraspec_kernels.sampling.token_choice import greedy_tokens
from torch import Tensor

from hydraspec.models.attention import GroupPass
from hydraspec.models.dense.config import DenseConfig
from hydraspec.models.dense.layer import (
    AttentionShape,
    DenseAttention,
    DenseLayer,
    DenseMLP,
    dense_frequencies,
    dense_group,
    group_pass,
)
from hydraspec.models.draft_spec import DraftSpec
from hydraspec.models.eagle.config import EagleConfig
from hydraspec.models.gemma4.config import FULL, SLIDING
from hydraspec.models.layers import Norm, Place, Tensors, join
from hydraspec.models.weights import memory_bytes
from hydraspec.types import KVGroupSpec, Rows, TargetStep

GROUPS = {SLIDING: "draft_sliding", FULL: "draft_full"}


class FusedLayer:
    """EAGLE-3's layer 0: attention over cat[norm(embedding), norm(state)], then as any layer.

    The residual is the state, or its norm (norm_before_residual).
    """

    def __init__(
        self, config: DenseConfig, kind: str, place: Place, *, norm_before_residual: bool
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.kind, self.size = kind, size
        self.norm_before_residual = norm_before_residual
        self.attention = DenseAttention(AttentionShape.of(config, 2 * size), place)
        self.mlp = DenseMLP.of(config, place)
        self.input_norm = Norm(size, eps, place)
        self.hidden_norm = Norm(size, eps, place)
        self.post_attention_norm = Norm(size, eps, place)

    def tensors(self) -> Tensors:
        """Weights by their names below `layers.0.`."""
        found = {
            "input_layernorm.weight": self.input_norm.weight,
            "hidden_norm.weight": self.hidden_norm.weight,
            "post_attention_layernorm.weight": self.post_attention_norm.weight,
        }
        found |= {f"self_attn.{name}": part for name, part in self.attention.tensors().items()}
        return found | {f"mlp.{name}": part for name, part in self.mlp.tensors().items()}

    def finish(self) -> None:
        """Fold what can be, once the weights are filled."""
        self.input_norm.fold_into(self.attention.qkv[: self.size], stream_scale=1.0)
        if self.norm_before_residual:
            self.hidden_norm.fold_gain()
        else:
            self.hidden_norm.fold_into(self.attention.qkv[self.size :], stream_scale=1.0)
        self.attention.finish()
        self.post_attention_norm.fold_into(self.mlp.gate_up, stream_scale=1.0)

    def __call__(self, e: Tensor, h: Tensor, shared: GroupPass, cache: Tensor) -> Tensor:
        """Folded: embeddings e and states h [T, D] -> [T, D]; writes and reads cache."""
        if self.norm_before_residual:
            g = h = self.hidden_norm.scaled(h)
        else:
            g = self.hidden_norm.normed(h)
        x = torch.cat((self.input_norm.normed(e), g), -1)
        h = self.attention(x, h, shared, cache)
        return self.mlp(self.post_attention_norm.normed(h), h)

    def advance(
        self, e: Tensor, h: Tensor, shared: GroupPass, cache: Tensor, then: Norm | None
    ) -> tuple[Tensor, Tensor]:
        """Not folded: the same, as a new stream and its norm by `then`."""
        g = self.hidden_norm.scaled(h)
        x = torch.cat((self.input_norm.scaled(e), g), -1)
        h = g if self.norm_before_residual else h.clone()  # the caller's states stay as they are
        attended = self.attention.partials(x, shared, cache)
        h, y = join(h, attended, post=None, then=self.post_attention_norm)
        return join(h, self.mlp.partials(y), post=None, then=then)


class Combine:
    """Target states -> what enters the head: norms, concatenation, fc."""

    def __init__(
        self, config: EagleConfig, num_aux: int, width: int, size: int, eps: float, place: Place
    ) -> None:
        self.width = width
        self.fc = place.matrix(num_aux * width, size)
        self.whole = Norm(num_aux * width, eps, place) if config.norm_before_fc else None
        count = num_aux if config.fc_norm else 0
        self.each = [Norm(width, eps, place) for _ in range(count)]

    def tensors(self) -> Tensors:
        found = {"fc.weight": self.fc.t()}
        if self.whole is not None:
            found["input_norm.weight"] = self.whole.weight
        return found | {f"fc_norm.{i}.weight": norm.weight for i, norm in enumerate(self.each)}

    def finish(self) -> None:
        if self.whole is not None:
            self.whole.fold_into(self.fc, stream_scale=1.0)
        for norm, rows in zip(self.each, self.fc.split(self.width), strict=False):
            norm.fold_into(rows, stream_scale=1.0)

    def __call__(self, states: Sequence[Tensor]) -> Tensor:
        """A times [T, D_target] -> [T, D]."""
        if self.each:
            states = [norm.normed(x) for norm, x in zip(self.each, states, strict=True)]
        x = torch.cat(tuple(states), -1)
        if self.whole is not None:
            x = self.whole.normed(x)
        return linear(x, self.fc)


class EagleHead:
    """Implements OwnCacheHead. Built empty by `load_eagle`, which fills and finishes it."""

    spec: DraftSpec

    def __init__(
        self, config: EagleConfig, layers: DenseConfig, num_aux: int, width: int, place: Place
    ) -> None:
        self.config, self.shape, self.place = config, layers, place
        self.folded = place.folded
        size, eps = layers.hidden_size, layers.rms_norm_eps
        self.combine: Combine | None = None
        self.fc: Tensor | None = None
        self.fc_bias: Tensor | None = None
        self.first: FusedLayer | None = None
        kinds = layers.kinds
        if config.method == "eagle":
            self.fc = place.matrix(2 * size, size)
            self.layers = [
                DenseLayer(layers, kind, place, has_input_norm=bool(i) or config.keeps_input_norm)
                for i, kind in enumerate(kinds)
            ]
        else:
            if config.use_aux:
                self.combine = Combine(config, num_aux, width, size, eps, place)
            self.first = FusedLayer(
                layers, kinds[0], place, norm_before_residual=config.norm_before_residual
            )
            self.layers = [DenseLayer(layers, kind, place) for kind in kinds[1:]]
        self.norm = Norm(size, eps, place) if config.final_norm else None
        self.theta = dense_frequencies(layers, place)
        self.embedding: Tensor = place.empty(0)  # [V, D]: its own or the target's, unscaled
        self.head: Tensor = place.empty(0)  # [V_draft, D]
        self.own: Tensors = {}  # embedding and head where they are the checkpoint's
        self.mask_state: Tensor | None = None  # [1, 1, A * D_target], as in the checkpoint
        self.mask_hidden: Tensor | None = None  # [D], projected
        self.vocab_map: Tensor | None = None  # [V_draft] ids of the target; None: the same
        self.banned: Tensor | None = None  # draft ids that the target never samples
        self.groups: dict[str, GroupShape] = {}

    def tensors(self) -> Tensors:
        """Every weight the checkpoint holds, by its canonical name."""
        found = dict(self.own)
        if self.combine is not None:
            found |= self.combine.tensors()
        if self.fc is not None:
            found["fc.weight"] = self.fc.t()
        if self.fc_bias is not None:
            found["fc.bias"] = self.fc_bias
        if self.norm is not None:
            found["norm.weight"] = self.norm.weight
        if self.mask_state is not None:
            found["mask_hidden"] = self.mask_state
        stack: list[FusedLayer | DenseLayer] = [*self.layers]
        if self.first is not None:
            stack.insert(0, self.first)
        for i, layer in enumerate(stack):
            found |= {f"layers.{i}.{name}": part for name, part in layer.tensors().items()}
        return found

    def finish(self, suppressed: Tensor) -> None:
        """Call once after the weights are filled. suppressed [n]: draft ids never to propose."""
        if self.combine is not None:
            self.combine.finish()
        if self.mask_state is not None and self.combine is not None:
            states = self.mask_state.view(1, -1).split(self.combine.width, 1)
            self.mask_hidden = self.combine(states).view(-1)
        if self.first is not None:
            self.first.finish()
        for layer in self.layers:
            layer.finish()
        if self.norm is not None:
            self.norm.fold_gain()
        self.banned = suppressed if suppressed.shape[0] else None

    def kv_groups(self, block_size: int, first_layer: int) -> list[KVGroupSpec]:
        """Sliding layers first, then full ones; also sets the block size forward reads with."""
        self.groups, specs = {}, []
        for kind in (SLIDING, FULL):
            owners = [first_layer + i for i, k in enumerate(self.shape.kinds) if k == kind]
            if not owners:
                continue
            window = self.shape.sliding_window if kind == SLIDING else None
            self.groups[kind] = dense_group(self.shape, block_size, window)
            specs.append(
                KVGroupSpec(
                    name=GROUPS[kind],
                    layers=tuple(owners),
                    num_kv_heads=self.shape.num_kv_heads,
                    head_dim=self.shape.head_dim,
                    block_size=block_size,
                    window=window,
                )
            )
        return specs

    def combine_target_hidden(self, target_step: TargetStep) -> Tensor:
        """What a pass over the target's rows takes as hidden state, [T, D]."""
        if self.combine is None:
            return target_step.hidden_states
        return self.combine(target_step.aux_hidden_states)

    def forward(
        self, rows: Rows, hidden: Tensor, kv_caches: list[Tensor], *, step: int
    ) -> tuple[Tensor, Tensor]:
        """See OwnCacheHead.forward; `step` makes no difference."""
        e = embed(rows.input_ids, self.embedding)
        table = rope_table(rows.positions, self.theta, self.place.dtype)
        passes = {
            kind: group_pass(shape, rows, g, table, self.place.dtype)
            for g, (kind, shape) in enumerate(self.groups.items())
        }
        run = self._run_folded if self.folded else self._advance
        h, states = run(e, hidden, passes, iter(kv_caches))
        return states, states if self.config.norm_output else h

    def _run_folded(
        self, e: Tensor, hidden: Tensor, passes: dict[str, GroupPass], caches: Iterator[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Embeddings and states [T, D] -> the stream behind the last layer, and its norm."""
        if self.first is not None:
            h = self.first(e, hidden, passes[self.first.kind], next(caches))
        else:
            h = self._fuse(e, hidden)
        for layer in self.layers:
            h = layer(h, passes[layer.kind], next(caches))
        return h, h if self.norm is None else self.norm.scaled(h)

    def _advance(
        self, e: Tensor, hidden: Tensor, passes: dict[str, GroupPass], caches: Iterator[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The same where nothing is folded: every layer yields its successor's input norm."""
        behind = [*(layer.input_norm for layer in self.layers), self.norm]
        if self.first is not None:
            h, y = self.first.advance(e, hidden, passes[self.first.kind], next(caches), behind[0])
        else:
            h = self._fuse(e, hidden)
            y = self.layers[0].enter(h)
        for layer, then in zip(self.layers, behind[1:], strict=True):
            h, y = layer.advance(h, y, passes[layer.kind], next(caches), then)
        return h, y

    def _fuse(self, e: Tensor, hidden: Tensor) -> Tensor:
        assert self.fc is not None, "only EAGLE-1 enters through fc over embedding and state"
        return linear(torch.cat((e, hidden), -1), self.fc, self.fc_bias)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[B, D] -> [B, V_draft]; what the target never samples gets the dtype's minimum."""
        logits = linear(hidden, self.head.t())
        if self.config.logit_scale != 1.0:
            logits.mul_(self.config.logit_scale)
        if self.banned is not None:
            logits.index_fill_(1, self.banned, torch.finfo(logits.dtype).min)
        return logits

    def greedy_tokens(self, hidden: Tensor) -> Tensor:
        """[B, D] -> [B] ids of the target's vocabulary; equal scores go to the lowest draft id."""
        tokens = greedy_tokens(self.compute_logits(hidden))
        return tokens if self.vocab_map is None else self.vocab_map.index_select(0, tokens)

    def memory_bytes(self) -> int:
        """Bytes of weights held beside the target's."""
        return memory_bytes(self.tensors())
