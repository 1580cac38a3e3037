"""Block drafters: DFlash (arXiv 2602.06036), and DSpark and DFlash2 on top of it.

The target's states at committed positions become context features, which every layer turns into
keys and values at these positions. A block (the newest token, then mask tokens) attends to that
context and to itself, and drafts all its tokens in one pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from hydraspec_kernels.attention import GroupShape
from torch import Tensor

from hydraspec.models.block_drafter.config import MASK_EMBEDDING, BlockConfig
from hydraspec.models.block_drafter.context import ContextProjection, context_projection
from hydraspec.models.block_drafter.convolved import ConvolvedLayer
from hydraspec.models.block_drafter.markov import ConfidenceHead, MarkovHead
from hydraspec.models.block_drafter.selector import Candidates, CandidateSelector
from hydraspec.models.draft_families import FAMILIES
from hydraspec.models.draft_place import whole
from hydraspec.models.draft_spec import DraftSpec
from hydraspec.models.draft_tables import DraftTables
from hydraspec.models.kv_groups import (
    DRAFT_GROUPS,
    BlockSize,
    RopeTable,
    group_layers,
    group_passes,
    writing_passes,
)
from hydraspec.models.layers import Norm
from hydraspec.models.linear import Linear
from hydraspec.models.parts import Tensors
from hydraspec.models.place import Place
from hydraspec.types import KVGroupSpec, Rows, TargetStep

# Tokens [B] and the probabilities that they are drawn from, by columns of logits and an index.
Choose = Callable[[Tensor, int], tuple[Tensor, Tensor | None]]
_IGNORED = re.compile(r"^(d2t|t2d|verifier_.*|.*rotary_emb\..*)$")
_STARTS = (  # other spellings of names
    ("midlayer.", "layers.0."),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
)


def canonical_name(name: str) -> str:
    """A tensor's canonical name: without `model.`, layers numbered."""
    name = name.removeprefix("model.")
    for start, ours in _STARTS:
        if name.startswith(start):
            return ours + name.removeprefix(start)
    return name


