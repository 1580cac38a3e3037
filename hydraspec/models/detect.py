"""Which drafter a checkpoint folder holds: read from its config and tensor names, never from its
path.

Knows the published formats by their marks; how each is read in full is the business of the heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hydraspec.errors import CheckpointError
from hydraspec.models.checkpoint.mistral_names import config_of_params
from hydraspec.models.checkpoint.reader import PICKLES, Checkpoint, read_json, resolve_folder

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

    Reads tensor names only where config.json leaves the choice open; a key that is null counts as
    absent. Raises CheckpointError: a format that is not built, or a part of another type than the
    format has.
    """
    raw = opened.config
    if raw.get("speculators_model_type") is not None:
        return _detect_speculators(raw, str(opened.folder))
    if str(raw.get("model_type", "")).endswith("_assistant"):
        return Detected(method="gemma4_mtp", format=ASSISTANT)
    _refuse_unbuilt(opened)
    if "eagle" in architectures_of(raw):  # such heads keep their target's other keys
        return _detect_eagle(opened)
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
    settings = part_of(raw, "speculators_config", where)
    algorithm = settings.get("algorithm")
    if algorithm not in (None, kind):
        raise CheckpointError(
            f"config.json of {where!r} contradicts itself: speculators_model_type is {kind!r}, "
            f"speculators_config.algorithm is {algorithm!r}; expected the same in both: mend the "
            "config"
        )
    proposals = _proposals(settings, where)
    wanted = settings.get("default_proposal_method")
    chosen = [p for p in proposals if p.get("proposal_type") == wanted] or proposals[:1]
    tokens = chosen[0].get("speculative_tokens") if chosen else None
    verifier = part_of(settings, "verifier", where, "speculators_config.").get("name_or_path")
    return Detected(
        method=kind,
        format=SPECULATORS,
        num_speculative_tokens=tokens if isinstance(tokens, int) else None,
        verifier=verifier if isinstance(verifier, str) and verifier else None,
    )


def _proposals(settings: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    proposals = settings.get("proposal_methods") or []
    if not isinstance(proposals, list) or any(not isinstance(p, Mapping) for p in proposals):
        raise CheckpointError(
            f"config.json of {where!r}: speculators_config.proposal_methods is {proposals!r}; "
            "expected a list of objects with proposal_type and speculative_tokens: mend the config"
        )
    return proposals


def part_of(source: Mapping[str, Any], key: str, where: str, prefix: str = "") -> dict[str, Any]:
    """The object under a key; {} where it is absent or null. Raises CheckpointError if it is none.

    prefix is what the source itself lies under, for the message.
    """
    part = source.get(key)
    if part is not None and not isinstance(part, Mapping):
        raise CheckpointError(
            f"config.json of {where!r}: {prefix}{key} is {part!r}; expected an object: mend the "
            "config"
        )
    return dict(part or {})


def architectures_of(raw: Mapping[str, Any]) -> str:
    """The class names in `architectures`, in small letters."""
    names = raw.get("architectures") or []
    return " ".join(str(name) for name in ([names] if isinstance(names, str) else names)).lower()


def _refuse_unbuilt(opened: Checkpoint) -> None:
    """DFlash and DSpark as their authors publish them: their tensors could pass for EAGLE's."""
    raw = opened.config
    marks = f"{architectures_of(raw)} {raw.get('model_type')}".lower()
    for name in ("DFlash", "DSpark"):
        if name.lower() in marks:
            raise CheckpointError(
                f"config.json of {str(opened.folder)!r}: architectures is "
                f"{raw.get('architectures')!r}, model_type {raw.get('model_type')!r}: a {name} "
                f"drafter, which is not built; expected {KNOWN}: choose another drafter"
            )


def _detect_consolidated(opened: Checkpoint) -> Detected | None:
    if "model.fc.weight" in opened.entries():  # eagle_linear in the file
        return Detected(method="eagle", format=CONSOLIDATED)
    return None


def _detect_eagle(opened: Checkpoint) -> Detected | None:
    """EAGLE-1, EAGLE-3 or P-EAGLE with the names of EAGLE's authors: by what only they have."""
    raw = opened.config
    architectures = architectures_of(raw)
    says_mask = any(raw.get(key) is not None for key in MASK_KEYS)
    says_eagle3 = "eagle3" in architectures or "peagle" in architectures
    if says_eagle3 or raw.get("draft_vocab_size") is not None:
        parallel = says_mask or "peagle" in architectures or bool(raw.get("parallel_drafting"))
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
    """What runs where no method is chosen."""

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
        raise _no_drafter(opened, "")
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
    (names of EAGLE's authors) passes as the requested one: what P-EAGLE lacks is named on reading.
    """
    found = detect(opened)
    if found is None:
        raise _no_drafter(opened, f"method={method}, but ")
    where = str(opened.folder)
    either = {found.method, method} <= {"eagle3", "peagle"} and found.format == AUTHORS
    if found.method != method and not either:
        raise CheckpointError(
            f"method={method}, but {where!r} holds a drafter for method={found.method} "
            f"({found.format}): choose method={found.method}, or give another method.checkpoint"
        )
    return found


def _no_drafter(opened: Checkpoint, start: str) -> CheckpointError:
    """The refusal of a folder that holds no drafter. Raises the one about pickle files where there
    are no others: the authors' own configs say nothing, and only tensor names would tell.
    """
    if any(file for pattern in PICKLES for file in opened.folder.glob(pattern)):
        opened.entries()
    return CheckpointError(
        f"{start}checkpoint {str(opened.folder)!r} (model_type "
        f"{opened.config.get('model_type')!r}) is no drafter; expected {KNOWN}: give one as "
        "method.checkpoint (a target is given as target.checkpoint)"
    )
