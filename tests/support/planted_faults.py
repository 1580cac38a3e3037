"""Faults planted in zoo drafters: in a copy of the folder where files can have them, in how the
head is fed where they cannot. Planting shares no code with the doctor's variants.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hydraspec.analysis.doctor.feeding import UnnormedFeedback
from hydraspec.analysis.doctor.patient import Patient, few, loaded
from hydraspec.cli.compose import plan
from hydraspec.config.schema import RunConfig
from hydraspec.lab.resolution import resolve
from hydraspec.models.checkpoint.reader import resolve_folder
from hydraspec.speculators import registry
from hydraspec.speculators.teacher_forcing.texts import Texts
from hydraspec.speculators.teacher_forcing.trial import Trial
from hydraspec.workloads import reading as workloads

PAIRS = (
    ("tiny_gemma4", "gemma4_mtp"),
    ("tiny_gemma4", "eagle3"),
    ("tiny_gemma4", "peagle"),
    ("tiny_gemma4_e", "gemma4_mtp"),
    ("tiny_gemma4_moe", "gemma4_mtp"),
    ("tiny_qwen3", "eagle3"),
    ("tiny_qwen3", "peagle"),
    ("tiny_mistral", "eagle"),
    ("tiny_deepseek", "mtp"),
)
ENTRIES = {  # a projection whose inputs are a concatenation
    "gemma4_mtp": "pre_projection.weight",
    "eagle3": "fc.weight",
    "peagle": "fc.weight",
    "eagle": "eagle_linear.weight",
    "mtp": "model.layers.12.eh_proj.weight",
}


@dataclass
class Files:
    """A drafter's folder, read; what is changed here is written to a copy."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    method: str

    def entry(self) -> Tensor:
        """The projection at the head's entry, [out, in]."""
        return self.tensors[ENTRIES[self.method]]

    def put_entry(self, weight: Tensor) -> None:
        self.tensors[ENTRIES[self.method]] = weight.contiguous()

    def named(self, *ends: str) -> list[str]:
        """The tensors of the head's own layers whose names end so."""
        ours = "model.layers.12." if self.method == "mtp" else ""
        return [name for name in self.tensors if name.startswith(ours) and name.endswith(ends)]


@dataclass(frozen=True)
class Fault:
    """A fault, the causes that name it, and how it is planted. `plant` returns False where the
    drafter cannot have it.
    """

    name: str
    causes: tuple[str, ...]
    methods: tuple[str, ...]
    files: Callable[[Files], bool | None] | None = None
    fed: Callable[[Trial], Trial | None] | None = None


EAGLE3 = ("eagle3", "peagle")
ALL = ("gemma4_mtp", "eagle3", "peagle", "eagle", "mtp")


def permuted_d2t(f: Files) -> bool:
    if "d2t" not in f.tensors:
        return False
    k = torch.arange(len(f.tensors["d2t"]))
    ids = k + f.tensors["d2t"]
    shuffled = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(3))]
    f.tensors["d2t"] = (shuffled - k).to(f.tensors["d2t"].dtype)
    return True


def offset_d2t(f: Files) -> bool:
    if "d2t" not in f.tensors:
        return False
    ids = torch.arange(len(f.tensors["d2t"])) + f.tensors["d2t"]
    if int(ids.max()) + 1 >= len(f.tensors["t2d"]):
        return False
    f.tensors["d2t"] += 1
    f.tensors["t2d"] = f.tensors["t2d"].roll(1)
    return True


def negated_fc(f: Files) -> None:
    f.put_entry(-f.entry())


