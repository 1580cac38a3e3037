"""Which drafter a checkpoint folder holds: read from its config and tensor names, never from its
path.

Knows the published formats by their marks; how each is read in full is the business of the heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hydraspec.errors import CheckpointError
from hydraspec.models.checkpoint import Checkpoint, read_json, resolve_folder
from hydraspec.models.mistral_names import config_of_params

SPECULATORS = "speculators"
AUTHORS = "EAGLE"
CONSOLIDATED = "Mistral consolidated"
ASSISTANT = "Gemma 4 assistant"
TARGET_WITH_MTP = "Hugging Face, with MTP layers"

SPECULATORS_METHODS = ("eagle", "eagle3", "peagle", "mtp")
DEFAULT_K = {"eagle": 3, "eagle3": 3, "peagle": 3, "gemma4_mtp": 3, "mtp": 1}  # as in conf/
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
KNOWN = (
    "a speculators folder (eagle, eagle3, peagle, mtp), EAGLE-1 or EAGLE-3 as published by its "
    "authors, a Mistral consolidated EAGLE folder (params.json), a Gemma 4 assistant, or a model "
    "with MTP layers"
)


@dataclass(slots=True, frozen=True, kw_only=True)
class Detected:
    """What a folder holds."""

    method: str  # eagle, eagle3, peagle, mtp or gemma4_mtp
    format: str
    num_speculative_tokens: int | None = None  # K as the checkpoint proposes it
    verifier: str | None = None  # the target it was made for, where it says


def open_draft(checkpoint: str) -> Checkpoint:
    """Read a drafter's json files: config.json, or Mistral's params.json. Tensors stay unread.

    Quantisation settings are ignored: drafters often carry their target's, while their own weights
    are float. Tensors that are in fact quantised are refused as they are read. Raises
    CheckpointError.
    """
    folder = resolve_folder(checkpoint)
    if (folder / "config.json").is_file():
        return Checkpoint(folder, read_json(folder / "config.json"), {})
    if (folder / "params.json").is_file():
        config = config_of_params(read_json(folder / "params.json"), str(folder))
        return Checkpoint(folder, config, {})
    raise CheckpointError(
        f"checkpoint folder {str(folder)!r} has neither config.json nor params.json; expected "
        f"{KNOWN}"
    )


def detect(opened: Checkpoint) -> Detected | None:
    """What the folder holds; None for anything that is no drafter.

    Reads tensor names only where config.json leaves the choice open. Raises CheckpointError: a
    speculators format that is not built.
    """
    raw = opened.config
    if "speculators_model_type" in raw:
        return _detect_speculators(raw, str(opened.folder))
    if str(raw.get("model_type", "")).endswith("_assistant"):
        return Detected(method="gemma4_mtp", format=ASSISTANT)
    if raw.get("num_nextn_predict_layers"):
        return Detected(method="mtp", format=TARGET_WITH_MTP)
    if not (opened.folder / "config.json").is_file():
        return _detect_consolidated(opened)
    if raw.get("mtp_num_hidden_layers"):
        return Detected(method="mtp", format=TARGET_WITH_MTP)
    return _detect_eagle(opened)


def _detect_speculators(raw: Mapping[str, Any], where: str) -> Detected:
    kind = raw["speculators_model_type"]
    if kind not in SPECULATORS_METHODS:
        raise CheckpointError(
            f"config.json of {where!r}: speculators_model_type is {kind!r}; expected one of "
            f"{', '.join(SPECULATORS_METHODS)}: choose another drafter"
        )
    settings = raw.get("speculators_config") or {}
    proposals = settings.get("proposal_methods") or []
    wanted = settings.get("default_proposal_method")
    chosen = [p for p in proposals if p.get("proposal_type") == wanted] or proposals[:1]
    tokens = chosen[0].get("speculative_tokens") if chosen else None
    verifier = (settings.get("verifier") or {}).get("name_or_path")
    return Detected(
        method=kind,
        format=SPECULATORS,
        num_speculative_tokens=tokens if isinstance(tokens, int) else None,
        verifier=verifier if isinstance(verifier, str) and verifier else None,
    )


def _detect_consolidated(opened: Checkpoint) -> Detected | None:
    if "model.fc.weight" in opened.entries():  # eagle_linear in the file
        return Detected(method="eagle", format=CONSOLIDATED)
    return None


def _detect_eagle(opened: Checkpoint) -> Detected | None:
    """EAGLE-1, EAGLE-3 or P-EAGLE with the names of EAGLE's authors: by what only they have."""
    raw = opened.config
    architectures = " ".join(raw.get("architectures") or []).lower()
    says_mask = any(key in raw for key in MASK_KEYS[1:]) or bool(raw.get("parallel_drafting"))
    if "eagle3" in architectures or "draft_vocab_size" in raw or "peagle" in architectures:
        parallel = says_mask or "peagle" in architectures or "mask_token_id" in raw
        return Detected(method="peagle" if parallel else "eagle3", format=AUTHORS)
    if "eagle" in architectures or raw.get("model_type") == "eagle":
        return Detected(method="eagle", format=AUTHORS)
    if not any(opened.folder.glob("*.safetensors")):
        return None
    names = {name.removeprefix("model.") for name in opened.entries()}
    if "fc.weight" not in names:
        return None
    if "mask_hidden" in names:
        return Detected(method="peagle", format=AUTHORS)
    deep = any(name.endswith("hidden_norm.weight") for name in names)
    return Detected(method="eagle3" if deep else "eagle", format=AUTHORS)


