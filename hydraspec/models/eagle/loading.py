"""Loads an EAGLE-type draft head from any of three formats: maps tensor names, shares tables with
the target, and checks the config against the tensors and the target.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors import safe_open
from torch import Tensor

from hydraspec.errors import CheckpointError
from hydraspec.models.aux_states import check_aux_layer_ids, default_aux_layer_ids
from hydraspec.models.base import TargetModel
from hydraspec.models.checkpoint.reader import Checkpoint, TensorEntry
from hydraspec.models.dense.config import DenseConfig, read_dense_config
from hydraspec.models.detect import open_draft
from hydraspec.models.draft_place import head_place, layers_place, target_place
from hydraspec.models.draft_spec import DraftSpec
from hydraspec.models.eagle.config import AUX_KEY, EagleConfig, read_eagle, unmasked_remedy
from hydraspec.models.eagle.head import EagleHead, canonical_name
from hydraspec.models.linear import Table
from hydraspec.models.parts import prefixed
from hydraspec.models.weights import fill
from hydraspec.parallel.vocabulary import Vocabulary

Entries = Mapping[str, TensorEntry]

COMPARED_ROWS = 1 << 14  # rows of two embeddings compared at a time


def load_eagle(
    checkpoint: str, *, method: str, weights: str, target: TargetModel, seed: int
) -> EagleHead:
    """The draft head of a folder, zoo:<name> or hub id, in the target's dtype and on its device.

    method is eagle, eagle3 or peagle, and must be what the folder holds. Raises CheckpointError
    naming both sides where method, config, tensors and target contradict each other.
    """
    opened = open_draft(checkpoint)
    where = str(opened.folder)
    config = read_eagle(opened, method)
    layers = read_dense_config(config.layers, where)
    entries = _entries(opened, weights)
    ids = _aux_layer_ids(config, layers, entries, target, where)
    _check_target(config, layers, target, where)
    width = target.hidden_size
    place = layers_place(
        target,
        layers.divided,
        lambda place: EagleHead(config, layers, len(ids), width, place).stack,
        is_quantised=opened.is_quantised,
    )
    with torch.no_grad():
        head = EagleHead(config, layers, len(ids), width, place)
        _place_tables(head, entries, target, where)
        _place_extras(head, entries, len(ids) * width, where)
        fill(head, opened, weights=weights, seed=seed)
        head.vocab_map = _vocab_map(head, entries, target, weights, where)
        shares = _share_equal_embedding(head, target)
        head.spec = _spec(config, layers, ids, head, target, shares, entries)
        head.finish(_suppressed(head, target))
    return head


def _entries(opened: Checkpoint, weights: str) -> dict[str, TensorEntry]:
    if weights != "checkpoint":
        return {}
    return {canonical_name(name): entry for name, entry in opened.entries().items()}


# ------------------------------------------------------------------ against the target


def _aux_layer_ids(
    config: EagleConfig, layers: DenseConfig, entries: Entries, target: TargetModel, where: str
) -> tuple[int, ...]:
    """Ids of the target states that the head reads: the config's, checked against fc's width."""
    if config.method == "eagle" or not config.use_aux:
        return ()
    stated = config.aux_layer_ids
    ids = default_aux_layer_ids(target.num_layers) if stated is None else stated
    said = "names" if stated is not None else "leaves to the default"
    width, count = target.hidden_size, config.num_aux
    if config.target_hidden_size not in (None, width):
        raise CheckpointError(
            f"drafter {where!r} was made for a target of hidden size {config.target_hidden_size} "
            f"(target_hidden_size); this target's is {width}: give the drafter of this target"
        )
    fc = entries.get("fc.weight")
    if fc is not None and fc.shape[-1] != len(ids) * width:
        raise CheckpointError(
            f"drafter {where!r}: fc.weight is {list(fc.shape)} and reads {fc.shape[-1]} values; "
            f"its config {said} {len(ids)} aux layers {list(ids)}, and the target's hidden size "
            f"is {width}, which makes {len(ids) * width}: the drafter belongs to another target, "
            "or its config lacks eagle_aux_hidden_state_layer_ids"
        )
    if count not in (None, len(ids)):
        raise CheckpointError(
            f"config.json of {where!r} counts {count} aux hidden states and {said} the "
            f"{len(ids)} layers {list(ids)}: mend the config"
        )
    if len(set(ids)) != len(ids):
        raise CheckpointError(
            f"config.json of {where!r} {said} the aux layers {list(ids)}; expected different "
            f"numbers from 0 to {target.num_layers}, the target's layers: give "
            "eagle_aux_hidden_state_layer_ids"
        )
    check_aux_layer_ids(ids, target.num_layers, where)
    return ids


def _check_target(
    config: EagleConfig, layers: DenseConfig, target: TargetModel, where: str
) -> None:
    if layers.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"drafter {where!r} reads a vocabulary of {layers.vocab_size} (vocab_size); the "
            f"target's has {target.vocab_size}: give the drafter of this target"
        )
    reads_final_state = config.method == "eagle" or not config.use_aux
    if reads_final_state and layers.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"drafter {where!r} has hidden size {layers.hidden_size} and reads the target's final "
            f"state, which has {target.hidden_size}: give the drafter of this target"
        )
    mask = config.mask_token_id
    if mask is not None and mask >= target.vocab_size:
        raise CheckpointError(
            f"config.json of {where!r}: the mask token is {mask}; the target's vocabulary ends at "
            f"{target.vocab_size - 1}: mend the config"
        )


# ------------------------------------------------------------------ tables and extras


def _place_tables(head: EagleHead, entries: Entries, target: TargetModel, where: str) -> None:
    """Set the head's embedding and output projection: the checkpoint's own if it has them, else the
    target's. An embedding of another width is the head's own too."""
    size, place = head.shape.hidden_size, target_place(target)
    lm_head, head.embedding = entries.get("lm_head.weight"), target.table
    if "embed_tokens.weight" in entries or size != target.hidden_size:
        head.embedding = Table(place, target.vocabulary, size)
        head.own |= prefixed("embed_tokens.", head.embedding.tensors())
    rows = head.config.draft_vocab_size
    if rows is None:
        rows = target.vocab_size if lm_head is None else lm_head.shape[0]
    has_own = lm_head is not None or (not entries and head.config.method != "eagle")
    if has_own:
        place = head_place(target, rows, size)
        head.head = Table(place, Vocabulary(rows, place.group), size)
        head.own |= prefixed("lm_head.", head.head.tensors())
    elif rows == target.vocab_size and size == target.hidden_size:
        head.head = target.head
    else:
        raise CheckpointError(
            f"drafter {where!r} has no lm_head.weight, and its head of {rows} tokens and width "
            f"{size} cannot be the target's ({target.vocab_size}, {target.hidden_size}): download "
            "it again"
        )


def _place_extras(head: EagleHead, entries: Entries, width: int, where: str) -> None:
    if head.fc is not None and "fc.bias" in entries:
        head.fc.bias = head.place.empty(head.shape.hidden_size)
    if head.config.method != "peagle":
        return
    if not entries:
        head.mask_state = head.place.empty(1, 1, width)
        return
    entry = entries.get("mask_hidden")
    if entry is None or head.combine is None:
        raise CheckpointError(
            f"drafter {where!r} has no mask_hidden, the state that mask rows read; method=peagle "
            f"needs it: {unmasked_remedy(head.config)}"
        )
    numbers = 1
    for count in entry.shape:
        numbers *= count
    if numbers != width:
        raise CheckpointError(
            f"drafter {where!r}: mask_hidden is {list(entry.shape)}; its aux layers and the "
            f"target's hidden size make {width} values"
        )
    head.mask_state = head.place.empty(*entry.shape)


def _share_equal_embedding(head: EagleHead, target: TargetModel) -> bool:
    """Shares the target's embedding if the head's is equal, since some formats always save a copy;
    returns whether it is shared.
    """
    if "embed_tokens.weight" not in head.own:
        return True
    ours, theirs = head.embedding.weight, target.table.weight
    group, is_equal = target.vocabulary.group, ours.shape == theirs.shape
    is_equal = is_equal and _are_equal(ours, theirs)
    if not group.all_gather(torch.tensor(int(is_equal), device=theirs.device)).all():
        return False
    del head.own["embed_tokens.weight"]
    head.embedding = target.table
    return True


def _are_equal(ours: Tensor, theirs: Tensor) -> bool:
    """Returns whether two tables are equal. They are compared in pieces: the mask of a comparison
    takes a byte per element, 1 GB for a large table.
    """
    pieces = zip(ours.split(COMPARED_ROWS), theirs.split(COMPARED_ROWS), strict=True)
    return all(torch.equal(a, b) for a, b in pieces)


# ------------------------------------------------------------------ vocabulary


def _vocab_map(
    head: EagleHead, entries: Entries, target: TargetModel, weights: str, where: str
) -> Tensor | None:
    """Target ids [V_draft] of the draft vocabulary: k + d2t[k] for draft id k. None if they are
    the draft ids themselves.
    """
    rows, vocab_size = head.vocabulary.size, target.vocab_size
    k = torch.arange(rows, device=target.device)
    if "d2t" in entries:
        d2t = _read(entries["d2t"]).to(target.device)
        if tuple(d2t.shape) != (rows,):
            raise CheckpointError(
                f"drafter {where!r}: d2t has {d2t.shape[0]} entries and the draft's head {rows} "
                "tokens: the files do not belong together"
            )
        ids = k + d2t.to(torch.int64)
    elif rows == vocab_size:
        return None
    elif weights == "random":
        ids = k * vocab_size // rows
    else:
        raise CheckpointError(
            f"drafter {where!r} has a head of {rows} tokens for a vocabulary of {vocab_size} and "
            "no d2t that maps them: download it again"
        )
    inside = (ids >= 0) & (ids < vocab_size)
    if not bool(inside.all()) or ids.unique().shape[0] != rows:
        raise CheckpointError(
            f"drafter {where!r}: d2t does not map its {rows} tokens to different ids below "
            f"{vocab_size}, the target's vocabulary: download it again"
        )
    if "t2d" in entries:
        _check_t2d(_read(entries["t2d"]).to(target.device), ids, where)
    return None if rows == vocab_size and torch.equal(ids, k) else ids


def _check_t2d(t2d: Tensor, ids: Tensor, where: str) -> None:
    """Check that t2d, a mask over the target's vocabulary, marks the tokens that d2t lists."""
    marked = torch.zeros_like(t2d, dtype=torch.bool)
    marked[ids[ids < t2d.shape[0]]] = True
    if not torch.equal(marked, t2d.to(torch.bool)):
        raise CheckpointError(
            f"drafter {where!r}: t2d and d2t name different tokens: the files do not belong "
            "together"
        )