class BlockHead(DraftTables):
    """Draft head of DFlash, DSpark or DFlash2. `load_block_drafter` builds it empty, then fills and
    finishes it.

    Attributes:
        markov: head that lets a draft know the one before it; None: drafts are independent.
        confidence: estimate of acceptance; None: the checkpoint has none.
        selector: what chooses each draft among its candidates; None: the method has none.
        context_projection: what makes all layers' keys and values of context features in one
            product, set by `finish`; None: each layer's own projection does.
        mask_embedding: what enters for mask tokens [D]; None: their row of the embedding.
        embed_scale: factor of the embedding; None: 1.
    """

    names: Mapping[str, str] = {
        "fc": "",
        "hidden_norm": "hidden_norm.",
        "norm": "norm.",
        "layers": "layers.",
        "markov": "markov_head.",
        "confidence": "confidence_head.",
        "selector": "candidate_selector.",
    }
    spec: DraftSpec

    def __init__(self, config: BlockConfig, layers: Any, target_width: int, place: Place) -> None:
        """Builds empty weights. layers: shape of the layers, as `read_layers` reads it."""
        super().__init__(layers.hidden_size)
        self.config, self.shape, self.place = config, layers, place
        # The file's factor comes before its soft cap; ours after it.
        self.logit_scale = factor = config.output_multiplier
        self.softcap = None if config.softcap is None else config.softcap / factor
        size, eps = layers.hidden_size, layers.rms_norm_eps
        self.fc = Linear(place, len(config.aux_layer_ids) * target_width, {"fc": size})
        self.hidden_norm = Norm(size, eps, place)
        self.norm = Norm(size, eps, place)
        family = FAMILIES[config.family]
        self.layer_type = family.layer
        self.layers = [self._layer(i) for i in range(layers.num_layers)]
        self.theta = family.frequencies(layers, place)
        self.markov: MarkovHead | None = None
        self.confidence: ConfidenceHead | None = None
        self.selector: CandidateSelector | None = None
        self.context_projection: ContextProjection | None = None
        self.mask_embedding: Tensor | None = None
        self.embed_scale: float | None = None
        self.groups: dict[str, GroupShape] = {}

    def _layer(self, index: int) -> Any:
        found = self.config.convolution
        if found is None:
            return self.layer_type(self.shape, index, self.place)
        taps, group = found.taps, found.group
        return ConvolvedLayer(self.shape, index, self.place, taps=taps, group=group)

    def tensors(self) -> Tensors:
        """Every weight the checkpoint holds, by its canonical name."""
        row = self.mask_embedding
        return super().tensors() | ({} if row is None else {MASK_EMBEDDING: row})

    def add_heads(self, num_tokens: int) -> None:
        """Builds DSpark's and DFlash2's further heads with empty weights, once the tables are
        placed. num_tokens: size of the target's vocabulary."""
        config, size, place = self.config, self.hidden_size, whole(self.place)
        rank = config.markov_rank
        if rank:
            kind = config.markov_kind
            self.markov = MarkovHead(kind, rank, size, num_tokens, self.vocabulary, place)
        if config.has_confidence:
            inputs = size + (rank if config.confidence_reads_markov else 0)
            self.confidence = ConfidenceHead(inputs, place)
        if config.selector_rank:
            self.selector = CandidateSelector(
                config.selector_rank, config.num_candidates, size, num_tokens, place
            )

    def finish(self) -> None:
        """Finishes the layers, and copies what `context_projection` holds; call once after the
        weights are filled."""
        for layer in self.layers:
            layer.finish()
        self.context_projection = context_projection(self.layers, self.place)

    def memory_bytes(self) -> int:
        """Bytes of weights held, with the copy in `context_projection`; tied ones count once."""
        joint = self.context_projection
        return super().memory_bytes() + (0 if joint is None else joint.linear.memory_bytes())

    def canonical_name(self, name: str) -> str | None:
        """The canonical name of a checkpoint's tensor: see the function `canonical_name`."""
        return canonical_name(name)

    def ignores(self, name: str) -> bool:
        """Returns whether a tensor is not needed, or read separately."""
        return _IGNORED.match(name) is not None

    def kv_groups(self, block_size: BlockSize, first_layer: int) -> list[KVGroupSpec]:
        """KV groups, sliding layers first; also sets the block size that passes read with."""
        self.groups, specs = group_layers(
            {first_layer + i: layer.kind for i, layer in enumerate(self.layers)},
            DRAFT_GROUPS,
            block_size,
            self._group_shape,
        )
        return specs

    def _group_shape(self, kind: str, block_size: int) -> GroupShape:
        shape: GroupShape = self.layer_type.group_shape(self.shape, kind, block_size, self.place)
        return replace(shape, mask=self.config.mask(kind))

    def context_features(self, target_step: TargetStep) -> Tensor:
        """Features [T, D] of the target's rows, from which layers compute their keys and values."""
        states = torch.cat(tuple(target_step.aux_hidden_states), -1)
        return self.hidden_norm.forward(self.fc.forward(states))

    def write_context(self, rows: Rows, features: Tensor, kv_caches: list[Tensor]) -> None:
        """Writes the keys and values of features [T, D] at the rows' positions, in every layer."""
        tables = self._rope_tables(rows)
        passes = writing_passes(self.groups, rows, tables)
        for layer, kv, cache in zip(
            self.layers, self._project_context(features), kv_caches, strict=True
        ):
            layer.attention.write_projected(kv, passes[layer.kind], cache)

    def _project_context(self, features: Tensor) -> Iterable[Tensor]:
        """Key and value columns [T, n] of every layer for features [T, D]."""
        joint = self.context_projection
        if joint is not None and joint.is_of(self.layers):
            return joint.forward(features)
        return (layer.attention.project_kv(features) for layer in self.layers)

    def draft_block(self, rows: Rows, kv_caches: list[Tensor]) -> Tensor:
        """States [T, D] of blocks of rows, for `compute_logits`. The rows' keys and values are
        written too; they hold until context features take their place."""
        h = self._embed(rows)
        passes = group_passes(self.groups, rows, self._rope_tables(rows), self.place.dtype)
        norms = [*(layer.input_norm for layer in self.layers), self.norm]
        first = norms[0]
        assert first is not None, "block drafters have an input norm in every layer"
        y: Tensor = first.forward(h)
        for layer, next_norm, cache in zip(self.layers, norms[1:], kv_caches, strict=True):
            h, y = layer.forward(h, y, passes[layer.kind], cache, next_norm)
        return y

    def in_turn(
        self, states: Tensor, newest: Tensor, k: int, choose: Choose
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yields what `choose` returns for each of K drafts, in view of the draft before it.

        states [B, R, D] are those of whole blocks, newest [B] their first tokens. choose takes this
        rank's columns of the logits [B, V] and the draft's index.
        """
        assert self.markov is not None, "without a Markov head drafts are independent"
        token, state, rows = newest, None, states[:, -k:]
        if not self.config.samples_anchor:  # a state begins with the first row
            _, state = self.markov.step(self.markov.embed(token), states[:, 0], None)
        logits = self.columns(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])
        for index, hidden in enumerate(rows.unbind(1)):
            bias, state = self.markov.step(self.markov.embed(token), hidden, state)
            token, probs = choose(self.biased(logits[:, index], bias), index)
            yield token, probs

    def candidates(self, rows: Tensor) -> Candidates:
        """The tokens that drafts may be, from their rows [B, K, D]: the best of each row's
        logits."""
        assert self.selector is not None, "without a selector any token may be drafted"
        columns = self.without_banned(self.head.logits(rows.flatten(0, 1)))
        best, tokens = self.vocabulary.best(columns, self.selector.most)
        logits = best * self.logit_scale
        cap = self.config.softcap
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        shape = (*rows.shape[:2], -1)
        return self.selector.candidates(rows, tokens.view(shape), logits.view(shape))

    def candidate_logits(self, found: Candidates, index: int, before: Tensor) -> Tensor:
        """Logits [B, V_draft] of draft `index` after tokens `before` [B]: those of its candidates,
        and the dtype's minimum for all other tokens."""
        assert self.selector is not None
        scores = self.selector.scores(found, index, before)
        logits = scores.new_full(
            (scores.shape[0], self.vocabulary.size), torch.finfo(scores.dtype).min
        )
        return logits.scatter_(1, found.tokens[:, index], scores)

    def greedy_choice(self, columns: Tensor, index: int) -> tuple[Tensor, None]:
        """The best tokens [B], as ids of the target's vocabulary, by this rank's columns."""
        return self.target_ids(self.vocabulary.greedy_tokens(columns)), None

    def biased(self, columns: Tensor, bias: Tensor) -> Tensor:
        """This rank's columns of the logits [B, V] with the Markov head's bias."""
        return self.without_banned(columns + bias)

    def acceptance(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Estimated probabilities [B] that drafts from rows hidden [B, D] after tokens `previous`
        [B] are accepted, given that the drafts before them are."""
        assert self.confidence is not None, "the checkpoint has no confidence head"
        if self.markov is None or not self.config.confidence_reads_markov:
            return self.confidence.forward(hidden)
        return self.confidence.forward(torch.cat((hidden, self.markov.embed(previous)), -1))

    def survivals(self, states: Tensor, newest: Tensor, drafts: Tensor) -> Tensor:
        """Estimated probabilities [B, K] in float32 that a draft and all before it are accepted,
        from the states [B, K, D] of drafts [B, K] after the tokens newest [B]."""
        previous = torch.cat((newest.unsqueeze(1), drafts[:, :-1]), 1)
        each = self.acceptance(states.flatten(0, 1), previous.flatten())
        return each.float().view(drafts.shape).cumprod(1)

    def _rope_tables(self, rows: Rows) -> dict[str, RopeTable]:
        tables: dict[str, RopeTable] = self.layer_type.rope_tables(
            self.shape, self.theta, rows.positions, self.place.dtype
        )
        return tables

    def _embed(self, rows: Rows) -> Tensor:
        """What enters for the rows of equally long blocks, [T, D]."""
        h = self.embedding.embed(rows.input_ids, self.embed_scale)
        if self.mask_embedding is not None:
            num_requests = rows.query_start_loc.shape[0] - 1
            h.view(num_requests, -1, h.shape[1])[:, 1:] = self.mask_embedding
        return h