@dataclass(slots=True, frozen=True, kw_only=True)
class Resolved:
    """What runs where nobody chose a method."""

    method: str
    drafter: str
    target: str
    num_speculative_tokens: int


def resolve(target: str, drafter: str | None) -> Resolved | None:
    """Method, K, drafter and target of a drafter's folder; None if there is no drafter.

    Without a drafter the target may hold one: its own MTP layers, or it is itself a speculators
    folder, whose verifier then is the target. Raises CheckpointError: a folder that holds no
    drafter, or names no verifier.
    """
    opened = open_draft(target if drafter is None else drafter)
    found = detect(opened)
    if found is None:
        if drafter is None:
            return None
        raise CheckpointError(
            f"checkpoint {str(opened.folder)!r} (model_type {opened.config.get('model_type')!r}) "
            f"is no drafter; expected {KNOWN}"
        )
    runs = target
    if drafter is None and found.format != TARGET_WITH_MTP:
        if found.verifier is None:
            raise CheckpointError(
                f"target {str(opened.folder)!r} is a drafter for method={found.method} "
                f"({found.format}) that names no target: give the target as target.checkpoint and "
                "this folder as method.checkpoint"
            )
        runs = found.verifier
    return Resolved(
        method=found.method,
        drafter=target if drafter is None else drafter,
        target=runs,
        num_speculative_tokens=found.num_speculative_tokens or DEFAULT_K[found.method],
    )


def check_method(opened: Checkpoint, method: str) -> Detected:
    """What the folder holds, which must be of `method`.

    Raises CheckpointError naming both sides. A folder that could be either of EAGLE-3 and P-EAGLE
    (names of EAGLE's authors) passes as what is asked for: what P-EAGLE lacks is named on reading.
    """
    found = detect(opened)
    where = str(opened.folder)
    if found is None:
        raise CheckpointError(
            f"method={method}, but {where!r} (model_type {opened.config.get('model_type')!r}) is "
            f"no drafter; expected {KNOWN}"
        )
    either = {found.method, method} <= {"eagle3", "peagle"} and found.format == AUTHORS
    if found.method != method and not either:
        raise CheckpointError(
            f"method={method}, but {where!r} holds a drafter for method={found.method} "
            f"({found.format}): choose method={found.method}, or give another method.checkpoint"
        )
    return found
