"""Conventions of a draft checkpoint, normalised once at load.

Most failures of speculative decoding in the field are a checkpoint read with the wrong
convention, and show only as low acceptance. Every convention that differs between published heads
is a field here, checked and logged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from hydraspec.shipped import ZOO_PREFIX


@dataclass(slots=True, frozen=True, kw_only=True)
class DraftSpec:
    """The conventions of a draft head."""

    method: str  # the method that runs it, such as gemma4_mtp
    hidden_width: int  # width of the hidden state that enters a step and is fed back
    draft_width: int  # width inside the draft
    vocab_size: int  # rows of the draft's head
    kv_mode: Literal["own", "target"]  # writes its own KV, or reads the target's
    position_mode: Literal["advance", "constant"]  # positions of steps 1, 2, ...
    feedback: Literal[
        "pre_norm", "post_norm", "post_projection"
    ]  # what is fed back as hidden state
    shares_embedding: bool  # tokens enter through the target's embedding
    shares_head: bool  # logits come from the target's head
    aux_layer_ids: tuple[int, ...] = ()  # target states it reads; 0 is the embedding output
    target_hidden_width: int | None = None  # width of those; None: hidden_width
    norm_before_fc: bool = False  # one norm over the concatenated target states
    fc_norm: bool = False  # one norm for each of them
    norm_before_residual: bool = False
    has_vocab_map: bool = False  # draft ids differ from target ids
    mask_token_id: int | None = None  # parallel drafting
    num_layers: int = 0  # decoder layers that own KV
    format: str = ""  # which published format the checkpoint is in
    notes: tuple[str, ...] = ()  # assumptions made on reading; they go into the summary's warnings
    kv_sources: tuple[tuple[str, int], ...] = ()  # (KV group, target layer) it reads
    verifier: str | None = None  # the target it was trained for, if the checkpoint names one
    quantization: Mapping[str, str] | None = None  # of its matrices by kind; None: all are float
    block_size: int | None = None  # block drafters: rows of a block, the newest token's included
    # Reads the encoder's outputs where the next token is an image's; else the placeholder's row.
    supports_mm_inputs: bool = False
    samples_anchor: bool = False  # block drafters: a row predicts the token after its own position

    def __str__(self) -> str:
        """The fields that differ from their defaults."""
        values = ((field, getattr(self, field.name)) for field in fields(self))
        return ", ".join(f"{f.name}={value}" for f, value in values if value != f.default)

    def note_on_target(self, checkpoint: str) -> str | None:
        """A warning that the head was made for another model than this target; None where the names
        agree, or none is given. Folders, hub ids and zoo names of one model agree.
        """
        if self.verifier is None or _model_name(self.verifier) == _model_name(checkpoint):
            return None
        return (
            f"the drafter was made for {self.verifier!r} (speculators_config.verifier."
            f"name_or_path); the target is {checkpoint!r}: drafts are poor unless these are the "
            "same model"
        )


# How names of quantised releases end: -FP8, -FP8-dynamic, -qat-w4a16-ct, _fp8 and so on.
_QUANTISED = re.compile(r"[-_.](qat|fp8|w[48]a\d+|int[48]|quantized)([-_.].*)?$")


def fewer_positions(drafter: int, target: int) -> list[str]:
    """A note where a drafter was made for fewer positions than its target; else none."""
    if drafter >= target:
        return []
    return [
        f"the drafter was made for {drafter} positions, the target for {target}: drafts further on "
        "may be poor"
    ]


def _model_name(checkpoint: str) -> str:
    """The last part of a folder, hub id or zoo name, in lower case and without the ending of a
    quantised release; in a hub cache, the id's."""
    parts = checkpoint.removeprefix(ZOO_PREFIX).rstrip("/").split("/")
    cached = [part.rsplit("--", 1)[-1] for part in parts if part.startswith("models--")]
    return _QUANTISED.sub("", (cached or parts)[-1].lower())
