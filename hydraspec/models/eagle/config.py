"""Reads the config of an EAGLE-type draft head, from speculators, EAGLE's authors or Mistral.

loading.py checks it against the tensors and the target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hydraspec.errors import CheckpointError
from hydraspec.models.aux_states import ids_of_layer_outputs
from hydraspec.models.checkpoint.config_reader import ConfigReader
from hydraspec.models.checkpoint.reader import Checkpoint
from hydraspec.models.detect import (
    CONSOLIDATED,
    MASK_KEYS,
    SPECULATORS,
    Detected,
    architectures_of,
    check_method,
    part_of,
)
from hydraspec.models.kv_groups import SLIDING

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
UNCLEAR_AUX_KEY = "aux_hidden_state_layer_ids"  # published with both ways of counting layers
COMPUTED = {  # the only supported value of each key
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
}


@dataclass(slots=True, frozen=True, kw_only=True)
class EagleConfig:
    """An EAGLE-type draft head as its config describes it."""

    method: str  # eagle, eagle3 or peagle
    format: str
    layers: dict[str, Any]  # its decoder layers, as a Hugging Face config
    aux_layer_ids: tuple[int, ...] | None = None  # None: the default for the target's depth
    num_aux: int | None = None  # where stated
    use_aux: bool = True  # else its input is the target's final hidden state, without fc
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False  # the state that the next draft step reads is normed
    keeps_input_norm: bool = True  # EAGLE-1: layer 0 has an input norm
    final_norm: bool = True  # EAGLE-1: a final norm precedes lm_head
    target_hidden_size: int | None = None
    draft_vocab_size: int | None = None
    mask_token_id: int | None = None
    logit_scale: float = 1.0
    verifier: str | None = None  # the target it was trained for
    notes: tuple[str, ...] = ()


def read_eagle(opened: Checkpoint, method: str) -> EagleConfig:
    """The config of a folder that must hold a head for `method` (eagle, eagle3 or peagle).

    Raises CheckpointError for a drafter of another method, keys that contradict each other, and
    missing keys that have no default.
    """
    found = check_method(opened, method)
    if found.format == CONSOLIDATED:
        return EagleConfig(
            method=method,
            format=found.format,
            layers=opened.config,
            norm_output=True,
        )
    read = _read_eagle1 if method == "eagle" else _read_eagle3
    return replace(read(opened, method, found), verifier=found.verifier)


# ------------------------------------------------------------------ EAGLE-3 and P-EAGLE


def _read_eagle3(opened: Checkpoint, method: str, found: Detected) -> EagleConfig:
    raw, where, form = opened.config, str(opened.folder), found.format
    nested = part_of(raw, "eagle_config", where)
    layers = _layers(raw if form != SPECULATORS else _nested(raw, where))
    _refuse_uncomputed(raw, nested, layers, where)

    def flag(key: str, default: bool = False) -> bool:
        value = _flag(key, raw, nested, where)
        return default if value is None else value

    ids, notes = _aux_layer_ids(raw, nested, where)
    norms_residual = _flag("norm_before_residual", raw, nested, where)
    if norms_residual is None:
        norms_residual, note = _silent_norm(form, method, raw, where)
        notes += (note,)
    config = EagleConfig(
        method=method,
        format=form,
        layers=layers,
        aux_layer_ids=ids,
        num_aux=_stated_count(raw, nested, where),
        use_aux=flag("use_aux_hidden_state", True),
        norm_before_fc=flag("norm_before_fc"),
        fc_norm=flag("fc_norm"),
        norm_before_residual=norms_residual,
        norm_output=flag("norm_output"),
        target_hidden_size=_count(raw, "target_hidden_size", where),
        draft_vocab_size=_count(raw, "draft_vocab_size", where),
        notes=notes,
    )
    if config.norm_before_fc and config.fc_norm:
        raise CheckpointError(
            f"config.json of {where!r}: norm_before_fc and fc_norm are both true; expected at most "
            "one, since each norms what enters fc: mend the config"
        )
    return config if method == "eagle3" else _with_mask(config, raw, where)


def _flag(key: str, raw: dict[str, Any], nested: dict[str, Any], where: str) -> bool | None:
    """A flag, top level or under eagle_config; None where it is absent or null in both."""
    top, under = raw.get(key), nested.get(key)
    if top is not None and under is not None and top != under:
        raise CheckpointError(
            f"config.json of {where!r} contradicts itself: {key} is {top!r}, eagle_config.{key} is "
            f"{under!r}; expected the same in both: mend the config"
        )
    value = under if top is None else top
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(
            f"config.json of {where!r}: {key} is {value!r}; expected true or false: mend the config"
        )
    return value


def _silent_norm(form: str, method: str, raw: dict[str, Any], where: str) -> tuple[bool, str]:
    """norm_before_residual of a config without it, and a note about that: the default of vLLM's
    loader (ADR 17). The class that writes speculators folders has another default for eagle3 only.
    """
    value, why = False, "as vLLM and the code of EAGLE's authors compute it"
    if form == SPECULATORS:
        why = "the default of vLLM's loader and of the class that writes the format"
    if form == SPECULATORS and method == "eagle3":
        value = "norm_before_residual" not in raw
        why = "as vLLM's loader reads null"
        if value:
            why = (
                "vLLM's default; the class that writes the format would take false: if acceptance "
                "is low, add norm_before_residual to its config.json"
            )
    taken = str(value).lower()
    return value, f"drafter {where!r} does not say norm_before_residual; taken as {taken}, {why}"


def _refuse_uncomputed(
    raw: dict[str, Any], nested: dict[str, Any], layers: dict[str, Any], where: str
) -> None:
    for key, computed in COMPUTED.items():
        value = _flag(key, raw, nested, where)
        if value not in (None, computed):
            raise CheckpointError(
                f"config.json of {where!r}: {key} is {str(value).lower()}; expected "
                f"{str(computed).lower()} or nothing, since no other head is computed: choose "
                "another drafter"
            )
    for name, source in (("", raw), ("eagle_config.", nested), ("layers' ", layers)):
        scale = source.get("logit_scale")
        if scale not in (None, 1):
            raise CheckpointError(
                f"config.json of {where!r}: {name}logit_scale is {scale!r}; expected 1 or nothing, "
                "since EAGLE-3 heads are computed without it: choose another drafter"
            )


def _with_mask(config: EagleConfig, raw: dict[str, Any], where: str) -> EagleConfig:
    """The config with P-EAGLE's mask token: mask_token_id in speculators folders, pard_token in
    PARD's, ptd_token_id or dflash_config.mask_token_id in others.
    """
    spelt = {key: raw[key] for key in MASK_KEYS if raw.get(key) is not None}
    inner = part_of(raw, "dflash_config", where).get("mask_token_id")
    if inner is not None:
        spelt["dflash_config.mask_token_id"] = inner
    if not spelt:
        raise CheckpointError(
            f"config.json of {where!r} names no mask token; method=peagle needs one of "
            f"{', '.join(MASK_KEYS)}, dflash_config.mask_token_id: {unmasked_remedy(config)}"
        )
    if len({str(value) for value in spelt.values()}) > 1:
        both = ", ".join(f"{key} {value}" for key, value in spelt.items())
        raise CheckpointError(
            f"config.json of {where!r} names several mask tokens: {both}; expected one: mend the "
            "config"
        )
    key, value = next(iter(spelt.items()))
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CheckpointError(
            f"config.json of {where!r}: {key} is {value!r}; expected a token id, 0 or more"
        )
    return replace(config, mask_token_id=value)


def unmasked_remedy(config: EagleConfig) -> str:
    """The remedy that errors name for a P-EAGLE head without mask token or mask state. A folder in
    the speculators format runs with no other method.
    """
    if config.format == SPECULATORS:
        return "download it again, or choose another drafter"
    return "use method=eagle3 if the head was not trained for parallel drafting"


def _aux_layer_ids(
    raw: dict[str, Any], nested: dict[str, Any], where: str
) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Aux layer ids (the target's states after that many layers), and notes on configs that are
    ambiguous. An empty list counts as absent.
    """
    under = f"eagle_config.{AUX_KEY}"
    spelt: dict[str, tuple[int, ...]] = {}
    for name, source in ((AUX_KEY, raw), (under, nested)):
        unclear = source.get(UNCLEAR_AUX_KEY)
        if unclear:
            raise CheckpointError(
                f"config.json of {where!r}: {name.replace(AUX_KEY, UNCLEAR_AUX_KEY)} is "
                f"{unclear!r}, which does not say how layers are counted; expected {AUX_KEY} "
                "(states after that many layers) or target_layer_ids (outputs of layers, counted "
                "from 0): rename it to the one that is meant"
            )
        if source.get(AUX_KEY) not in (None, []):
            spelt[name] = _ids(source[AUX_KEY], name, where)
    dflash = part_of(raw, "dflash_config", where)
    outputs = (
        ("dflash_config.target_layer_ids", dflash.get("target_layer_ids")),
        ("dspark_target_layer_ids", raw.get("dspark_target_layer_ids")),
        ("target_layer_ids", raw.get("target_layer_ids")),
    )
    for name, value in outputs:
        if value not in (None, []):
            spelt[name] = ids_of_layer_outputs(_ids(value, name, where))
    if len(set(spelt.values())) > 1:
        both = ", ".join(f"{name} means {list(ids)}" for name, ids in spelt.items())
        raise CheckpointError(
            f"config.json of {where!r} contradicts itself, counted as states after layers: {both}; "
            "expected the same in all: mend the config"
        )
    ids = next(iter(spelt.values()), None)
    if ids is None or ids[0] != 1 or set(spelt) != {under}:
        return ids, ()
    other = list(ids_of_layer_outputs(ids))
    note = (
        f"drafter {where!r}: {under} {list(ids)} is read as the target's states after that many "
        "layers. Some tools count outputs of layers from 0 instead, and start with 1: if "
        f"acceptance is low, add {AUX_KEY} {other} at the top level and remove the nested list"
    )
    return ids, (note,)


