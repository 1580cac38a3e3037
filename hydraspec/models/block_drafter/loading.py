"""Loads a block drafter from any of three formats: shares tables with the target, and checks the
config against the tensors and the target.
"""

from __future__ import annotations

from pathlib import Path

import torch

from hydraspec.errors import CheckpointError
from hydraspec.models.aux_states import check_aux_layer_ids
from hydraspec.models.base import TargetModel
from hydraspec.models.block_drafter.config import (
    CONVERT,
    MASK_EMBEDDING,
    MASK_PICKLE,
    BlockConfig,
    read_block_drafter,
)
from hydraspec.models.block_drafter.head import BlockHead, canonical_name
from hydraspec.models.detect import Z_LAB, open_draft
from hydraspec.models.draft_families import FAMILIES
from hydraspec.models.draft_place import layers_place
from hydraspec.models.draft_spec import DraftSpec, fewer_positions
from hydraspec.models.draft_tables import (
    Entries,
    place_tables,
    share_equal_embedding,
    suppressed,
    vocab_map,
)
from hydraspec.models.gemma4.model import rounded
from hydraspec.models.parts import DecoderConfig
from hydraspec.models.weights import fill


def load_block_drafter(
    checkpoint: str, *, method: str, weights: str, target: TargetModel, seed: int
) -> BlockHead:
    """The head of a folder, zoo:<name> or hub id, in the target's dtype and on its device.

    method is dflash, dspark or dflash2, and must be what the folder holds. Raises CheckpointError
    naming both sides where method, config, tensors and target contradict each other.
    """
    opened = open_draft(checkpoint)
    where = str(opened.folder)
    config = read_block_drafter(opened, method)
    layers = FAMILIES[config.family].read(config.layers, where)
    entries: Entries = {}
    if weights == "checkpoint":
        entries = {canonical_name(name): entry for name, entry in opened.entries().items()}
        _check_no_pickle(opened.folder, entries)
    _check_target(config, layers, target, where)
    _check_tensors(config, entries, target, where)
    width = target.hidden_size
    place = layers_place(
        target,
        layers.divided,
        lambda place: BlockHead(config, layers, width, place).layers,
        is_quantised=opened.is_quantised,
    )
    with torch.no_grad():
        head = BlockHead(config, layers, width, place)
        rows, brings_head = config.draft_vocab_size, config.format != Z_LAB
        place_tables(head, entries, target, where, num_rows=rows, brings_head=brings_head)
        head.add_heads(target.vocab_size)
        if MASK_EMBEDDING in entries:
            head.mask_embedding = place.empty(head.hidden_size)
        fill(head, opened, weights=weights, seed=seed)
        head.vocab_map = vocab_map(head, entries, target, weights, where)
        shares = share_equal_embedding(head, target)
        head.embed_scale = _embed_scale(head, target)
        head.finish()
        head.spec = _spec(head, target, shares)
        head.ban(suppressed(head, target))
    return head


def _embed_scale(head: BlockHead, target: TargetModel) -> float | None:
    """Factor of the embedding, None for 1: the target's where its table is used, and that of
    Gemma's layers for a table of the head's own; else what the file says."""
    if not head.config.scales_embedding:
        return None if head.config.embed_scale == 1.0 else head.config.embed_scale
    if head.config.family == "gemma4":
        return rounded(head.hidden_size**0.5, head.place.dtype)
    return getattr(target, "embed_scale", None) if head.embedding is target.table else None


def _check_target(
    config: BlockConfig, layers: DecoderConfig, target: TargetModel, where: str
) -> None:
    pairs = (
        ("target_hidden_size", config.target_hidden_size, "hidden size", target.hidden_size),
        ("num_target_layers", config.num_target_layers, "number of layers", target.num_layers),
        ("vocab_size", layers.vocab_size, "vocabulary", target.vocab_size),
    )
    for key, stated, words, found in pairs:
        if stated not in (None, found):
            raise CheckpointError(
                f"drafter {where!r} was made for a target whose {words} is {stated} ({key}); this "
                f"target's is {found}: give the drafter of this target"
            )
    check_aux_layer_ids(config.aux_layer_ids, target.num_layers, where)
    if config.mask_token_id >= target.vocab_size:
        raise CheckpointError(
            f"config.json of {where!r}: the mask token (mask_token_id) is {config.mask_token_id}; "
            f"the target's vocabulary ends at {target.vocab_size - 1}: mend the config"
        )


def _check_tensors(config: BlockConfig, entries: Entries, target: TargetModel, where: str) -> None:
    if not entries:
        return
    if "hidden_norm.weight" not in entries:
        raise CheckpointError(
            f"drafter {where!r} has no hidden_norm.weight, the norm of its context features; "
            f"method={config.method} needs it: download the drafter again"
        )
    fc, ids, width = entries.get("fc.weight"), config.aux_layer_ids, target.hidden_size
    if fc is not None and fc.shape[-1] != len(ids) * width:
        raise CheckpointError(
            f"drafter {where!r}: fc.weight is {list(fc.shape)} and reads {fc.shape[-1]} values; "
            f"by its config it reads {len(ids)} layers of the target (target_layer_ids; without "
            f"them one for each layer of its own), and the target's hidden size is {width}, which "
            f"makes {len(ids) * width}: the drafter belongs to another target, or its layer ids "
            "are wrong or missing"
        )


def _check_no_pickle(folder: Path, entries: Entries) -> None:
    """Refuses a folder that has its mask embedding as a pickle alone: without it drafts would be
    poor."""
    if (folder / MASK_PICKLE).is_file() and MASK_EMBEDDING not in entries:
        raise CheckpointError(
            f"{str(folder / MASK_PICKLE)!r} holds the drafter's mask embedding as a pickle, and "
            "loading a pickle runs code; expected safetensors: if you trust the file, convert it "
            f"once, in its folder, with {CONVERT}"
        )


def _spec(head: BlockHead, target: TargetModel, shares_embedding: bool) -> DraftSpec:
    config, layers = head.config, head.shape
    notes = list(config.notes)
    if config.scales_embedding and head.embed_scale is not None:
        notes.append(
            f"the drafter's tokens enter scaled by {head.embed_scale:g}, as its authors' code "
            "embeds them for this target"
        )
    notes += fewer_positions(layers.max_position_embeddings, target.max_position_embeddings)
    return DraftSpec(
        method=config.method,
        hidden_width=layers.hidden_size,
        draft_width=layers.hidden_size,
        vocab_size=head.vocabulary.size,
        kv_mode="own",
        position_mode="advance",
        feedback="pre_norm",
        shares_embedding=shares_embedding,
        shares_head="lm_head.weight" not in head.own,
        aux_layer_ids=config.aux_layer_ids,
        target_hidden_width=target.hidden_size,
        has_vocab_map=head.vocab_map is not None,
        mask_token_id=config.mask_token_id,
        num_layers=len(head.layers),
        format=config.format,
        notes=tuple(notes),
        verifier=config.verifier,
        block_size=config.block_size,
        samples_anchor=config.samples_anchor,
    )