def negated_block(f: Files) -> None:
    weight = f.entry().clone()
    weight[:, : weight.shape[1] // (3 if f.method in EAGLE3 else 2)] *= -1
    f.put_entry(weight)


def swapped_fc(f: Files) -> None:
    blocks = f.entry().chunk(3 if f.method in EAGLE3 else 2, 1)
    f.put_entry(torch.cat((blocks[1], blocks[0], *blocks[2:]), 1))


def reversed_aux(f: Files) -> None:
    f.config["eagle_aux_hidden_state_layer_ids"].reverse()


def shifted_aux(by: int) -> Callable[[Files], None]:
    def plant(f: Files) -> None:
        key = "eagle_aux_hidden_state_layer_ids"
        f.config[key] = [i + by for i in f.config[key]]

    return plant


def flipped_residual(f: Files) -> None:
    f.config["norm_before_residual"] = not f.config["norm_before_residual"]


def dropped_fc_norm(f: Files) -> bool:
    """As a converter that knows no norms before fc writes the head."""
    flag = next((k for k in ("norm_before_fc", "fc_norm") if f.config[k]), None)
    if flag is None:
        return False
    f.config[flag] = False
    for name in [n for n in f.tensors if n.startswith(("fc_norm.", "input_norm."))]:
        del f.tensors[name]
    return True


def flipped_feedback(f: Files) -> None:
    f.config["norm_output"] = not f.config["norm_output"]


def theta_x1000(f: Files) -> None:
    inner = f.config.get("transformer_layer_config") or f.config.get("text_config") or f.config
    ropes = inner.get("rope_parameters") or inner
    parts = [v for v in ropes.values() if isinstance(v, dict)] or [ropes]
    for part in parts:
        part["rope_theta"] *= 1000


def unscaled_embedding(f: Files) -> None:
    """The engine multiplies Gemma's embeddings by sqrt(D) and this drafter was trained without;
    Mistral's are plain and this drafter was trained with.
    """
    weight = f.entry().clone()
    half = weight.shape[1] // 2
    factor = half**0.5
    weight[:, :half] *= 1 / factor if f.method == "gemma4_mtp" else factor
    f.put_entry(weight)


def swapped_gates(f: Files) -> None:
    gates = f.named("gate_proj.weight", "feed_forward.w1.weight")
    for gate in gates:
        up = gate.replace("gate_proj", "up_proj").replace(".w1.", ".w3.")
        f.tensors[gate], f.tensors[up] = f.tensors[up], f.tensors[gate]


def interleaved_heads(f: Files) -> None:
    """Mistral's consolidated files are interleaved, and read so: theirs come in halves here."""
    for name in f.named("q_proj.weight", "k_proj.weight", "wq.weight", "wk.weight"):
        rows = f.tensors[name]
        size = 64 if "layers.1.self_attn.q" in name and f.method == "gemma4_mtp" else 32
        pairs = rows.view(-1, 2, size // 2, rows.shape[1]).transpose(1, 2)
        if "wq" in name or "wk" in name:
            pairs = rows.view(-1, size // 2, 2, rows.shape[1]).transpose(1, 2)
        f.tensors[name] = pairs.reshape(rows.shape).contiguous()


def lowered_norms(f: Files) -> None:
    ends = ("norm.weight", "enorm.weight", "hnorm.weight")
    kept = ("q_norm.weight", "k_norm.weight", "a_layernorm.weight")
    for name in f.named(*ends):
        is_fc_norm = name.startswith(("fc_norm.", "input_norm."))
        if not name.endswith(kept) and f.tensors[name].dim() == 1 and not is_fc_norm:
            f.tensors[name] = f.tensors[name] - 1
    for name in [n for n in f.tensors if n.startswith(("fc_norm.", "input_norm."))]:
        f.tensors[name] = f.tensors[name] - 1


def unnormed_mtp(trial: Trial) -> Trial:
    from copy import copy

    head = copy(trial.head)
    head.__class__ = UnnormedFeedback
    return replace(trial, head=head)


def unnormed_eagle1(trial: Trial) -> Trial:
    from copy import copy

    head = copy(trial.head)
    head.config = replace(head.config, norm_output=False)
    return replace(trial, head=head)


FAULTS = (
    Fault("permuted d2t", ("d2t_permuted",), EAGLE3, permuted_d2t),
    Fault("d2t offset by one", ("d2t_offset",), EAGLE3, offset_d2t),
    Fault("negated fc", ("negated",), ALL, negated_fc),
    Fault("one negated fc block", ("negated",), ALL, negated_block),
    Fault("swapped fc blocks", ("block_order",), ALL, swapped_fc),
    Fault("reversed aux ids", ("aux_order",), EAGLE3, reversed_aux),
    Fault("aux ids + 1", ("aux_layer_ids",), EAGLE3, shifted_aux(1)),
    Fault("aux ids - 1", ("aux_layer_ids",), EAGLE3, shifted_aux(-1)),
    Fault("flipped norm_before_residual", ("norm_before_residual",), EAGLE3, flipped_residual),
    Fault("lost norm before fc", ("norm_before_fc", "fc_norm"), EAGLE3, dropped_fc_norm),
    Fault("rope_theta x 1000", ("rope_theta",), ALL, theta_x1000),
    Fault("unscaled embedding", ("embedding_scale",), ("gemma4_mtp", "eagle"), unscaled_embedding),
    Fault("feedback after the norm", ("feedback_norm",), ("eagle3",), flipped_feedback),
    Fault("feedback before the norm", ("feedback_norm",), ("mtp",), fed=unnormed_mtp),
    Fault("feedback before the norm", ("feedback_norm",), ("eagle",), fed=unnormed_eagle1),
    Fault(
        "draft positions + 1",
        ("draft_positions",),
        ("gemma4_mtp", "eagle3", "eagle", "mtp"),
        fed=lambda trial: replace(trial, step_gap=1),
    ),
    Fault(
        "tokens shifted by one",
        ("token_shift",),
        ("eagle3", "peagle", "eagle", "mtp"),
        fed=lambda trial: replace(trial, token_shift=0),
    ),
    # Of our choice:
    Fault(
        "states shifted by one",
        ("state_shift",),
        ALL,
        fed=lambda trial: replace(trial, state_shift=-1),
    ),
    Fault(
        "states before the final norm",
        ("target_state_norm",),
        ("gemma4_mtp", "eagle", "mtp"),
        fed=lambda trial: replace(trial, reads_normed=False),
    ),
    Fault("gate and up swapped", ("gate_order",), ALL, swapped_gates),
    Fault(
        "interleaved q and k", ("rotary_layout",), ("eagle3", "peagle", "eagle"), interleaved_heads
    ),
    Fault("norm weights - 1", ("norm_weights",), ALL, lowered_norms),
    Fault(
        "KV of the layer before",
        ("kv_source",),
        ("gemma4_mtp",),
        fed=lambda trial: replace(trial, kv_layers_back=1),
    ),
)


@dataclass
class Bed:
    """A healthy pair with its texts, in which faults are planted."""

    patient: Patient
    texts: Texts
    config: RunConfig

    def planted(self, fault: Fault, folder: Path) -> Trial | None:
        """The drafter with a fault; None where it cannot have it."""
        if fault.fed is not None:
            return fault.fed(self.patient.trial())
        assert fault.files is not None
        source = resolve_folder(str(self.config.method.checkpoint or self.config.target.checkpoint))
        shutil.copytree(source, folder)
        (weights,) = folder.glob("*.safetensors")
        (config,) = [p for p in (folder / "config.json", folder / "params.json") if p.is_file()]
        files = Files(json.loads(config.read_text()), load_file(weights), self.config.method.name)
        if fault.files(files) is False:
            return None
        config.write_text(json.dumps(files.config))
        weights.unlink()
        save_file(files.tensors, weights)
        method = replace(self.config.method, checkpoint=str(folder))
        speculator = registry.build_speculator(replace(self.config, method=method))
        speculator.load(self.patient.target)
        head = speculator.head  # type: ignore[attr-defined]
        return replace(self.patient.trial(), head=head, aux_ids=head.spec.aux_layer_ids)


def configuration(target: str, method: str, *overrides: str) -> RunConfig:
    """The resolved configuration of a zoo pair."""
    typed = [f"target={target}", f"method={method}", "tracker=none", "engine.device=cpu"]
    config = plan([*typed, *overrides]).jobs[0].config
    resolve(config)
    return config


def bed(target: str, method: str, *, num_prompts: int) -> Iterator[Bed]:
    """A pair, loaded, with the target's texts."""
    config = configuration(target, method, "method.num_speculative_tokens=3")
    with loaded(config) as patient, torch.no_grad():
        workload = workloads.read(config)
        assert workload is not None
        patient.engine.tokenize(workload.requests)
        texts = patient.texts(few(workload.requests, num_prompts))
        yield Bed(patient, texts, config)
