"""Wrong conventions drawn by chance: a field of a drafter's configuration, the equal change of its
tensors, or how it is fed. Shares no code with the doctor's variants.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from drawn_faults import Files, Rng
from torch import Tensor

from hydraspec.analysis.doctor.feeding import UnnormedFeedback
from hydraspec.speculators.teacher_forcing.trial import Trial

ENTRIES = {  # the projection whose inputs are a concatenation
    "gemma4_mtp": "pre_projection.weight",
    "eagle3": "fc.weight",
    "peagle": "fc.weight",
    "eagle": "eagle_linear.weight",
    "mtp": "model.layers.12.eh_proj.weight",
}
AUX = "eagle_aux_hidden_state_layer_ids"
EAGLE3 = ("eagle3", "peagle")
ALL = (*EAGLE3, "gemma4_mtp", "eagle", "mtp")


@dataclass(slots=True)
class Drafter:
    """A drafter's files and method, in which a convention is turned."""

    files: Files
    method: str

    @property
    def config(self) -> Any:
        return self.files.config

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self.files.tensors

    @property
    def layers(self) -> Any:
        """The part of the configuration that describes its decoder layers."""
        config = self.files.config
        return config.get("transformer_layer_config") or config.get("text_config") or config

    @property
    def entry(self) -> Tensor:
        return self.tensors[ENTRIES[self.method]]

    @entry.setter
    def entry(self, weight: Tensor) -> None:
        self.tensors[ENTRIES[self.method]] = weight

    @property
    def num_blocks(self) -> int:
        return 3 if self.method in EAGLE3 else 2

    def named(self, *ends: str) -> list[str]:
        return [name for name in self.files.drafters_weights() if name.endswith(ends)]


@dataclass(slots=True, frozen=True)
class Turned:
    """A wrong convention in words, the causes that name it, and how the head is fed where files
    cannot say it.
    """

    says: str
    causes: tuple[str, ...]
    fed: Callable[[Trial], Trial] | None = None


Turn = Callable[[Drafter, Rng], Turned | None]


# ------------------------------------------------------------------ target states


def aux_ids(d: Drafter, rng: Rng) -> Turned:
    old = d.config[AUX]
    new = list(old)
    while new == old or len(set(new)) < len(new) or min(new) < 1 or sorted(new) != new:
        if rng.random() < 0.5:
            by = int(rng.choice([-2, -1, 1, 2]))
            new = [i + by for i in old]
        else:
            new = list(old)
            new[int(rng.integers(len(new)))] += int(rng.choice([-3, -2, -1, 1, 2, 3]))
        if max(new) > 16:
            new = old
    d.config[AUX] = new
    return Turned(f"aux ids {old} as {new}", ("aux_layer_ids",))


def aux_order(d: Drafter, rng: Rng) -> Turned:
    old = list(d.config[AUX])
    while d.config[AUX] == old:
        d.config[AUX] = [old[i] for i in rng.permutation(len(old))]
    return Turned(f"aux ids {old} as {d.config[AUX]}", ("aux_order", "block_order"))


def block_order(d: Drafter, rng: Rng) -> Turned:
    blocks = d.entry.chunk(d.num_blocks, 1)
    order = list(range(len(blocks)))
    while order == sorted(order):
        order = [int(i) for i in rng.permutation(len(blocks))]
    d.entry = torch.cat([blocks[i] for i in order], 1)
    return Turned(f"entry blocks as {order}", ("block_order", "aux_order"))


def signs(d: Drafter, rng: Rng) -> Turned:
    blocks = list(d.entry.chunk(d.num_blocks, 1))
    which = int(rng.integers(len(blocks) + 1))
    for i in range(len(blocks)):
        if which in (i, len(blocks)):
            blocks[i] = -blocks[i]
    d.entry = torch.cat(blocks, 1)
    return Turned(
        "the whole entry negated" if which == len(blocks) else f"entry block {which} negated",
        ("negated",),
    )


def embedding_scale(d: Drafter, rng: Rng) -> Turned:
    half = d.entry.shape[1] // 2
    factor = half**0.5 if d.method == "eagle" else half**-0.5
    d.entry = torch.cat((d.entry[:, :half] * factor, d.entry[:, half:]), 1)
    return Turned(f"embeddings times {factor:.3g}", ("embedding_scale",))


