"""Faults planted in the zoo's block drafters; see planted_faults.py."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

from planted_faults import Fault, Files

from hydraspec.analysis.doctor.blocks import Unnormed
from hydraspec.speculators.teacher_forcing.trial import Trial

PAIRS = (
    ("tiny_qwen3", "dflash"),
    ("tiny_qwen3", "dspark"),
    ("tiny_qwen3", "dflash2"),
    ("tiny_gemma4", "dflash"),
    ("tiny_gemma4", "dspark"),
)
METHODS = ("dflash", "dspark", "dflash2")
OTHER_MASK = 40  # an ordinary word; the zoo's heads have 0


def keys(f: Files) -> dict[str, Any]:
    """The object of the config that holds a block's own keys."""
    found: dict[str, Any] = f.config.get("dflash_config", f.config)
    return found


def other_mask(f: Files) -> None:
    keys(f)["mask_token_id"] = OTHER_MASK


def layer_ids(f: Files) -> list[int]:
    place = keys(f)
    name = "target_layer_ids" if "target_layer_ids" in place else "aux_hidden_state_layer_ids"
    found: list[int] = place[name]
    return found


def later_layers(f: Files) -> None:
    layer_ids(f)[:] = [i + 1 for i in layer_ids(f)]


def earlier_layers(f: Files) -> None:
    layer_ids(f)[:] = [i - 1 for i in layer_ids(f)]


def reversed_layers(f: Files) -> None:
    layer_ids(f).reverse()


def causal(f: Files) -> bool:
    """Where the format has a key."""
    if "dflash_config" in f.config:
        f.config["dflash_config"]["causal"] = True
        return True
    return False


def other_anchor(f: Files) -> bool:
    """Where the format has a key."""
    if f.config["architectures"] == ["Qwen3DSparkModel"]:
        return False
    place = keys(f)
    place["sample_from_anchor"] = not place.get("sample_from_anchor", False)
    return True


def larger_theta(f: Files) -> None:
    layers = f.config.get("transformer_layer_config", f.config)
    place = layers if "rope_theta" in layers else layers["rope_parameters"]
    place["rope_theta"] *= 1000


def causal_blocks(trial: Trial) -> Trial:
    head = copy(trial.head)
    head.config = replace(head.config, is_causal=True, is_sliding_causal=True)
    return replace(trial, head=head)


def skipped_norm(trial: Trial) -> Trial:
    head = copy(trial.head)
    head.hidden_norm = Unnormed(head.hidden_norm)
    return replace(trial, head=head)


FAULTS = (
    Fault("another mask token", ("mask_token_id",), METHODS, other_mask),
    Fault("target layers + 1", ("aux_layer_ids",), METHODS, later_layers),
    Fault("target layers - 1", ("aux_layer_ids",), METHODS, earlier_layers),
    Fault("reversed target layers", ("aux_order", "block_order"), METHODS, reversed_layers),
    Fault("causal in the config", ("is_causal",), METHODS, causal),
    Fault("causal blocks", ("is_causal",), METHODS, fed=causal_blocks),
    Fault("hidden_norm left out", ("hidden_norm",), METHODS, fed=skipped_norm),
    Fault("rows draft for another place", ("sample_from_anchor",), METHODS, other_anchor),
    Fault(
        "block a position late",
        ("block_positions",),
        METHODS,
        fed=lambda trial: replace(trial, step_gap=1),
    ),
    Fault(
        "block a position early",
        ("block_positions",),
        METHODS,
        fed=lambda trial: replace(trial, step_gap=-1),
    ),
    Fault(
        "features of the token before",
        ("state_shift",),
        METHODS,
        fed=lambda trial: replace(trial, state_shift=-1),
    ),
    Fault("rope_theta x 1000", ("rope_theta",), METHODS, larger_theta),
)
