"""Loads an EAGLE-type draft head from any of three formats: maps tensor names, shares tables with
the target, and checks the config against the tensors and the target.
"""

from __future__ import annotations

import torch

from hydraspec.errors import CheckpointError
from hydraspec.models.aux_states import check_aux_layer_ids, default_aux_layer_ids
from hydraspec.models.base import TargetModel
from hydraspec.models.checkpoint.reader import Checkpoint, TensorEntry
from hydraspec.models.detect import open_draft
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
from hydraspec.models.eagle.config import AUX_KEY, EagleConfig, read_eagle, unmasked_remedy
from hydraspec.models.eagle.head import EagleHead, canonical_name
from hydraspec.models.parts import DecoderConfig
from hydraspec.models.weights import fill


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
    layers = FAMILIES[config.family].read(config.layers, where)
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
        rows, brings_head = config.draft_vocab_size, method != "eagle"
        place_tables(head, entries, target, where, num_rows=rows, brings_head=brings_head)
        _place_extras(head, entries, len(ids) * width, where)
        fill(head, opened, weights=weights, seed=seed)
        head.vocab_map = vocab_map(head, entries, target, weights, where)
        shares = share_equal_embedding(head, target)
        head.spec = _spec(config, layers, ids, head, target, shares, entries)
        head.finish(suppressed(head, target))
    return head


def _entries(opened: Checkpoint, weights: str) -> dict[str, TensorEntry]:
    if weights != "checkpoint":
        return {}
    return {canonical_name(name): entry for name, entry in opened.entries().items()}


# ------------------------------------------------------------------ against the target


def _aux_layer_ids(
    config: EagleConfig, layers: DecoderConfig, entries: Entries, target: TargetModel, where: str
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
    config: EagleConfig, layers: DecoderConfig, target: TargetModel, where: str
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
    if config.supports_mm_inputs and layers.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"config.json of {where!r}: supports_mm_inputs is true, and the head's hidden size "
            f"{layers.hidden_size} is not the target's {target.hidden_size}, which embeddings of "
            "images have: mend the config"
        )
    mask = config.mask_token_id
    if mask is not None and mask >= target.vocab_size:
        raise CheckpointError(
            f"config.json of {where!r}: the mask token is {mask}; the target's vocabulary ends at "
            f"{target.vocab_size - 1}: mend the config"
        )


# ------------------------------------------------------------------ extras


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


def _spec(
    config: EagleConfig,
    layers: DecoderConfig,
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
    notes += fewer_positions(layers.max_position_embeddings, target.max_position_embeddings)
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
        num_layers=len(head.stack),
        format=config.format,
        notes=tuple(notes),
        verifier=config.verifier,
        supports_mm_inputs=config.supports_mm_inputs,
    )