# ------------------------------------------------------------------ norms


def residual(d: Drafter, rng: Rng) -> Turned:
    d.config["norm_before_residual"] = not d.config["norm_before_residual"]
    return Turned("norm_before_residual turned over", ("norm_before_residual",))


def entry_norm(d: Drafter, rng: Rng) -> Turned | None:
    flag = next((key for key in ("norm_before_fc", "fc_norm") if d.config[key]), None)
    if flag is None:
        return None
    d.config[flag] = False
    for name in [n for n in d.tensors if n.startswith(("fc_norm.", "input_norm."))]:
        del d.tensors[name]
    return Turned(f"{flag} lost", ("norm_before_fc", "fc_norm"))


def feedback(d: Drafter, rng: Rng) -> Turned:
    d.config["norm_output"] = not d.config["norm_output"]
    return Turned("norm_output turned over", ("feedback_norm",))


def norm_weights(d: Drafter, rng: Rng) -> Turned:
    inner = ("q_norm.weight", "k_norm.weight", "a_layernorm.weight")
    for name in d.files.drafters_weights():
        if d.tensors[name].dim() == 1 and "norm" in name and not name.endswith(inner):
            d.tensors[name] = d.tensors[name] - 1
    return Turned("norm weights - 1", ("norm_weights",))


# ------------------------------------------------------------------ layers


def rope_theta(d: Drafter, rng: Rng) -> Turned:
    factor = float(rng.choice([1e-3, 1e-2, 1e2, 1e3]))
    ropes = d.layers.get("rope_parameters") or d.layers
    parts = [v for v in ropes.values() if isinstance(v, dict)] or [ropes]
    for part in parts:
        part["rope_theta"] = max(2.0, part["rope_theta"] * factor)
    return Turned(f"rope_theta x {factor:g}", ("rope_theta",))


def gate_order(d: Drafter, rng: Rng) -> Turned:
    for gate in d.named("gate_proj.weight", "feed_forward.w1.weight"):
        up = gate.replace("gate_proj", "up_proj").replace(".w1.", ".w3.")
        d.tensors[gate], d.tensors[up] = d.tensors[up], d.tensors[gate]
    return Turned("gate and up swapped", ("gate_order",))