def _ids(value: object, name: str, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or any(
        not isinstance(i, int) or isinstance(i, bool) for i in value
    ):
        raise CheckpointError(
            f"config.json of {where!r}: {name} is {value!r}; expected a list of layer numbers: "
            "mend the config"
        )
    return tuple(value)


def _stated_count(raw: dict[str, Any], nested: dict[str, Any], where: str) -> int | None:
    for key in ("num_aux_hidden_states", "num_aux_layers"):
        for source in (raw, nested):
            count = _count(source, key, where)
            if count is not None:
                return count
    return None


# ------------------------------------------------------------------ EAGLE-1


def _read_eagle1(opened: Checkpoint, method: str, found: Detected) -> EagleConfig:
    """EAGLE-1. Mistral's heads keep layer 0's input norm and the final norm; all others have
    neither (cnets.py of the authors' code), since the target's state is normed already.
    """
    raw, where, form = opened.config, str(opened.folder), found.format
    if form == SPECULATORS:
        if raw.get("layernorms"):
            raise CheckpointError(
                f"config.json of {where!r}: layernorms is true (HASS); method=eagle reads heads "
                "without extra norms: use an eagle3 head"
            )
        layers = _layers(_nested(raw, where))
    else:
        inner = raw.get("model")
        layers = {**raw, **inner} if isinstance(inner, dict) else raw
    is_mistral = layers.get("model_type") == "mistral" or "mistral" in architectures_of(raw)
    return EagleConfig(
        method=method,
        format=form,
        layers=layers,
        keeps_input_norm=is_mistral,
        final_norm=is_mistral,
        norm_output=is_mistral,
        logit_scale=ConfigReader(raw, where).number("logit_scale", 1.0),
    )


# ------------------------------------------------------------------ layers and counts


def _nested(raw: dict[str, Any], where: str) -> dict[str, Any]:
    layers = raw.get("transformer_layer_config")
    if not isinstance(layers, dict):
        raise CheckpointError(
            f"config.json of {where!r} has no transformer_layer_config; expected the config of the "
            "head's layers: download it again"
        )
    return layers


def _layers(raw: dict[str, Any]) -> dict[str, Any]:
    """The config of a draft head's decoder layers. Llama layers with a sliding window are read as
    Mistral's, which compute the same. Of rotary parameters per layer type, the sliding ones apply.
    """
    layers = dict(raw)
    rope = layers.get("rope_parameters")
    if isinstance(rope, dict) and SLIDING in rope:
        layers["rope_parameters"] = rope[SLIDING]
    kinds = layers.get("layer_types")
    if layers.get("model_type") == "llama" and isinstance(kinds, list) and SLIDING in kinds:
        heads = layers.get("num_attention_heads")
        layers = {"num_key_value_heads": heads} | layers | {"model_type": "mistral"}
    return layers


def _count(source: dict[str, Any], key: str, where: str) -> int | None:
    return None if source.get(key) is None else ConfigReader(source, where).count(key)
