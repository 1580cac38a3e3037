"""Gemma 4's assistant: a small Q-only decoder that reads the target's KV and drafts one token a
step.

Position convention: all steps of a round use position p, the last one with target KV and hidden
state, and see KV 0..p (sliding layers the last `window` entries of it). transformers' own loop
uses p + 1; the weights are the same, and the target's cache at p is what both read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from hydraspec_kernels.attention import hold_kv, plan_attention
from hydraspec_kernels.embedding import centroid_greedy, centroid_head
from hydraspec_kernels.quantised import RoundedRows
from hydraspec_kernels.rope import rope_table
from torch import Tensor

from hydraspec.errors import CheckpointError
from hydraspec.models.base import TargetModel
from hydraspec.models.detect import check_method, open_draft
from hydraspec.models.draft_place import head_place, target_place, whole
from hydraspec.models.draft_spec import DraftSpec
from hydraspec.models.gemma4.assistant_config import AssistantConfig, read_assistant
from hydraspec.models.gemma4.layer import Gemma4Layer
from hydraspec.models.gemma4.model import rope_frequencies_by_kind
from hydraspec.models.kv_groups import TARGET_GROUPS, GroupPass
from hydraspec.models.layers import Norm
from hydraspec.models.linear import Linear, Table
from hydraspec.models.parts import Weights
from hydraspec.models.place import Place
from hydraspec.models.weights import fill
from hydraspec.parallel.vocabulary import Vocabulary
from hydraspec.types import KVGroupSpec, RowSegment


@dataclass(slots=True)
class DraftContext:
    """Inputs that the draft layers share in all steps of a round, by kind of layer."""

    passes: dict[str, GroupPass]
    caches: dict[str, Tensor]  # of the target layer that is read


class CentroidHead(Weights):
    """An output projection that scores centroids first, and tokens of the best ones only. It reads
    few of its rows, so every rank holds it whole.
    """

    names: Mapping[str, str] = {"centroids": "", "ordering": "masked_embedding.token_ordering"}

    def __init__(self, config: AssistantConfig, table: Table, place: Place) -> None:
        """Builds empty weights. table: rows of all tokens, which are the assistant's weights."""
        width, count = config.text.hidden_size, config.num_centroids
        self.table, self.count, self.top_k = table, count, config.centroid_top_k
        self.centroids = Linear(place, width, {"masked_embedding.centroids": count}, unpacked=True)
        self.ordering = place.empty(config.text.vocab_size, dtype=torch.int64)
        self.clusters = self.ordering  # [C, V / C], set by `finish`

    def finish(self, where: str) -> None:
        """Splits the token ordering into clusters; call once after the weights are filled. Raises
        CheckpointError unless the ordering has every token id once.
        """
        everything = torch.arange(len(self.ordering), device=self.ordering.device)
        if not torch.equal(self.ordering.sort().values, everything):
            raise CheckpointError(
                f"draft checkpoint {where!r}: masked_embedding.token_ordering does not hold "
                "every token id once: download it again"
            )
        self.clusters = self.ordering.view(self.count, -1)

    def logits(self, d: Tensor) -> Tensor:
        """Logits [B, V] of d [B, Hd]; tokens of other clusters than the best get the dtype's finite
        minimum.
        """
        rows, centroids = self.table.weight, self.centroids.weight
        return centroid_head(d, rows, centroids, self.clusters, self.top_k)

    def greedy_tokens(self, d: Tensor, banned: Tensor | None) -> Tensor:
        """Best tokens [B] for d [B, Hd], without those that the mask `banned` [V] marks."""
        rows, centroids = self.table.weight, self.centroids.weight
        return centroid_greedy(d, rows, centroids, self.clusters, self.top_k, banned)


