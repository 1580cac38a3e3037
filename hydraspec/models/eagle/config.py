"""Reads the config of an EAGLE-type draft head, from speculators, EAGLE's authors or Mistral.

loading.py checks it against the tensors and the target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hydraspec.errors import CheckpointError
from hydraspec.models.aux_states import ids_of_layer_outputs
from hydraspec.models.checkpoint.config_reader import ConfigReader, text_part
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
from hydraspec.models.draft_families import FamilyName, plain_gemma_layers
from hydraspec.models.kv_groups import SLIDING

PARTS = ("eagle_config", "dflash_config")  # objects whose keys are read by their paths
AUX_KEY = "eagle_aux_hidden_state_layer_ids"
UNCLEAR_AUX_KEY = "aux_hidden_state_layer_ids"  # published with both ways of counting layers
GEMMA_ARCHITECTURE = "gemma4eagle3model"
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
    family: FamilyName = "dense"  # of its layers
    aux_layer_ids: tuple[int, ...] | None = None  # None: the default for the target's depth
    num_aux: int | None = None  # number of aux states, if the config states it
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
    softcap: float | None = None  # of the logits
    verifier: str | None = None  # the target it was trained for
    supports_mm_inputs: bool = False  # see DraftSpec
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
    return replace(
        read(opened, method, found),
        verifier=found.verifier,
        supports_mm_inputs=_supports_mm_inputs(opened),
    )


def _supports_mm_inputs(opened: Checkpoint) -> bool:
    """The key of that name, which heads that were trained on images carry; absent: false."""
    where, name = str(opened.folder), PARTS[0]
    part = part_of(opened.config, name, where)
    paths = {f"{name}.{key}": value for key, value in part.items()}
    return bool(ConfigReader(opened.config | paths, where).flag(*_everywhere("supports_mm_inputs")))


# ------------------------------------------------------------------ EAGLE-3 and P-EAGLE


def _read_eagle3(opened: Checkpoint, method: str, found: Detected) -> EagleConfig:
    raw, where = opened.config, str(opened.folder)
    nested = {name: part_of(raw, name, where) for name in PARTS}
    paths = {f"{name}.{key}": part[key] for name, part in nested.items() for key in part}
    keys = ConfigReader(raw | paths, where)
    if architectures_of(raw) == GEMMA_ARCHITECTURE:
        return _read_gemma(keys, found)
    layers = _layers(raw if found.format != SPECULATORS else _nested(keys))
    _refuse_uncomputed(keys, layers)
    ids, notes = _aux_layer_ids(keys)
    norms_residual = keys.flag(*_everywhere("norm_before_residual"))
    if norms_residual is None:
        norms_residual, note = _silent_norm(found.format, method, raw, where)
        notes += (note,)
    config = EagleConfig(
        method=method,
        format=found.format,
        layers=layers,
        aux_layer_ids=ids,
        num_aux=keys.optional_count(*_everywhere("num_aux_hidden_states", "num_aux_layers")),
        use_aux=keys.flag(*_everywhere("use_aux_hidden_state")) is not False,
        norm_before_fc=bool(keys.flag(*_everywhere("norm_before_fc"))),
        fc_norm=bool(keys.flag(*_everywhere("fc_norm"))),
        norm_before_residual=norms_residual,
        norm_output=bool(keys.flag(*_everywhere("norm_output"))),
        target_hidden_size=keys.optional_count("target_hidden_size"),
        draft_vocab_size=keys.optional_count("draft_vocab_size"),
        notes=notes,
    )
    if config.norm_before_fc and config.fc_norm:
        raise CheckpointError(
            f"config.json of {where!r}: norm_before_fc and fc_norm are both true; expected at most "
            "one, since each norms what enters fc: mend the config"
        )
    return config if method == "eagle3" else _with_mask(config, keys)


def _read_gemma(keys: ConfigReader, found: Detected) -> EagleConfig:
    """deepseek-ai's Gemma4Eagle3Model: one Gemma 4 layer, scaled embedding and soft cap as their
    target has them."""
    if keys.count("num_hidden_layers") != 1:
        raise keys.fail("num_hidden_layers", "1, since no deeper head is computed")
    ids, notes = _aux_layer_ids(keys)
    cap = "final_logit_softcapping"
    return EagleConfig(
        method=found.method,
        format=found.format,
        layers=plain_gemma_layers(keys),
        family="gemma4",
        aux_layer_ids=ids,
        softcap=keys.number(cap) if keys.get(cap) is not None else None,
        notes=notes,
    )


def _everywhere(*names: str) -> list[str]:
    """Paths of keys: each name at the top level, then the same name under eagle_config."""
    return [path for name in names for path in (name, f"eagle_config.{name}")]


def _silent_norm(form: str, method: str, raw: dict[str, Any], where: str) -> tuple[bool, str]:
    """The value of norm_before_residual for a config that does not give it: the default of vLLM's
    loader (ADR 17); and a note for the user. The class that writes speculators folders has another
    default for eagle3 only.
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


def _refuse_uncomputed(keys: ConfigReader, layers: dict[str, Any]) -> None:
    for key, computed in COMPUTED.items():
        if keys.flag(*_everywhere(key)) not in (None, computed):
            name = next(name for name in _everywhere(key) if keys.get(name) is not None)
            raise keys.fail(
                name,
                f"{str(computed).lower()} or nothing, since no other head is computed: choose "
                "another drafter",
            )
    of_layers = ConfigReader({"layers' logit_scale": layers.get("logit_scale")}, keys.where)
    for source, names in ((keys, _everywhere("logit_scale")), (of_layers, of_layers.values)):
        for name in names:
            if source.get(name, 1) != 1:
                raise source.fail(
                    name,
                    "1 or nothing, since EAGLE-3 heads are computed without it: choose another "
                    "drafter",
                )


