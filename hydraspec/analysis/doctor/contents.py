"""Variants of a head's own weights and flags: norms on or off, order and sign of the blocks of its
first projections, vocabulary map, rotary base, and weight layouts that converters get wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from copy import copy
from functools import partial
from typing import Any

import torch
from hydraspec_kernels.rope import Frequencies, mirrored

from hydraspec.analysis.doctor.parts import weights_of
from hydraspec.analysis.doctor.variants import (
    Family,
    Matrix,
    Subject,
    Variant,
    decoder_layers,
    edited,
    edited_trial,
    swapped_gate,
    unit_norm,
    with_combine,
    with_layers,
    with_mask_state,
    with_norm_weight,
)
from hydraspec.models.attention import Attention
from hydraspec.models.checkpoint.mistral_names import half_split, interleaved
from hydraspec.models.layers import Norm
from hydraspec.speculators.teacher_forcing.trial import Trial

THETAS = (1e4, 5e5, 1e6)  # rope_theta of released models
FACTORS = (1e3, 1e2, 1e-2, 1e-3)  # times the configured rope_theta
CONVERT = "the converter that wrote the drafter's files is wrong here: convert again"


# ------------------------------------------------------------------ projections


def entry_matrices(trial: Trial) -> Iterator[Matrix]:
    """The first projections of a head: their input is a concatenation of equally wide blocks, such
    as token embedding and target state.
    """
    head, pair = trial.head, ("embedding", "state")
    if trial.kind == "target_cache":
        yield Matrix(name="pre_projection", blocks=pair, trial=trial, path=("pre",))
    elif hasattr(head, "blocks"):
        layer = head.layers[0]
        name, blocks = layer.layout.projection, pair[:: layer.order]
        yield Matrix(name=name, blocks=blocks, trial=trial, path=("layers", 0, "projection"))
    elif trial.kind == "block":
        if len(trial.aux_ids) <= 4:
            states = tuple(f"aux {i}" for i in range(len(trial.aux_ids)))
            yield Matrix(name="fc", blocks=states, trial=trial, path=("fc",))
    elif head.fc is not None:
        yield Matrix(name="fc", blocks=pair, trial=trial, path=("fc",))
    else:
        if head.combine is not None and len(trial.aux_ids) <= 4:
            states = tuple(f"aux {i}" for i in range(len(trial.aux_ids)))
            yield Matrix(name="fc", blocks=states, trial=trial, path=("combine", "fc"))
        name, path = "layer 0's q, k and v", ("first", "attention", "qkv")
        yield Matrix(name=name, blocks=pair, trial=trial, path=path)


def block_order(subject: Subject) -> Iterator[Variant]:
    """Every other order of the blocks of each first projection."""
    for matrix in entry_matrices(subject.trial):
        count = len(matrix.blocks)
        straight = tuple(range(count))
        for order in itertools.permutations(straight):
            if order == straight:
                continue
            found = ", ".join(matrix.blocks[i] for i in order)
            yield Variant(
                cause="block_order",
                says=f"{matrix.name} reads its blocks as {', '.join(matrix.blocks)}",
                tried=found,
                remedy=CONVERT,
                trial=matrix.arranged(order, (1,) * count),
            )


def block_signs(subject: Subject) -> Iterator[Variant]:
    """Every choice of negated blocks of each first projection."""
    for matrix in entry_matrices(subject.trial):
        count = len(matrix.blocks)
        for signs in itertools.product((1, -1), repeat=count):
            if min(signs) > 0:
                continue
            turned = [name for name, sign in zip(matrix.blocks, signs, strict=True) if sign < 0]
            what = "all of it" if len(turned) == count else ", ".join(turned)
            yield Variant(
                cause="negated",
                says=f"{matrix.name} is as in the file",
                tried=f"{what} negated",
                remedy=CONVERT,
                trial=matrix.arranged(tuple(range(count)), signs),
            )


# ------------------------------------------------------------------ norms


def norm_flags(subject: Subject) -> Iterator[Variant]:
    """The flags norm_before_residual, norm_before_fc, fc_norm and final_norm (before the logits),
    each turned over. A norm that the files lack gets the weight 1.
    """
    trial, head = subject.trial, subject.trial.head
    if trial.kind in ("target_cache", "block") or hasattr(head, "blocks"):
        return
    if head.first is not None:
        value = head.first.norm_before_residual
        layer = edited(head.first, norm_before_residual=not value)
        yield _flag("norm_before_residual", value, edited_trial(trial, edited(head, first=layer)))
    if head.combine is not None:
        yield from _combine_norms(subject)
    if head.norm is not None:
        yield _flag("final_norm", True, edited_trial(trial, edited(head, norm=None)))
    else:
        shape = head.shape
        norm = unit_norm(torch.empty(shape.hidden_size), shape.rms_norm_eps, head.place)
        yield _flag("final_norm", False, edited_trial(trial, edited(head, norm=norm)))


def _combine_norms(subject: Subject) -> Iterator[Variant]:
    trial, head = subject.trial, subject.trial.head
    combine, count = head.combine, len(trial.aux_ids)
    eps, place = head.shape.rms_norm_eps, head.place
    has_one, has_many = combine.norm is not None, bool(combine.state_norms)
    if has_one or has_many:
        name = "norm_before_fc" if has_one else "fc_norm"
        yield _flag(name, True, with_combine(trial, norm=None, state_norms=[]))
    if has_many:
        joined = torch.cat([norm.weight for norm in combine.state_norms])
    elif has_one:
        joined = combine.norm.weight
    else:
        joined = torch.ones_like(combine.fc.weight[:, 0])
    one = with_norm_weight(unit_norm(joined, eps, place), joined)
    many = [with_norm_weight(unit_norm(w, eps, place), w) for w in joined.chunk(count)]
    if not has_one:
        yield _flag("norm_before_fc", False, with_combine(trial, norm=one, state_norms=[]))
    if not has_many:
        yield _flag("fc_norm", False, with_combine(trial, norm=None, state_norms=many))


def _flag(name: str, value: bool, trial: Trial) -> Variant:
    other = str(not value).lower()
    return Variant(
        cause=name,
        says=f"{name} is {str(value).lower()}",
        tried=other,
        remedy=f"set {name} of the drafter's config.json to {other}",
        trial=trial,
    )


def norm_weights(subject: Subject) -> Iterator[Variant]:
    """Norm weights plus one or minus one: Gemma 2 and 3 multiply by 1 + w, other models by w. Only
    the change that moves the median of the mean norm weights closer to one is tried.
    """
    norms = [w for w in weights_of(subject.trial.head).values() if w.dim() == 1]
    if not norms:
        return
    usual = float(torch.stack([w.float().mean() for w in norms]).median())
    for add, words in ((1.0, "1 + the file's"), (-1.0, "the file's - 1")):
        if abs(usual + add - 1) >= abs(usual - 1):
            continue
        yield Variant(
            cause="norm_weights",
            says="norms multiply by the file's weights",
            tried=words,
            remedy=CONVERT,
            trial=_with_norms(subject.trial, add),
        )


def _with_norms(trial: Trial, add: float) -> Trial:
    def moved(thing: Any) -> Any:
        found = copy(thing)
        for name, value in vars(thing).items():
            if isinstance(value, Norm):
                setattr(found, name, with_norm_weight(value, value.weight + add))
        return found

    found = with_layers(trial, moved)
    head = moved(found.head)
    if trial.kind == "target_cache":
        head.next_norms = [*(layer.input_norm for layer in head.layers[1:]), head.norm]
    elif hasattr(head, "blocks"):
        head.layers = [moved(layer) for layer in head.layers]
    elif getattr(head, "combine", None) is not None:
        head.combine = moved(head.combine)
        head.combine.state_norms = [
            with_norm_weight(norm, norm.weight + add) for norm in head.combine.state_norms
        ]
        return with_mask_state(edited_trial(found, head))
    return edited_trial(found, head)


# ------------------------------------------------------------------ vocabulary


def vocabulary_map(subject: Subject) -> Iterator[Variant]:
    """Other readings of the map from draft ids to target ids (d2t): moved by one, absolute ids
    instead of offsets, no map, ids sorted.
    """
    head, size = subject.trial.head, subject.target.vocab_size
    ids = getattr(head, "vocab_map", None)
    if ids is None:
        return
    k = torch.arange(ids.shape[0], device=ids.device)
    is_sorted = bool((ids[1:] > ids[:-1]).all())
    readings = [
        ("d2t_offset", "one lower", ids - 1, 1),
        ("d2t_offset", "one higher", ids + 1, 1),
        ("d2t_offset", "the file's numbers as ids", ids - k, 2),
        ("d2t_offset", "offsets added twice", ids + k, 2),
        ("d2t_permuted", "none: draft ids are the target's", k, 2),
        ("d2t_permuted", "the same ids in descending order", ids.sort().values.flip(0), 2),
    ]
    if not is_sorted:
        readings.append(("d2t_permuted", "the same ids in ascending order", ids.sort().values, 0))
    for cause, words, found, doubt in readings:
        yield Variant(
            cause=cause,
            says="draft id k is the target's k + d2t[k]" + ("" if is_sorted else ", unsorted"),
            tried=words,
            remedy="d2t holds the difference of target and draft id, of ascending target ids: "
            "mend d2t (and t2d) or convert again",
            trial=edited_trial(subject.trial, edited(head, vocab_map=found.clamp(0, size - 1))),
            doubt=doubt,
        )


def tables(subject: Subject) -> Iterator[Variant]:
    """The target's embedding, or its output projection, instead of the head's own."""
    head, target = subject.trial.head, subject.target
    own = getattr(head, "own", {})
    if target.vocabulary.group.size > 1:
        return
    if "embed_tokens.weight" in own and head.embedding.width == target.table.width:
        yield Variant(
            cause="embedding_table",
            says="the drafter has its own embedding",
            tried="the target's",
            remedy="remove embed_tokens.weight from the drafter's files: the target's is used then",
            trial=edited_trial(subject.trial, edited(head, embedding=target.table)),
        )
    if "lm_head.weight" in own and head.head.width == target.head.width:
        ids = head.vocab_map
        theirs = target.head if ids is None else target.head.of_tokens(ids)
        yield Variant(
            cause="output_head",
            says="the drafter has its own lm_head",
            tried="the target's",
            remedy="remove lm_head.weight from the drafter's files: the target's is used then",
            trial=edited_trial(subject.trial, edited(head, head=theirs)),
        )


# ------------------------------------------------------------------ layers


def rope_theta(subject: Subject) -> Iterator[Variant]:
    """Other values of rope_theta: multiples of the configured one, and those of released models."""
    head = subject.trial.head
    by_kind = "frequencies" if subject.trial.kind == "target_cache" else "theta"
    now = getattr(head, by_kind)
    if isinstance(now, dict):
        for factor in FACTORS:
            found = {kind: _rescaled(f, factor) for kind, f in now.items()}
            trial = edited_trial(subject.trial, edited(head, **{by_kind: found}))
            yield _theta("the config's", f"{factor:g} times as much", trial)
        return
    base = base_of(head.theta)
    tried = (*(base * factor for factor in FACTORS), *THETAS)
    for theta in dict.fromkeys(float(f"{t:.4g}") for t in tried):
        if theta > 1 and not 0.99 < theta / base < 1.01:
            other = _rescaled(head.theta, theta / base)
            trial = edited_trial(subject.trial, edited(head, theta=other))
            yield _theta(f"{base:.4g}", f"{theta:.4g}", trial)


def _theta(value: str, tried: str, trial: Trial) -> Variant:
    return Variant(
        cause="rope_theta",
        says=f"rope_theta is {value}",
        tried=tried,
        remedy="set rope_theta of the drafter's config.json so",
        trial=trial,
    )


def base_of(frequencies: Frequencies) -> float:
    """The rope_theta of frequencies without rope scaling, from the ratio of the first two."""
    half = frequencies.cos.shape[0] // 2
    theta = frequencies.cos[:half].double()
    return float((theta[0] / theta[1]) ** half)


def _rescaled(frequencies: Frequencies, factor: float) -> Frequencies:
    """Frequencies for a rope_theta `factor` times as large."""
    half = frequencies.cos.shape[0] // 2
    theta = frequencies.cos[:half]
    exponent = torch.arange(half, device=theta.device, dtype=theta.dtype) / half
    return mirrored(theta * factor**-exponent)


def rotary_layout(subject: Subject) -> Iterator[Variant]:
    """Rows of q_proj and k_proj reordered from interleaved rotary pairs to halves, or reversely."""
    if not all(
        isinstance(layer.attention, Attention) for layer in decoder_layers(subject.trial.head)
    ):
        return
    orders = ((half_split, "interleaved pairs"), (interleaved, "halves, converted twice"))
    for reorder, words in orders:

        def edit(layer: Any, reorder: Any = reorder) -> Any:
            return edited(layer, attention=_reordered(layer.attention, reorder))

        yield Variant(
            cause="rotary_layout",
            says="rows of q_proj and k_proj are in halves",
            tried=words,
            remedy=CONVERT,
            trial=with_layers(subject.trial, edit),
        )


def _reordered(attention: Attention, reorder: Any) -> Attention:
    qkv = attention.qkv
    for name, heads in (
        ("q_proj", attention.queries.count),
        ("k_proj", attention.num_key_heads),
    ):
        qkv = qkv.reordered(name, partial(reorder, heads=heads))
    found: Attention = edited(attention, qkv=qkv)
    return found


def gate_order(subject: Subject) -> Iterator[Variant]:
    """Gate and up projections exchanged: of every MLP, and of each alone."""
    layers = decoder_layers(subject.trial.head)
    if not all(hasattr(layer, "mlp") for layer in layers):
        return
    one_by_one = enumerate(layers) if len(layers) > 1 else ()
    choices = [("", layers), *((f" of layer {i}", [layer]) for i, layer in one_by_one)]
    for where, chosen in choices:

        def edit(layer: Any, chosen: Any = chosen) -> Any:
            is_chosen = any(layer is one for one in chosen)
            return edited(layer, mlp=swapped_gate(layer.mlp)) if is_chosen else layer

        yield Variant(
            cause="gate_order",
            says=f"gate_proj{where} goes through the activation",
            tried=f"up_proj{where}",
            remedy=CONVERT,
            trial=with_layers(subject.trial, edit),
        )


FAMILIES: tuple[Family, ...] = (
    block_order,
    block_signs,
    norm_flags,
    norm_weights,
    vocabulary_map,
    tables,
    rope_theta,
    rotary_layout,
    gate_order,
)
