"""An EAGLE-type head's config, read raw: as speculators, EAGLE's authors and Mistral write it.

Yields plain facts; whether they fit tensors and target is checked where both are known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hydraspec.errors import CheckpointError
from hydraspec.models.aux_states import ids_of_layer_outputs
from hydraspec.models.checkpoint import Checkpoint
from hydraspec.models.config_reader import ConfigReader
from hydraspec.models.detect import CONSOLIDATED, MASK_KEYS, SPECULATORS, check_method
from hydraspec.models.gemma4_config import SLIDING

AUX_KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(slots=True, frozen=True, kw_only=True)
class EagleConfig:
    """What a config says of an EAGLE-type head."""

    method: str  # eagle, eagle3 or peagle
    format: str
    layers: dict[str, Any]  # its decoder layers, as a Hugging Face config
    aux_layer_ids: tuple[int, ...] | None = None  # None: the default for the target's depth
    num_aux: int | None = None  # where stated
    use_aux: bool = True  # else the target's final state enters, without fc
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False  # what is fed back has passed the final norm
    keeps_input_norm: bool = True  # EAGLE-1: layer 0 has its input norm
    final_norm: bool = True  # EAGLE-1: a norm stands before the head
    target_hidden_size: int | None = None
    draft_vocab_size: int | None = None
    mask_token_id: int | None = None
    logit_scale: float = 1.0
    notes: tuple[str, ...] = ()


def read_eagle(opened: Checkpoint, method: str) -> EagleConfig:
    """The config of a folder that must hold a head for `method` (eagle, eagle3 or peagle).

    Raises CheckpointError: another drafter, contradicting keys, or a key missing that nothing
    stands in for.
    """
    found = check_method(opened, method)
    if found.format == CONSOLIDATED:
        return EagleConfig(
            method=method,
            format=found.format,
            layers=opened.config,
            norm_output=True,
        )
    if method == "eagle":
        return _read_eagle1(opened, found.format)
    return _read_eagle3(opened, method, found.format)


# ------------------------------------------------------------------ EAGLE-3 and P-EAGLE


def _read_eagle3(opened: Checkpoint, method: str, form: str) -> EagleConfig:
    raw, where = opened.config, str(opened.folder)
    nested = raw.get("eagle_config") or {}

    def flag(key: str, default: bool = False) -> bool:
        value = raw.get(key, nested.get(key, default))
        if not isinstance(value, bool):
            raise CheckpointError(
                f"config.json of {where!r}: {key} is {value!r}; expected true or false"
            )
        return value

    ids = _aux_layer_ids(raw, nested, where)
    config = EagleConfig(
        method=method,
        format=form,
        layers=_layers(raw if form != SPECULATORS else _nested(raw, where)),
        aux_layer_ids=ids,
        num_aux=_stated_count(raw, nested, where),
        use_aux=flag("use_aux_hidden_state", True),
        norm_before_fc=flag("norm_before_fc"),
        fc_norm=flag("fc_norm"),
        norm_before_residual=flag("norm_before_residual"),
        norm_output=flag("norm_output"),
        target_hidden_size=_count(raw, "target_hidden_size", where),
        draft_vocab_size=_count(raw, "draft_vocab_size", where),
    )
    if config.norm_before_fc and config.fc_norm:
        raise CheckpointError(
            f"config.json of {where!r}: norm_before_fc and fc_norm are both true; expected at most "
            "one, since each norms what enters fc: mend the config"
        )
    if form == SPECULATORS and "norm_before_residual" not in raw:
        note = (
            f"drafter {where!r} does not say norm_before_residual; taken as false, the default of "
            "the class that writes the format"
        )
        config = replace(config, notes=(note,))
    return config if method == "eagle3" else _with_mask(config, raw, where)


def _with_mask(config: EagleConfig, raw: dict[str, Any], where: str) -> EagleConfig:
    """P-EAGLE's mask token: speculators says mask_token_id, PARD pard_token, others ptd_token_id or
    dflash_config.mask_token_id.
    """
    spelt = {key: raw[key] for key in MASK_KEYS if raw.get(key) is not None}
    inner = (raw.get("dflash_config") or {}).get("mask_token_id")
    if inner is not None:
        spelt["dflash_config.mask_token_id"] = inner
    if not spelt:
        raise CheckpointError(
            f"config.json of {where!r} names no mask token; method=peagle needs one of "
            f"{', '.join(MASK_KEYS)}, dflash_config.mask_token_id: use method=eagle3 if the head "
            "was not trained for parallel drafting"
        )
    if len({str(value) for value in spelt.values()}) > 1:
        both = ", ".join(f"{key} {value}" for key, value in spelt.items())
        raise CheckpointError(f"config.json of {where!r} names several mask tokens: {both}")
    key, value = next(iter(spelt.items()))
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CheckpointError(
            f"config.json of {where!r}: {key} is {value!r}; expected a token id, 0 or more"
        )
    return replace(config, mask_token_id=value)


def _aux_layer_ids(
    raw: dict[str, Any], nested: dict[str, Any], where: str
) -> tuple[int, ...] | None:
    spelt: dict[str, tuple[int, ...]] = {}
    for name, source in ((AUX_KEY, raw), (f"eagle_config.{AUX_KEY}", nested)):
        if source.get(AUX_KEY) is not None:
            spelt[name] = _ids(source[AUX_KEY], name, where)
    dflash = raw.get("dflash_config") or {}
    outputs = (
        ("dflash_config.target_layer_ids", dflash.get("target_layer_ids")),
        ("target_layer_ids", raw.get("target_layer_ids")),
    )
    for name, value in outputs:
        if value is not None:
            spelt[name] = ids_of_layer_outputs(_ids(value, name, where))
    if len(set(spelt.values())) > 1:
        both = ", ".join(f"{name} means {list(ids)}" for name, ids in spelt.items())
        raise CheckpointError(
            f"config.json of {where!r} contradicts itself, counted as states after layers: {both}"
        )
    return next(iter(spelt.values()), None)


def _ids(value: object, name: str, where: str) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or not value
        or any(not isinstance(i, int) or isinstance(i, bool) for i in value)
    ):
        raise CheckpointError(
            f"config.json of {where!r}: {name} is {value!r}; expected a list of layer numbers"
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


def _read_eagle1(opened: Checkpoint, form: str) -> EagleConfig:
    """EAGLE-1. Mistral's heads keep layer 0's input norm and the final norm; all others have
    neither (cnets.py of the authors' code), since the target's state is normed already.
    """
    raw, where = opened.config, str(opened.folder)
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
    architectures = " ".join(raw.get("architectures") or []).lower()
    is_mistral = layers.get("model_type") == "mistral" or "mistral" in architectures
    return EagleConfig(
        method="eagle",
        format=form,
        layers=layers,
        keeps_input_norm=is_mistral,
        final_norm=is_mistral,
        norm_output=is_mistral,
        logit_scale=float(raw.get("logit_scale") or 1.0),
    )


# ------------------------------------------------------------------ parts


def _nested(raw: dict[str, Any], where: str) -> dict[str, Any]:
    layers = raw.get("transformer_layer_config")
    if not isinstance(layers, dict):
        raise CheckpointError(
            f"config.json of {where!r} has no transformer_layer_config; expected the config of the "
            "head's layers: download it again"
        )
    return layers


def _layers(raw: dict[str, Any]) -> dict[str, Any]:
    """The config of a head's decoder layers. A Llama layer with a window is read as a Mistral one,
    which is the same; of rotary parameters per kind of layer, the sliding ones' are taken.
    """
    layers = dict(raw)
    rope = layers.get("rope_parameters") or {}
    if "sliding_attention" in rope:
        layers["rope_parameters"] = rope["sliding_attention"]
    kinds = layers.get("layer_types") or []
    if layers.get("model_type") == "llama" and SLIDING in kinds:
        heads = layers.get("num_attention_heads")
        layers = {"num_key_value_heads": heads} | layers | {"model_type": "mistral"}
    return layers


def _count(source: dict[str, Any], key: str, where: str) -> int | None:
    return None if source.get(key) is None else ConfigReader(source, where).count(key)