def rotary_layout(d: Drafter, rng: Rng) -> Turned:
    """Mistral's consolidated files are interleaved, and read so: theirs come in halves here."""
    if d.method == "mtp":
        d.config["rope_interleave"] = False
    for name in d.named(*(() if d.method == "mtp" else ("q_proj.weight", "k_proj.weight"))):
        size = 64 if "layers.1." in name and d.method == "gemma4_mtp" else 32
        pairs = d.tensors[name].unflatten(0, (-1, 2, size // 2))
        d.tensors[name] = pairs.transpose(1, 2).flatten(0, 2)
    for name in d.named("wq.weight", "wk.weight"):
        pairs = d.tensors[name].unflatten(0, (-1, 16, 2))
        d.tensors[name] = pairs.transpose(1, 2).flatten(0, 2)
    return Turned("rows of q and k in the other layout", ("rotary_layout", "rope_interleave"))


def activation(d: Drafter, rng: Rng) -> Turned:
    d.layers["hidden_act"] = "gelu_pytorch_tanh"
    return Turned("hidden_act gelu", ("hidden_act",))


def head_size(d: Drafter, rng: Rng) -> Turned:
    names = ("head_dim", "num_attention_heads", "num_key_value_heads")
    size, heads, kv_heads = (name for name in names)
    if d.method == "eagle":
        heads, kv_heads = "n_heads", "n_kv_heads"
    d.layers[size] //= 2
    d.layers[heads] *= 2
    d.layers[kv_heads] *= 2
    return Turned("heads of half the size", ("head_dim",))


def epsilon(d: Drafter, rng: Rng) -> Turned:
    key, value = "norm_eps" if d.method == "eagle" else "rms_norm_eps", float(rng.choice([0.1, 1]))
    d.layers[key] = value
    return Turned(f"{key} {value:g}", (key,))


def routing(d: Drafter, rng: Rng) -> Turned:
    key, value = (
        ("num_experts_per_tok", 1),
        ("routed_scaling_factor", 0.5),
        ("routed_scaling_factor", 16.0),
        ("norm_topk_prob", False),
    )[rng.integers(4)]
    d.config[key] = value
    causes = ("routed_scaling_factor", "norm_topk_prob")
    return Turned(f"{key} {value}", (key,) if key not in causes else causes)


def centroids(d: Drafter, rng: Rng) -> Turned | None:
    if not d.config.get("use_ordered_embeddings"):
        return None
    d.config["centroid_intermediate_top_k"] = 1
    return Turned("1 centroid for 6", ("centroid_intermediate_top_k",))


# ------------------------------------------------------------------ vocabulary


def vocabulary_map(d: Drafter, rng: Rng) -> Turned | None:
    if "d2t" not in d.tensors:
        return None
    old = d.tensors["d2t"]
    k = torch.arange(len(old))
    kind = int(rng.integers(4))
    if kind == 0:
        order = torch.from_numpy(rng.permutation(len(old)))
        says, found = "permuted", (k + old)[order] - k
    elif kind == 1:
        says, found = "in descending order", (k + old).flip(0) - k
    elif kind == 2:
        says, found = "one lower", (k + old - 1).clamp(min=0) - k
    else:
        says, found = "of target ids", k + old
    if kind == 3 and int((k + found).max()) >= len(d.tensors["t2d"]):
        return None
    d.tensors["d2t"] = found.to(old.dtype)
    marks = torch.zeros_like(d.tensors["t2d"])
    marks[(k + found).long()] = 1
    d.tensors["t2d"] = marks
    return Turned(f"d2t {says}", ("d2t_permuted", "d2t_offset"))


def mask_token(d: Drafter, rng: Rng) -> Turned:
    d.config["mask_token_id"] = int(rng.integers(1, 768))
    return Turned(f"mask_token_id {d.config['mask_token_id']}", ("mask_token_id",))


# ------------------------------------------------------------------ feeding


def fed(d: Drafter, rng: Rng) -> Turned | None:
    """How it was trained to be fed, which no file says."""
    choices: list[tuple[str, tuple[str, ...], dict[str, Any], tuple[str, ...]]] = [
        ("tokens shifted", ("token_shift",), {"token_shift": 0}, ("gemma4_mtp",)),
        ("states shifted", ("state_shift", "token_shift"), {"state_shift": -1}, ()),
        ("states before the norm", ("target_state_norm",), {"reads_normed": False}, EAGLE3),
        ("KV of the layer before", ("kv_source",), {"kv_layers_back": 1}, ALL[:2] + ALL[3:]),
    ]
    says, causes, changes, never = choices[rng.integers(len(choices))]
    if d.method in never:
        return None
    return Turned(says, causes, lambda trial: replace(trial, **changes))


def fed_back(d: Drafter, rng: Rng) -> Turned:
    def turn(trial: Trial) -> Trial:
        head = copy(trial.head)
        if d.method == "mtp":
            head.__class__ = UnnormedFeedback
        else:
            head.config = replace(head.config, norm_output=False)
        return replace(trial, head=head)

    return Turned("feedback before the norm", ("feedback_norm",), turn)


TURNS: tuple[tuple[Turn, tuple[str, ...]], ...] = (
    (aux_ids, EAGLE3),
    (aux_order, EAGLE3),
    (block_order, ALL),
    (signs, ALL),
    (embedding_scale, ("eagle", "gemma4_mtp")),
    (residual, EAGLE3),
    (entry_norm, EAGLE3),
    (feedback, ("eagle3",)),
    (norm_weights, ALL),
    (rope_theta, ALL),
    (gate_order, ALL),
    (rotary_layout, ALL),
    (activation, EAGLE3),
    (head_size, (*EAGLE3, "eagle")),
    (epsilon, ALL),
    (routing, ("mtp",)),
    (centroids, ("gemma4_mtp",)),
    (vocabulary_map, EAGLE3),
    (mask_token, ("peagle",)),
    (fed, ALL),
    (fed_back, ("eagle", "mtp")),
)


def draw_convention(files: Files, method: str, seed: tuple[int, ...]) -> Turned:
    """Turn one convention of a drafter's files."""
    rng = np.random.default_rng([31, *seed])
    fitting = [turn for turn, methods in TURNS if method in methods]
    while True:
        turned = fitting[rng.integers(len(fitting))](Drafter(files, method), rng)
        if turned is not None:
            return turned
