"""Loads a multi-token-prediction head and checks it against its target."""

from __future__ import annotations

import torch

from hydraspec.errors import CheckpointError
from hydraspec.models.base import TargetModel
from hydraspec.models.checkpoint.reader import Checkpoint
from hydraspec.models.detect import check_method, detect, open_draft
from hydraspec.models.draft_place import layers_place
from hydraspec.models.draft_spec import DraftSpec
from hydraspec.models.mtp.config import MTPConfig, check_num_drafts, read_mtp_config
from hydraspec.models.mtp.head import MTPHead
from hydraspec.models.weights import fill


def load_mtp(
    checkpoint: str, *, weights: str, target: TargetModel, num_drafts: int, seed: int
) -> MTPHead:
    """The MTP layers of a folder (the target's own, as a rule), zoo:<name> or hub id.

    They come in the target's dtype, on its device; num_drafts is K. Raises CheckpointError: no MTP
    layers, weights missing, or made for another target (both values are named); ConfigurationError:
    K does not go with the number of layers.
    """
    opened = open_draft(checkpoint)
    where = str(opened.folder)
    if detect(opened) is None:
        read_mtp_config(opened)  # raises, naming the key that announces no layers
    found = check_method(opened, "mtp")
    config = read_mtp_config(opened)
    check_num_drafts(num_drafts, config.num_layers, where)
    _check_target(config, target, where)
    place = layers_place(
        target,
        config.block.divided,
        lambda place: MTPHead(config, target, num_drafts, place).layers,
        is_quantised=opened.is_quantised,
    )
    with torch.no_grad():
        head = MTPHead(config, target, num_drafts, place)
        if weights == "checkpoint":
            _check_presence(opened, head, where)
        fill(head, opened, weights=weights, seed=seed)
        head.finish()
    head.spec = DraftSpec(
        method="mtp",
        hidden_width=config.hidden_size,
        draft_width=config.hidden_size,
        vocab_size=target.vocab_size,
        kv_mode="own",
        position_mode="advance",
        feedback="post_norm",
        shares_embedding=True,
        shares_head=True,
        num_layers=config.num_layers,
        format=f"{found.format} ({config.layout.name} layout)",
        verifier=found.verifier,
        supports_mm_inputs=getattr(target, "encoder", None) is not None,  # as the target embeds
    )
    return head


def _check_target(config: MTPConfig, target: TargetModel, where: str) -> None:
    for what, ours, theirs in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.block.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise CheckpointError(
                f"the MTP layers of {where!r} were not made for this target: {what} is {ours} "
                f"there and {theirs} in the target. Leave method.checkpoint null to use the "
                "target's own"
            )


def _check_presence(opened: Checkpoint, head: MTPHead, where: str) -> None:
    """Raises CheckpointError if a release dropped the layers that its config still announces."""
    names = [name for name in opened.entries() if head.canonical_name(name)]
    if not names:
        expected = ", ".join(f"model.{prefix}*" for prefix in head.config.prefixes)
        raise CheckpointError(
            f"checkpoint {where!r} holds no MTP weights, though its config.json announces "
            f"{head.config.num_layers} (num_nextn_predict_layers): method=mtp needs {expected}. "
            "Give a release that kept them, or choose another method"
        )
