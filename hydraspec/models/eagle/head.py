"""EAGLE heads: EAGLE-3 (Li et al. 2025), P-EAGLE on top of it, and EAGLE-1 (Li et al. 2024).

A draft row at position t reads the token at t + 1 and the target's state at t, rotates at t and
writes its KV there. EAGLE-1 reads the target's final-norm output (cnets.py of the authors' code:
the state that enters the target's head), EAGLE-3 a few states from within the target.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from hydraspec_kernels.attention import GroupShape
from hydraspec_kernels.quantised import RoundedRows
from torch import Tensor

from hydraspec.models.dense.config import DenseConfig
from hydraspec.models.dense.layer import DenseLayer
from hydraspec.models.draft_families import FAMILIES
from hydraspec.models.draft_spec import DraftSpec
from hydraspec.models.draft_tables import DraftTables
from hydraspec.models.eagle.config import EagleConfig
from hydraspec.models.gemma4.config import Gemma4Config
from hydraspec.models.gemma4.layer import Gemma4Layer
from hydraspec.models.gemma4.model import rounded
from hydraspec.models.kv_groups import (
    DRAFT_GROUPS,
    BlockSize,
    GroupPass,
    group_layers,
    group_passes,
)
from hydraspec.models.layers import Norm
from hydraspec.models.linear import Linear
from hydraspec.models.parts import Weights
from hydraspec.models.place import Place
from hydraspec.types import KVGroupSpec, Rows, TargetStep

_IGNORED = re.compile(r"^(d2t|t2d|verifier_.*|.*rotary_emb\..*|.*kv_fake_quantizer.*)$")
_EAGLE1_IDENTITIES = ("layers.0.input_layernorm.weight", "norm.weight")


def canonical_name(name: str) -> str:
    """A tensor's canonical name: without `model.`, layers numbered. (The reader has already turned
    Mistral's names into Hugging Face's.)
    """
    name = name.removeprefix("model.")
    for start, ours in (
        ("midlayer.", "layers.0."),
        ("transformer.", "layers.0."),
        ("fusion_fc.", "fc."),
    ):
        if name.startswith(start):
            return ours + name.removeprefix(start)
    return name


class FusedLayer(DenseLayer):
    """EAGLE-3's layer 0: attention over cat[norm(embedding), norm(state)], then as any layer.

    The residual is the state, or its norm (norm_before_residual).
    """

    names: Mapping[str, str] = {**DenseLayer.names, "hidden_norm": "hidden_norm."}

    def __init__(self, config: DenseConfig, place: Place, *, norm_before_residual: bool) -> None:
        super().__init__(config, 0, place, input_size=2 * config.hidden_size)
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps, place)

    def fuse(
        self, e: Tensor, h: Tensor, shared: GroupPass, cache: Tensor, next_norm: Norm | None
    ) -> tuple[Tensor, Tensor | RoundedRows]:
        """The stream after the layer, and its norm by `next_norm`, for embeddings e and states h,
        [T, D] each; writes and reads cache.
        """
        assert self.input_norm is not None
        g = self.hidden_norm.forward(h)
        x = torch.cat((self.input_norm.forward(e), g), -1)
        h = g if self.norm_before_residual else h.clone()  # the caller's states stay as they are
        return self.forward(h, x, shared, cache, next_norm)


class FusedGemmaLayer(Gemma4Layer):
    """EAGLE-3's layer of a Gemma 4 head: attention over cat[norm(embedding), norm(state)], then as
    Gemma 4's. The residual is the state."""

    names: Mapping[str, str] = {**Gemma4Layer.names, "hidden_norm": "hidden_norm."}

    def __init__(self, config: Gemma4Config, place: Place) -> None:
        super().__init__(config, 0, place, input_size=2 * config.hidden_size)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps, place)

    def finish(self) -> None:
        """As Gemma 4's, but that the input norm does not round: a concatenation follows."""
        super().finish()
        self.input_norm.rounding = None

    def fuse(
        self, e: Tensor, h: Tensor, shared: GroupPass, cache: Tensor, next_norm: Norm | None
    ) -> tuple[Tensor, Tensor | RoundedRows]:
        """See `FusedLayer.fuse`."""
        assert next_norm is not None
        x = torch.cat((self.input_norm.forward(e), self.hidden_norm.forward(h)), -1)
        return self.forward(h.clone(), x, shared, cache, next_norm)


class Combine(Weights):
    """Combination of aux states of the target into the head's input: norms, concatenation, fc."""

    names: Mapping[str, str] = {"fc": "", "norm": "input_norm.", "state_norms": "fc_norm."}

    def __init__(
        self, config: EagleConfig, num_aux: int, width: int, size: int, eps: float, place: Place
    ) -> None:
        self.fc = Linear(place, num_aux * width, {"fc": size})
        self.norm = Norm(num_aux * width, eps, place) if config.norm_before_fc else None
        count = num_aux if config.fc_norm else 0
        self.state_norms = [Norm(width, eps, place) for _ in range(count)]

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        """The head's input [T, D] from A aux states, [T, D_target] each."""
        if self.state_norms:
            states = [n.forward(x) for n, x in zip(self.state_norms, states, strict=True)]
        x = torch.cat(tuple(states), -1)
        if self.norm is not None:
            x = self.norm.forward(x)
        return self.fc.forward(x)