class Gemma4Assistant(Weights):
    """Draft head of a Gemma 4 assistant. It owns no KV and writes none; its logits have no soft cap
    (as in transformers).
    """

    spec: DraftSpec

    def __init__(self, config: AssistantConfig, target: TargetModel, place: Place) -> None:
        text = config.text
        width, backbone = text.hidden_size, config.backbone_hidden_size
        self.config, self.target, self.place = config, target, place
        is_sparse = config.num_centroids > 0
        at = whole(place) if is_sparse else head_place(target, text.vocab_size, width)
        self.head = Table(at, Vocabulary(text.vocab_size, at.group), width)
        self.vocabulary = self.head.vocabulary
        self.centroids = CentroidHead(config, self.head, place) if is_sparse else None
        self.pre = Linear(place, 2 * backbone, {"pre_projection": width})
        self.post = Linear(place, width, {"post_projection": backbone})
        self.layers = [Gemma4Layer(text, i, place) for i in range(text.num_layers)]
        self.norm = Norm(width, text.rms_norm_eps, place)
        self.next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        self.frequencies = rope_frequencies_by_kind(text, place)
        # A tied head is stored under the embedding's name.
        self.names = {
            "head": "model.embed_tokens." if text.tied else "lm_head.",
            "centroids": "",
            "pre": "",
            "post": "",
            "layers": "model.layers.",
            "norm": "model.norm.",
        }
        self.sources: dict[str, tuple[int, KVGroupSpec]] = {}  # type -> KV group's index, its spec
        self._banned_ids: Tensor | None = None
        self._banned: Tensor | None = None

    def ignores(self, name: str) -> bool:
        """Returns whether a tensor is not needed: the head's other name, since tied files may hold
        both names, and untied ones an embedding that nothing reads.
        """
        return name in ("lm_head.weight", "model.embed_tokens.weight")

    def finish(self, where: str) -> None:
        """Finishes the layers and sets the banned tokens; call once after the weights are filled.
        Raises CheckpointError: see CentroidHead.
        """
        for layer in self.layers:
            layer.finish()
        if banned := self.vocabulary.rows_of(self.target.suppress_token_ids):
            rows, device = self.vocabulary.num_rows, self.place.device
            self._banned_ids = torch.tensor(banned, device=device)
            self._banned = torch.zeros(rows, dtype=torch.bool, device=device)
            self._banned[self._banned_ids] = True
        if self.centroids is not None:
            self.centroids.finish(where)

    def read_from(self, specs: Sequence[KVGroupSpec]) -> None:
        """Takes the layout of the caches from `specs`, in which the target's groups come first."""
        self.sources = {kind: (g, specs[g]) for kind, (g, _) in self.sources.items()}

    def begin(
        self,
        positions: Tensor,  # [B] p, the last position with target KV
        seq_lens: Tensor,  # [B] p + 1
        block_tables: list[Tensor],  # per KV group [B, P]
        max_seq_len: int,  # upper bound of seq_lens
        kv_caches: list[Tensor | None],  # per target layer
        *,
        num_busy: int = 0,  # see RowSegment
    ) -> DraftContext:
        """The context of a round: inputs that stay the same over its K steps."""
        b, dtype = positions.shape[0], self.place.dtype
        segments = (RowSegment(0, 0, b, 1, max_seq_len, num_busy),)
        context = DraftContext({}, {})
        for kind, (g, spec) in self.sources.items():
            text = self.config.text
            window = text.sliding_window if spec.window is not None else None
            num_heads = self.place.share(text.num_heads).count
            shape = replace(spec.shape, num_heads=num_heads, window=window)
            plan = plan_attention(shape, segments, block_tables[g], seq_lens, positions, dtype)
            cache = kv_caches[spec.layers[-1]]
            assert cache is not None, f"target layer {spec.layers[-1]} has no cache"
            cos, sin = rope_table(positions, self.frequencies[kind], dtype)
            # No layer writes KV, so nothing reads the cache rows.
            scales = self.target.kv_scales.get(spec.layers[-1])
            held = hold_kv(plan, cache, scales)
            context.passes[kind] = GroupPass(cos, sin, held, positions, kv_scales=scales)
            context.caches[kind] = cache
        return context

    def step(
        self, context: DraftContext, token_ids: Tensor, hidden: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Runs a draft step: token_ids [B] and backbone hidden states [B, D], or [T, D] at rows [B]
        -> d [B, Hd] for logits, and the hidden states [B, D] of the next step.

        Step 0 takes the newest token and the target's final-norm output at p; later steps take
        what the step before returned.
        """
        h = self.pre.forward(self.target.embed_beside(token_ids, hidden, rows))
        y: Tensor | RoundedRows = self.layers[0].input_norm.forward(h)
        for layer, next_norm in zip(self.layers, self.next_norms, strict=True):
            shared, cache = context.passes[layer.kind], context.caches[layer.kind]
            h, y = layer.forward(h, y, shared, cache, next_norm)
        assert isinstance(y, Tensor), "the last norm is not the input of a layer"
        return y, self.post.forward(y)

    def compute_logits(self, d: Tensor) -> Tensor:
        """Logits [B, V] of d [B, Hd]; banned tokens, and with centroids those of other clusters
        than the best, get the dtype's finite minimum.
        """
        return self.vocabulary.whole(self._columns(d))

    def _columns(self, d: Tensor) -> Tensor:
        """This rank's columns of the logits."""
        logits = (self.centroids or self.head).logits(d)
        if self._banned_ids is not None:
            logits.index_fill_(1, self._banned_ids, torch.finfo(logits.dtype).min)
        return logits

    def greedy_tokens(self, d: Tensor) -> Tensor:
        """Best tokens [B] for d [B, Hd]; of equal scores the lowest id wins."""
        if self.centroids is not None:
            return self.centroids.greedy_tokens(d, self._banned)
        return self.vocabulary.greedy_tokens(self._columns(d))


def load_assistant(
    checkpoint: str, *, weights: str, target: TargetModel, seed: int
) -> Gemma4Assistant:
    """The assistant of a folder, zoo:<name> or hub id, in the target's dtype and on its device.

    Raises CheckpointError: unreadable, not an assistant, or made for another target (both values
    are named).
    """
    check_method(open_draft(checkpoint), "gemma4_mtp")
    opened, config = read_assistant(checkpoint)
    where = str(opened.folder)
    # Layers are divided as the KV heads they read are.
    place = target_place(target, is_quantised=opened.is_quantised)
    config.text.divided.check(place.group.size, where)
    sources = match_target(config, target, where)
    with torch.no_grad():
        model = Gemma4Assistant(config, target, place)
        model.sources = sources
        model.spec = DraftSpec(
            method="gemma4_mtp",
            hidden_width=config.backbone_hidden_size,
            draft_width=config.text.hidden_size,
            vocab_size=config.text.vocab_size,
            kv_mode="target",
            position_mode="constant",
            feedback="post_projection",
            shares_embedding=True,
            shares_head=False,
            kv_sources=tuple((spec.name, spec.layers[-1]) for _, spec in sources.values()),
        )
        fill(model, opened, weights=weights, seed=seed)
        model.finish(where)
    return model


def match_target(
    config: AssistantConfig, target: TargetModel, where: str
) -> dict[str, tuple[int, KVGroupSpec]]:
    """The KV group that draft layers of each type read: its index and spec. The group's last layer
    is the one whose KV is read.

    Raises CheckpointError naming both sides' values where assistant and target do not fit.
    """
    contradictions, place = [], target_place(target)

    def compare(what: str, ours: int, theirs: int) -> None:
        if ours != theirs:
            contradictions.append(f"{what} is {ours} in the assistant and {theirs} in the target")

    compare("hidden size (backbone_hidden_size)", config.backbone_hidden_size, target.hidden_size)
    compare("vocab_size", config.text.vocab_size, target.vocab_size)
    groups = {spec.name: (g, spec) for g, spec in enumerate(target.kv_groups(target.block_size))}
    sources = {}
    for layer in config.text.layers:
        name = TARGET_GROUPS[layer.kind]
        if name not in groups:
            contradictions.append(f"the assistant has {layer.kind} layers and the target has none")
            continue
        if layer.kind in sources:
            continue
        sources[layer.kind] = groups[name]
        spec = groups[name][1]
        compare(f"head_dim of {layer.kind} layers", layer.head_dim, spec.shape.head_dim)
        kv_heads = place.heads(config.text.num_heads, layer.num_kv_heads)[1].count
        compare(f"KV heads of {layer.kind} layers", kv_heads, spec.shape.num_kv_heads)
        if spec.window is not None:
            compare("sliding_window", config.text.sliding_window, spec.window)
    if contradictions:
        raise CheckpointError(
            f"assistant {where!r} was not made for this target: {'; '.join(contradictions)}. "
            "Give the assistant that was released with the target"
        )
    return sources
