"""Detects the drafter in a checkpoint folder from its config and tensor names, never from its path.

It only tells the published formats apart; the module of each draft head reads its whole config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hydraspec.errors import CheckpointError
from hydraspec.models.checkpoint.reader import PICKLES, Checkpoint, open_checkpoint

SPECULATORS = "speculators"
AUTHORS = "EAGLE"
CONSOLIDATED = "Mistral consolidated"
ASSISTANT = "Gemma 4 assistant"
TARGET_WITH_MTP = "Hugging Face, with MTP layers"
Z_LAB = "z-lab"
DEEPSPEC = "deepseek-ai"
GEMMA_ARCHITECTURE = "gemma4dsparkmodel"

SPECULATORS_METHODS = ("eagle", "eagle3", "peagle", "mtp", "dflash", "dspark", "dflash2")
DEFAULT_K = {  # as in conf/
    **{"eagle": 3, "eagle3": 3, "peagle": 3, "gemma4_mtp": 3, "mtp": 1},
    **{"dflash": 3, "dspark": 3, "dflash2": 3},
}
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
KNOWN = (
    "a speculators folder (eagle, eagle3, peagle, mtp, dflash, dspark, dflash2), EAGLE-1 or "
    "EAGLE-3 as published by its authors, a Mistral consolidated EAGLE folder (params.json), "
    "DFlash or DFlash2 of z-lab, DFlash or DSpark of deepseek-ai, a Gemma 4 assistant, or a model "
    "with MTP layers"
)


@dataclass(slots=True, frozen=True, kw_only=True)
class Detected:
    """The drafter that a checkpoint folder holds."""

    method: str  # eagle, eagle3, peagle, mtp, gemma4_mtp, dflash, dspark or dflash2
    format: str
    num_speculative_tokens: int | None = None  # K proposed by the checkpoint
    verifier: str | None = None  # the target it was trained for, if its config names one


def open_draft(checkpoint: str) -> Checkpoint:
    """Reads a drafter's json files, and no tensors: config.json, or Mistral's params.json.

    A drafter's number formats are those of its own config, whatever its target has; where all its
    weights are float, a quantization_config copied from the target counts for nothing. Raises
    CheckpointError.
    """
    return open_checkpoint(checkpoint)


def detect(opened: Checkpoint) -> Detected | None:
    """The drafter in the folder, or None if it holds none.

    Tensor names are read only if config.json leaves the choice open; a key that is null counts as
    absent. Raises CheckpointError for a format that is not supported, or a value of a wrong type.
    """
    raw = opened.config
    if raw.get("speculators_model_type") is not None:
        return _detect_speculators(raw, str(opened.folder))
    if str(raw.get("model_type", "")).endswith("_assistant"):
        return Detected(method="gemma4_mtp", format=ASSISTANT)
    block = _detect_block(opened)
    if block is not None:
        return block
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
    """The JSON object under a key; {} if it is absent or null. Raises CheckpointError for any other
    type. prefix is the path of `source` in the config, for the message.
    """
    part = source.get(key)
    if part is not None and not isinstance(part, Mapping):
        raise CheckpointError(
            f"config.json of {where!r}: {prefix}{key} is {part!r}; expected an object: mend the "
            "config"
        )
    return dict(part or {})


def architectures_of(raw: Mapping[str, Any]) -> str:
    """The class names in `architectures`, in lower case."""
    names = raw.get("architectures") or []
    return " ".join(str(name) for name in ([names] if isinstance(names, str) else names)).lower()


def _detect_block(opened: Checkpoint) -> Detected | None:
    """A block drafter of z-lab or deepseek-ai, whose tensor names could be taken for EAGLE's; None
    if it is neither. deepseek-ai's DFlash is its DSpark without Markov and confidence heads.

    Raises CheckpointError for block drafters that are not built.
    """
    raw = opened.config
    marks = f"{architectures_of(raw)} {raw.get('model_type')}".lower()
    if "dflash" not in marks and "dspark" not in marks:
        return None
    names = architectures_of(raw).split()
    size = raw.get("block_size") or part_of(raw, "dflash_config", str(opened.folder)).get(
        "block_size"
    )
    size = size if isinstance(size, int) and size > 1 else None
    if names in (["dflashdraftmodel"], ["dflash2draftmodel"]):
        method = names[0].removesuffix("draftmodel")
        return Detected(method=method, format=Z_LAB, num_speculative_tokens=size and size - 1)
    if names in (["qwen3dsparkmodel"], [GEMMA_ARCHITECTURE]):
        is_plain = not raw.get("markov_rank") and not raw.get("enable_confidence_head")
        method = "dflash" if is_plain else "dspark"
        return Detected(method=method, format=DEEPSPEC, num_speculative_tokens=size)
    raise CheckpointError(
        f"config.json of {str(opened.folder)!r}: architectures is {raw.get('architectures')!r}, "
        f"model_type {raw.get('model_type')!r}: a block drafter, which is not built; expected "
        f"{KNOWN}: choose another drafter"
    )


def _detect_consolidated(opened: Checkpoint) -> Detected | None:
    if "model.fc.weight" in opened.entries():  # eagle_linear in the file
        return Detected(method="eagle", format=CONSOLIDATED)
    return None


def _detect_eagle(opened: Checkpoint) -> Detected | None:
    """Tells EAGLE-1, EAGLE-3 and P-EAGLE apart in the format of EAGLE's authors, by the keys and
    tensors that only one of them has.
    """
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
    is_eagle3 = any(name.endswith("hidden_norm.weight") for name in names)
    return Detected(method="eagle3" if is_eagle3 else "eagle", format=AUTHORS)


@dataclass(slots=True, frozen=True, kw_only=True)
class Resolved:
    """Method, drafter, target and K of a run whose configuration chooses no method."""

    method: str
    drafter: str
    target: str
    num_speculative_tokens: int


def resolve(target: str, drafter: str | None) -> Resolved | None:
    """Method, drafter, target and K from the drafter's folder; None if there is no drafter.

    If `drafter` is None, the target's folder may hold one: MTP layers, or a speculators folder,
    whose verifier is then the target. Raises CheckpointError for a drafter's folder that holds no
    drafter, and for a target's folder with a drafter that names no verifier.
    """
    opened = open_draft(target if drafter is None else drafter)
    found = detect(opened)
    if found is None:
        if drafter is None:
            return None
        raise _no_drafter(opened, "")
    verified = target
    if drafter is None and found.format != TARGET_WITH_MTP:
        if found.verifier is None:
            raise CheckpointError(
                f"target {str(opened.folder)!r} is a drafter for method={found.method} "
                f"({found.format}) that names no target: give the target as target.checkpoint and "
                "this folder as method.checkpoint"
            )
        verified = found.verifier
    return Resolved(
        method=found.method,
        drafter=target if drafter is None else drafter,
        target=verified,
        num_speculative_tokens=found.num_speculative_tokens or DEFAULT_K[found.method],
    )


def check_method(opened: Checkpoint, method: str) -> Detected:
    """The folder's drafter, which must be one for `method`.

    Raises CheckpointError naming both methods. In the format of EAGLE's authors EAGLE-3 and P-EAGLE
    cannot always be told apart: either passes as the other, and loading reports what P-EAGLE lacks.
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
    """The error for a folder that holds no drafter. Raises the error about pickle files instead if
    the folder has no other weights: configs of EAGLE's authors need not name the method, which
    tensor names would then tell.
    """
    if any(file for pattern in PICKLES for file in opened.folder.glob(pattern)):
        opened.entries()
    return CheckpointError(
        f"{start}checkpoint {str(opened.folder)!r} (model_type "
        f"{opened.config.get('model_type')!r}) is no drafter; expected {KNOWN}: give one as "
        "method.checkpoint (a target is given as target.checkpoint)"
    )