class EagleHead(DraftTables):
    """Draft head of EAGLE-1, EAGLE-3 or P-EAGLE; implements OwnCacheHead. `load_eagle` builds it
    empty, then fills and finishes it.
    """

    names: Mapping[str, str] = {
        "combine": "",
        "fc": "",
        "norm": "norm.",
        "mask_state": "mask_hidden",
        "stack": "layers.",
    }
    spec: DraftSpec

    def __init__(
        self, config: EagleConfig, layers: Any, num_aux: int, width: int, place: Place
    ) -> None:
        """Builds empty weights. layers: shape of the layers, as their family reads it; num_aux,
        width: number and width of the target's states."""
        super().__init__(layers.hidden_size)
        self.config, self.shape, self.place = config, layers, place
        self.logit_scale, self.softcap = config.logit_scale, config.softcap
        self.embed_scale: float | None = None
        family = FAMILIES[config.family]
        self.layer_type = family.layer
        size, eps = layers.hidden_size, layers.rms_norm_eps
        self.combine: Combine | None = None
        self.fc: Linear | None = None
        self.first: FusedLayer | FusedGemmaLayer | None = None
        self.layers: list[DenseLayer] = []
        if config.method == "eagle":
            self.fc = Linear(place, 2 * size, {"fc": size})
            self.layers = [
                DenseLayer(layers, i, place, has_input_norm=bool(i) or config.keeps_input_norm)
                for i in range(layers.num_layers)
            ]
        else:
            if config.use_aux:
                self.combine = Combine(config, num_aux, width, size, eps, place)
            if config.family == "gemma4":
                self.first = FusedGemmaLayer(layers, place)
                self.embed_scale = rounded(size**0.5, place.dtype)
            else:
                norms = config.norm_before_residual
                self.first = FusedLayer(layers, place, norm_before_residual=norms)
                self.layers = [DenseLayer(layers, i, place) for i in range(1, layers.num_layers)]
        self.norm = Norm(size, eps, place) if config.final_norm else None
        self.theta = family.frequencies(layers, place)
        self.mask_state: Tensor | None = None  # [1, 1, A * D_target], as in the checkpoint
        self.mask_hidden: Tensor | None = None  # [D], projected
        self.groups: dict[str, GroupShape] = {}

    @property
    def stack(self) -> list[Any]:
        """All decoder layers."""
        return self.layers if self.first is None else [self.first, *self.layers]

    def canonical_name(self, name: str) -> str | None:
        """The canonical name of a checkpoint's tensor: see the function `canonical_name`."""
        return canonical_name(name)

    def ignores(self, name: str) -> bool:
        """Returns whether a tensor is not needed: a vocabulary map, which is read separately, or a
        norm that a Llama head does not have.
        """
        has_identities = self.config.method == "eagle" and not self.config.keeps_input_norm
        is_identity = has_identities and name in _EAGLE1_IDENTITIES
        return is_identity or _IGNORED.match(name) is not None

    def finish(self, suppressed: Tensor) -> None:
        """Projects the mask state and sets the draft ids never to propose, suppressed [n]; call
        once after the weights are filled.
        """
        if isinstance(self.first, FusedGemmaLayer):
            self.first.finish()
        self.project_mask()
        self.ban(suppressed)

    def project_mask(self) -> None:
        """Computes `mask_hidden` from the weights, where the head has mask rows."""
        if self.mask_state is not None and self.combine is not None:
            states = self.mask_state.view(len(self.spec.aux_layer_ids), 1, -1)
            self.mask_hidden = self.combine.forward(states.unbind()).view(-1)

    def kv_groups(self, block_size: BlockSize, first_layer: int) -> list[KVGroupSpec]:
        """KV groups, sliding layers first; also sets the block size that forward reads with."""
        self.groups, specs = group_layers(
            {first_layer + i: layer.kind for i, layer in enumerate(self.stack)},
            DRAFT_GROUPS,
            block_size,
            partial(self.layer_type.group_shape, self.shape, place=self.place),
        )
        return specs

    def combine_target_hidden(self, target_step: TargetStep) -> Tensor:
        """Hidden states [T, D] that a pass over the target's rows reads."""
        if self.combine is None:
            return target_step.hidden_states
        return self.combine.forward(target_step.aux_hidden_states)

    def forward(
        self, rows: Rows, hidden: Tensor, kv_caches: list[Tensor], *, step: int
    ) -> tuple[Tensor, Tensor]:
        """See OwnCacheHead.forward; `step` makes no difference."""
        e = self.embedding.embed(rows.input_ids, self.embed_scale)
        if rows.encoded is not None:
            e = rows.encoded.merge(e)
        dtype = self.place.dtype
        tables = self.layer_type.rope_tables(self.shape, self.theta, rows.positions, dtype)
        passes = group_passes(self.groups, rows, tables, dtype)
        caches = iter(kv_caches)
        norms = [*(layer.input_norm for layer in self.layers), self.norm]
        y: Tensor | RoundedRows
        if self.first is not None:
            shared = passes[self.first.kind]
            h, y = self.first.fuse(e, hidden, shared, next(caches), norms[0])
        else:
            assert self.fc is not None, "EAGLE-1 enters through fc over embedding and state"
            h = self.fc.forward(torch.cat((e, hidden), -1))
            y = h if norms[0] is None else norms[0].forward(h)
        for layer, next_norm in zip(self.layers, norms[1:], strict=True):
            h, y = layer.forward(h, y, passes[layer.kind], next(caches), next_norm)
        assert isinstance(y, Tensor), "the last norm is not the input of a layer"
        return y, y if self.config.norm_output else h
