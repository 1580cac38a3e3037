"""Sentences about a drafter: its conventions, what it shares with the target, and its files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hydraspec.models.checkpoint.names import name_in_model
from hydraspec.models.detect import open_draft
from hydraspec.models.draft_spec import DraftSpec
from hydraspec.models.eagle.head import canonical_name
from hydraspec.models.tokenizer import Tokenizer, load_tokenizer

MAPS = ("d2t", "t2d")  # map draft ids to target ids; read apart from the weights


@dataclass(slots=True, frozen=True, kw_only=True)
class Files:
    """Names of the tensors in a drafter's folder, read and unread."""

    folder: str
    expected: tuple[str, ...]  # tensors of the head
    read: tuple[str, ...]  # tensors in the files that the head has
    unread: tuple[str, ...]  # tensors in the files that the head does not have
    tokenizer: Tokenizer | None


def files_of(checkpoint: str, head: Any) -> Files:
    """The tensors in a checkpoint's files, split into those that the loaded head reads and others.
    A head with tensors that its files lack cannot be loaded, so there are none of these.
    """
    opened = open_draft(checkpoint)
    expected = tuple(sorted(head.tensors()))
    read: list[str] = []
    unread: list[str] = []
    for name in sorted(opened.entries()):
        known = {name, canonical_name(name), name_in_model(name)} & {*expected, *MAPS}
        (read if known else unread).append(name)
    return Files(
        folder=str(opened.folder),
        expected=expected,
        read=tuple(read),
        unread=tuple(unread),
        tokenizer=load_tokenizer(opened.folder),
    )


def sentences(spec: DraftSpec, files: Files | None) -> list[str]:
    """The conventions of a drafter, one sentence each; `files` None: its files were not read."""
    of = f" ({spec.format})" if spec.format else ""
    found = [f"It drafts by method={spec.method}{of}, {spec.draft_width} wide."]
    if spec.kv_mode == "own":
        found.append(f"It keeps KV of its own, of {_many(spec.num_layers, 'layer')}.")
    else:
        sources = " and ".join(f"layer {layer} ({kind})" for kind, layer in spec.kv_sources)
        found.append(f"It keeps no KV and reads the target's, of {sources}.")
    grows = spec.position_mode == "advance"
    found.append(
        "Its positions grow with the draft step."
        if grows
        else "All draft steps of a round stand at one position, the last with target KV."
    )
    found.append(_entering(spec))
    if spec.block_size is not None:
        found.append(_block(spec))
    elif spec.mask_token_id is None:
        fed = {"pre_norm": "before its final norm", "post_norm": "after its final norm"}
        state = fed.get(spec.feedback, "projected to the target's width")
        found.append(f"A draft step reads the state of the step before it, {state}.")
    else:
        found.append(
            f"All K drafts come from one pass; rows of later drafts read token "
            f"{spec.mask_token_id} as their mask, and a learned state."
        )
    if spec.aux_layer_ids and spec.block_size is None:
        keeps = "the norm of the state" if spec.norm_before_residual else "the state itself"
        found.append(f"Its first layer adds to {keeps} (norm_before_residual).")
    ours = "the target's ids" if not spec.has_vocab_map else "ids of its own, which d2t maps"
    found.append(f"It scores {spec.vocab_size} tokens, {ours}.")
    found.append(
        f"Its embedding is {_whose(spec.shares_embedding)}, its output head "
        f"{_whose(spec.shares_head)}."
    )
    if files is not None:
        found.append(_holdings(files))
    return [*found, *(f"Note: {note}." for note in spec.notes)]


def _block(spec: DraftSpec) -> str:
    own = "the token after its own position" if spec.samples_anchor else "its own position"
    return (
        f"All K drafts come from one pass over a block, trained with {spec.block_size} rows: the "
        f"newest token, then token {spec.mask_token_id} as the mask; each row drafts for {own}."
    )


def _entering(spec: DraftSpec) -> str:
    if not spec.aux_layer_ids:
        return "It reads the target's last hidden state."
    norm = "without norms before fc" if spec.block_size is None else "with one norm after fc"
    if spec.norm_before_fc:
        norm = "with one norm over all of them before fc"
    elif spec.fc_norm:
        norm = "with a norm for each before fc"
    return (
        f"It reads the target's states after layers {list(spec.aux_layer_ids)} (0 is the "
        f"embedding), {norm}."
    )


def _holdings(files: Files) -> str:
    unread = f"; not read: {', '.join(files.unread[:6])}" if files.unread else ", and no others"
    more = f" and {len(files.unread) - 6} more" if len(files.unread) > 6 else ""
    return f"Its files hold {len(files.read)} tensors that are read{unread}{more}."


def _whose(shared: bool) -> str:
    return "the target's" if shared else "its own"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
