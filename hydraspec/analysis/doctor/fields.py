"""Variants of fields of a drafter's configuration. Fields that decide how a head is built cannot be
changed in the loaded head, so it is built again from its files with one field changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from hydraspec.analysis.doctor.patient import Raw
from hydraspec.analysis.doctor.variants import Family, Subject, Variant, edited, edited_trial
from hydraspec.errors import UserError

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
EPSILONS = (1e-6, 1e-5)  # of norms in released models
SCALES = (1.0, 2.5, 16.0)  # routed_scaling_factor of DeepSeek's releases
COUNTS = (1, 2, 3, 4, 6, 8)  # num_experts_per_tok
HEADS = (  # size and numbers of attention heads, whose products the weights fix
    ("head_dim", "num_attention_heads", "num_key_value_heads"),
    ("head_dim", "n_heads", "n_kv_heads"),
)
MOST_MASKS = 8  # tokens with unusual embeddings that are tried as P-EAGLE's mask


def config_fields(subject: Subject) -> Iterator[Variant]:
    """Other values of single fields; those with which the files cannot be loaded are left out."""
    patient = subject.patient
    if patient is None or subject.trial.head is not patient.speculator.head:
        return  # a repair of an earlier round is not in the files
    raw = patient.raw_config()
    for changed in other_values(_layers(raw)):
        name = next(iter(changed))
        try:
            head = patient.rebuilt(partial(_put, changed))
        except UserError:
            continue
        yield Variant(
            cause=name,
            says=f"{name} is {_layers(raw)[name]}",
            tried=", ".join(str(v) if k == name else f"{k} {v}" for k, v in changed.items()),
            remedy="; ".join(f"set {k} to {v}" for k, v in changed.items())
            + " in the drafter's configuration",
            trial=replace(subject.trial, head=head),
        )


def _put(changed: Raw, raw: Raw) -> None:
    _layers(raw).update(changed)


def _layers(raw: Raw) -> Raw:
    """The part of a configuration that describes decoder layers."""
    found: Raw = raw.get("transformer_layer_config") or raw.get("text_config") or raw
    return found


def other_values(layers: Raw) -> Iterator[Raw]:
    """Changed fields by name for each variant, given the fields that describe the layers."""

    def others(name: str, values: tuple[Any, ...]) -> Iterator[Raw]:
        now = layers.get(name)
        if now is not None:
            yield from ({name: value} for value in values if value != now)

    yield from others("hidden_act", ACTIVATIONS)
    yield from others("rope_interleave", (True, False))
    yield from others("norm_topk_prob", (True, False))
    yield from others("routed_scaling_factor", SCALES)
    yield from others("num_experts_per_tok", COUNTS)
    yield from others("rms_norm_eps", EPSILONS)
    yield from others("norm_eps", EPSILONS)
    for size, *counts in HEADS:
        if all(name in layers for name in (size, *counts)):
            yield {size: layers[size] // 2} | {name: layers[name] * 2 for name in counts}
            if all(layers[name] % 2 == 0 for name in counts):
                yield {size: layers[size] * 2} | {name: layers[name] // 2 for name in counts}


def mask_tokens(subject: Subject) -> Iterator[Variant]:
    """Other values of mask_token_id, in heads of P-EAGLE and blocks: special tokens, and tokens
    whose embedding norm is far from the median. The mask's embedding is trained at every place,
    others only where their token occurs, so its norm tends to differ.
    """
    head = subject.trial.head
    now = head.spec.mask_token_id
    if now is None or getattr(head, "mask_embedding", None) is not None:
        return
    norms = head.embedding.weight.float().norm(dim=1)[: subject.target.vocab_size]
    far = (norms - norms.median()).abs().argsort(descending=True)[:MOST_MASKS].tolist()
    special = [*range(MOST_MASKS // 2), subject.target.vocab_size - 1]
    for token in dict.fromkeys([*special, *far]):
        if token != now:
            spec = replace(head.spec, mask_token_id=token)
            yield Variant(
                cause="mask_token_id",
                says=f"rows of later drafts read token {now} as their mask",
                tried=str(token),
                remedy=f"set mask_token_id of the drafter's config.json to {token}",
                trial=edited_trial(subject.trial, edited(head, spec=spec)),
            )


def centroids(subject: Subject) -> Iterator[Variant]:
    """More clusters for an output projection that scores the tokens of the best clusters only
    (Gemma 4's assistants).
    """
    head = subject.trial.head
    part: Any = getattr(head, "centroids", None)
    if part is None:
        return
    for factor in (2, 4, 8):
        count = part.top_k * factor
        if count < part.count:
            other = edited(head, centroids=edited(part, top_k=count))
            yield Variant(
                cause="centroid_intermediate_top_k",
                says=f"the tokens of {part.top_k} of {part.count} centroids are scored",
                tried=str(count),
                remedy=f"set centroid_intermediate_top_k of its config.json to {count}",
                trial=edited_trial(subject.trial, other),
            )


FAMILIES: tuple[Family, ...] = (config_fields, mask_tokens, centroids)