def _read(entry: TensorEntry) -> Tensor:
    with safe_open(entry.file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(entry.name)
        return tensor


def _suppressed(head: EagleHead, target: TargetModel) -> Tensor:
    """Draft ids of the tokens that the target never samples."""
    banned = torch.tensor(target.suppress_token_ids, dtype=torch.int64, device=target.device)
    if head.vocab_map is None or not banned.shape[0]:
        return banned
    draft_ids = torch.arange(head.vocab_map.shape[0], device=target.device)
    return draft_ids[torch.isin(head.vocab_map, banned)]


def _spec(
    config: EagleConfig,
    layers: DenseConfig,
    ids: tuple[int, ...],
    head: EagleHead,
    target: TargetModel,
    shares_embedding: bool,
    entries: Entries,
) -> DraftSpec:
    notes = list(config.notes)
    if ids and config.aux_layer_ids is None:
        notes.append(
            f"the drafter's config names no aux layers; it reads the states after layers "
            f"{list(ids)} of the target's {target.num_layers}, the default of EAGLE-3's authors: "
            f"if acceptance is low, give {AUX_KEY}"
        )
    if entries and config.method != "eagle" and "lm_head.weight" not in entries:
        notes.append(  # EAGLE-1 heads have none; an embedding is often the target's by intent
            "the drafter's files lack lm_head.weight, which heads of its kind bring; the target's "
            "is used instead: if acceptance is low, download the drafter again"
        )
    if layers.max_position_embeddings < target.max_position_embeddings:
        notes.append(
            f"the drafter was made for {layers.max_position_embeddings} positions, the target for "
            f"{target.max_position_embeddings}: drafts further on may be poor"
        )
    return DraftSpec(
        method=config.method,
        hidden_width=layers.hidden_size,
        draft_width=layers.hidden_size,
        vocab_size=head.vocabulary.size,
        kv_mode="own",
        position_mode="advance",
        feedback="post_norm" if config.norm_output else "pre_norm",
        shares_embedding=shares_embedding,
        shares_head="lm_head.weight" not in head.own,
        aux_layer_ids=ids,
        target_hidden_width=target.hidden_size,
        norm_before_fc=config.norm_before_fc,
        fc_norm=config.fc_norm,
        norm_before_residual=config.norm_before_residual,
        has_vocab_map=head.vocab_map is not None,
        mask_token_id=config.mask_token_id,
        num_layers=len(layers.kinds),
        format=config.format,
        notes=tuple(notes),
        verifier=config.verifier,
    )