def _with_mask(config: EagleConfig, keys: ConfigReader) -> EagleConfig:
    """The config with P-EAGLE's mask token: mask_token_id in speculators folders, pard_token in
    PARD's, ptd_token_id or dflash_config.mask_token_id in others.
    """
    names = (*MASK_KEYS, "dflash_config.mask_token_id")
    spelt = {key: keys.get(key) for key in names if keys.get(key) is not None}
    if not spelt:
        raise CheckpointError(
            f"config.json of {keys.where!r} names no mask token; method=peagle needs one of "
            f"{', '.join(names)}: {unmasked_remedy(config)}"
        )
    if len({str(value) for value in spelt.values()}) > 1:
        both = ", ".join(f"{key} {value}" for key, value in spelt.items())
        raise CheckpointError(
            f"config.json of {keys.where!r} names several mask tokens: {both}; expected one: mend "
            "the config"
        )
    return replace(config, mask_token_id=keys.count(next(iter(spelt)), least=0))


def unmasked_remedy(config: EagleConfig) -> str:
    """The remedy that errors name for a P-EAGLE head without mask token or mask state. A folder in
    the speculators format runs with no other method.
    """
    if config.format == SPECULATORS:
        return "download it again, or choose another drafter"
    return "use method=eagle3 if the head was not trained for parallel drafting"


def _aux_layer_ids(keys: ConfigReader) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Aux layer ids (the target's states after that many layers), and notes on configs that are
    ambiguous. An empty list counts as absent.
    """
    for name in _everywhere(UNCLEAR_AUX_KEY):
        if keys.get(name):
            raise keys.fail(
                name,
                f"{AUX_KEY} (states after that many layers) or target_layer_ids (outputs of "
                "layers, counted from 0), since this name is used for both: rename it",
            )
    states = _everywhere(AUX_KEY)
    outputs = ("dflash_config.target_layer_ids", "dspark_target_layer_ids", "target_layer_ids")
    spelt = {name: keys.get(name) for name in (*states, *outputs)}
    spelt = {name: _ids(keys, name) for name, value in spelt.items() if value not in (None, [])}
    for name in spelt.keys() & set(outputs):
        spelt[name] = ids_of_layer_outputs(spelt[name])
    if len(set(spelt.values())) > 1:
        both = ", ".join(f"{name} means {list(ids)}" for name, ids in spelt.items())
        raise CheckpointError(
            f"config.json of {keys.where!r} contradicts itself, counted as states after layers: "
            f"{both}; expected the same in all: mend the config"
        )
    ids, under = next(iter(spelt.values()), None), states[1]
    if ids is None or ids[0] != 1 or set(spelt) != {under}:
        return ids, ()
    other = list(ids_of_layer_outputs(ids))
    note = (
        f"drafter {keys.where!r}: {under} {list(ids)} is read as the target's states after that "
        "many layers. Some tools count outputs of layers from 0 instead, and start with 1: if "
        f"acceptance is low, add {AUX_KEY} {other} at the top level and remove the nested list"
    )
    return ids, (note,)


def _ids(keys: ConfigReader, name: str) -> tuple[int, ...]:
    value = keys.get(name)
    if not isinstance(value, list) or any(type(i) is not int for i in value):
        raise keys.fail(name, "a list of layer numbers: mend the config")
    return tuple(value)


# ------------------------------------------------------------------ EAGLE-1


def _read_eagle1(opened: Checkpoint, method: str, found: Detected) -> EagleConfig:
    """The config of an EAGLE-1 head. Mistral's heads keep layer 0's input norm and the final norm;
    all others have neither (cnets.py of the authors' code), since the target's state is normed
    already.
    """
    raw, keys = opened.config, ConfigReader(opened.config, str(opened.folder))
    if found.format == SPECULATORS:
        if raw.get("layernorms"):
            raise keys.fail(
                "layernorms",
                "false: heads with extra norms (HASS) are not read: use an eagle3 head",
            )
        layers = _layers(_nested(keys))
    else:
        inner = raw.get("model")
        layers = {**raw, **inner} if isinstance(inner, dict) else raw
    kind = text_part(layers).get("model_type")
    is_mistral = kind in ("mistral", "ministral3") or "mistral" in architectures_of(raw)
    return EagleConfig(
        method=method,
        format=found.format,
        layers=layers,
        keeps_input_norm=is_mistral,
        final_norm=is_mistral,
        norm_output=is_mistral,
        logit_scale=keys.number("logit_scale", 1.0),
    )


# ------------------------------------------------------------------ layers and counts


def _nested(keys: ConfigReader) -> dict[str, Any]:
    layers = keys.get("transformer_layer_config")
    if not isinstance(layers, dict):
        raise keys.fail(
            "transformer_layer_config", "the config of the head's layers: download it again"
        )
    return layers


def _layers(raw: dict[str, Any]) -> dict[str, Any]:
    """The config of a draft head's decoder layers. Llama layers with a sliding window are read as
    Mistral's, which compute the same. If rotary parameters are given per layer type, those of
    sliding layers are taken.
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
