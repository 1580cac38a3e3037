"""Random EAGLE heads over every flag, and the folders they are published in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from eagle_oracle import PlainEagle
from safetensors.torch import save_file
from torch import Tensor

from hydraspec.models.checkpoint.mistral_names import consolidated_name, interleaved
from hydraspec.models.checkpoint.quantization import Scheme, encode
from hydraspec.models.linear import Table
from hydraspec.models.place import Place
from hydraspec.parallel.vocabulary import Vocabulary

SIZE, VOCAB, ROWS = 16, 40, 33  # of a small head; ROWS in a vocabulary of its own
LAYER: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
}


class FakeTarget:
    """What a head may know of a target: sizes and tables."""

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        hidden_size: int,
        vocab_size: int,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.vocabulary = Vocabulary(vocab_size)
        self.num_layers, self.max_position_embeddings, self.block_size = 6, 256, 4
        self.dtype, self.device = dtype, torch.device("cpu")
        self.eos_token_ids: tuple[int, ...] = ()
        self.suppress_token_ids: tuple[int, ...] = ()
        place = Place(self.dtype, self.device)
        self.table, self.head = (Table(place, self.vocabulary, hidden_size) for _ in range(2))
        for table in (self.table, self.head):
            table.weight.copy_(matrix(rng, vocab_size, hidden_size))


def matrix(rng: np.random.Generator, *shape: int) -> Tensor:
    """Random, with rows of length about 1."""
    return torch.from_numpy(rng.standard_normal(shape)) * shape[-1] ** -0.5


def draw_layer(rng: np.random.Generator, target: Any, *, kind: str, size: int) -> dict[str, Any]:
    """A Hugging Face config of the head's layers."""
    kv_heads, group = int(rng.choice([1, 2])), int(rng.choice([1, 2, 3]))
    count = int(rng.choice([1, 1, 2, 3]))
    layer: dict[str, Any] = {
        "model_type": kind,
        "vocab_size": target.vocab_size,
        "hidden_size": size,
        "intermediate_size": 24,
        "num_hidden_layers": count,
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": int(rng.choice([4, 8, 10])),
        "max_position_embeddings": 256,
        "rms_norm_eps": float(rng.choice([1e-6, 1e-5])),
        "rope_theta": float(rng.choice([100.0, 10000.0])),
        "attention_bias": kind != "mistral" and bool(rng.random() < 0.3),
        "mlp_bias": kind == "llama" and bool(rng.random() < 0.3),
    }
    if rng.random() < 0.3:
        layer["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    windows = kind == "qwen3" or (kind == "llama" and not layer["attention_bias"])
    if windows and not layer["mlp_bias"] and rng.random() < 0.5:
        kinds = ["sliding_attention" if rng.random() < 0.5 else "full_attention"]
        kinds += ["sliding_attention" if rng.random() < 0.5 else "full_attention"] * (count - 1)
        layer |= {"layer_types": kinds, "sliding_window": 3, "use_sliding_window": True}
    if kind == "mistral":
        layer["sliding_window"] = None
    elif rng.random() < 0.4:
        layer["hidden_act"] = "gelu_pytorch_tanh"  # of heads for Gemma targets
    return layer


def draw_weights(
    rng: np.random.Generator, head: PlainEagle, target: Any, *, rows: int
) -> dict[str, Tensor]:
    """Every tensor of the head, norms away from 1; embedding and head are its own."""
    layer, size = head.layer, head.layer["hidden_size"]
    found: dict[str, Tensor] = {}

    def norm(name: str, width: int = size) -> None:
        found[f"{name}.weight"] = torch.from_numpy(rng.uniform(0.5, 1.5, width))

    def linear(name: str, outer: int, inner: int, *, bias: bool = False) -> None:
        found[f"{name}.weight"] = matrix(rng, outer, inner)
        if bias:
            found[f"{name}.bias"] = matrix(rng, outer, 4)[:, 0]

    fused = head.method != "eagle"
    count, width = len(head.aux_layer_ids), target.hidden_size
    found["embed_tokens.weight"] = matrix(rng, target.vocab_size, size) * size**0.5
    linear("lm_head", rows, size)
    if not fused:
        linear("fc", size, 2 * size, bias=head.flag("fc_bias"))
    elif count:
        linear("fc", size, count * width)
    if head.flag("norm_before_fc"):
        norm("input_norm", count * width)
    if head.flag("fc_norm"):
        for i in range(count):
            norm(f"fc_norm.{i}", width)
    if fused or head.flag("is_mistral"):
        norm("norm")
    if head.method == "peagle":
        found["mask_hidden"] = matrix(rng, 1, 1, count * width) * 4
    q, kv = layer["num_attention_heads"], layer["num_key_value_heads"]
    dim, bias = layer["head_dim"], layer["attention_bias"]
    for i in range(layer["num_hidden_layers"]):
        name, first = f"layers.{i}", fused and i == 0
        entering = 2 * size if first else size
        if first:
            norm(f"{name}.hidden_norm")
        if fused or i or head.flag("is_mistral"):
            norm(f"{name}.input_layernorm")
        norm(f"{name}.post_attention_layernorm")
        for part, heads in (("q", q), ("k", kv), ("v", kv)):
            linear(f"{name}.self_attn.{part}_proj", heads * dim, entering, bias=bias)
        linear(f"{name}.self_attn.o_proj", size, q * dim, bias=bias)
        for part in ("gate", "up"):
            linear(f"{name}.mlp.{part}_proj", 24, size, bias=layer["mlp_bias"])
        linear(f"{name}.mlp.down_proj", size, 24, bias=layer["mlp_bias"])
        if layer["model_type"] == "qwen3":
            norm(f"{name}.self_attn.q_norm", dim)
            norm(f"{name}.self_attn.k_norm", dim)
    return found


def draw_eagle3(rng: np.random.Generator, target: Any, method: str = "eagle3") -> PlainEagle:
    """An EAGLE-3 or P-EAGLE head over every flag."""
    kind = str(rng.choice(["llama", "qwen3"]))
    use_aux = method == "peagle" or bool(rng.random() < 0.85)
    size = target.hidden_size if rng.random() < 0.6 or not use_aux else 20
    norms = int(rng.integers(0, 3)) if use_aux else 0
    count = int(rng.integers(1, 5)) if use_aux else 0
    ids = rng.permutation(target.num_layers + 1)[:count]
    narrow = bool(rng.random() < 0.6)
    rows = target.vocab_size - 7 if narrow else target.vocab_size
    head = PlainEagle(
        method=method,
        layer=draw_layer(rng, target, kind=kind, size=size),
        weights={},
        flags={
            "norm_before_residual": bool(rng.random() < 0.5),
            "norm_before_fc": norms == 1,
            "fc_norm": norms == 2,
            "norm_output": bool(rng.random() < 0.5),
            "use_aux_hidden_state": use_aux,
        },
        aux_layer_ids=tuple(int(i) for i in ids),
        mask_token=int(rng.integers(0, target.vocab_size)) if method == "peagle" else None,
    )
    if narrow:
        head.ids = torch.from_numpy(rng.permutation(target.vocab_size)[:rows]).sort().values
    head.weights = draw_weights(rng, head, target, rows=rows)
    return head


def draw_eagle1(rng: np.random.Generator, target: Any, *, is_mistral: bool) -> PlainEagle:
    """An EAGLE-1 head of Mistral's or of the authors' kind; it reads the target's tables."""
    kind = "mistral" if is_mistral else "llama"
    head = PlainEagle(
        method="eagle",
        layer=draw_layer(rng, target, kind=kind, size=target.hidden_size),
        weights={},
        flags={"is_mistral": is_mistral, "fc_bias": not is_mistral and bool(rng.random() < 0.5)},
    )
    head.layer.pop("layer_types", None)
    head.weights = draw_weights(rng, head, target, rows=target.vocab_size)
    head.weights |= {
        "embed_tokens.weight": target.table.weight,
        "lm_head.weight": target.head.weight,
    }
    return head


def make_target(**changes: Any) -> FakeTarget:
    """A target of the sizes that heads of `make_head` read."""
    sizes = {"hidden_size": SIZE, "vocab_size": VOCAB} | changes
    return FakeTarget(np.random.default_rng(1), **sizes)


def make_head(method: str = "eagle3", **flags: bool) -> PlainEagle:
    """A head of one plain layer with a narrow vocabulary."""
    mask = 3 if method == "peagle" else None
    head = PlainEagle(method, LAYER, {}, flags, (1, 2, 4), torch.arange(ROWS) + 5, mask)
    head.weights = draw_weights(np.random.default_rng(2), head, make_target(), rows=ROWS)
    return head


# ------------------------------------------------------------------ folders


def saved(head: PlainEagle, *, without: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The tensors of a file, vocabulary maps included."""
    found = {n: t.clone().contiguous() for n, t in head.weights.items() if n not in without}
    if head.ids is not None:
        rows = head.ids.shape[0]
        found["d2t"] = head.ids - torch.arange(rows)
        mask = torch.zeros(head.layer["vocab_size"], dtype=torch.bool)
        mask[head.ids] = True
        found["t2d"] = mask
    return found


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def speculators_config(head: PlainEagle, k: int = 3, verifier: str = "") -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": head.method,
        "speculators_version": "0.9.0",
        "transformer_layer_config": head.layer,
        "draft_vocab_size": head.weights["lm_head.weight"].shape[0],
        **{name: bool(value) for name, value in head.flags.items()},
        "speculators_config": {
            "algorithm": head.method,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": k}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
    }
    if head.aux_layer_ids:
        config["eagle_aux_hidden_state_layer_ids"] = list(head.aux_layer_ids)
    if head.mask_token is not None:
        config["mask_token_id"] = head.mask_token
    return config


def write_speculators(folder: Path, head: PlainEagle, *, without: tuple[str, ...] = ()) -> Path:
    return write(folder, speculators_config(head), saved(head, without=without))


def authors_names(tensors: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """`midlayer.` for layer 0, and a leading `model.` where `prefix` says so."""
    found = {}
    for name, tensor in tensors.items():
        ours = name.replace("layers.0.", "midlayer.")
        outside = ours in ("d2t", "t2d", "lm_head.weight", "mask_hidden")
        found[ours if outside else prefix + ours] = tensor
    return found


def write_authors(
    folder: Path, head: PlainEagle, *, prefix: str = "", ids: dict[str, Any] | None = None
) -> Path:
    """EAGLE-3 as its authors publish it; `ids` spells the aux layers (default: nested)."""
    config: dict[str, Any] = {
        **head.layer,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": head.weights["lm_head.weight"].shape[0],
        "eagle_config": {
            **{name: bool(value) for name, value in head.flags.items()},
        },
    }
    if ids is not None:
        config |= ids
    elif head.aux_layer_ids:
        nested = {"eagle_aux_hidden_state_layer_ids": list(head.aux_layer_ids)}
        config["eagle_config"] |= nested
    if head.mask_token is not None:
        config["ptd_token_id"] = head.mask_token
    return write(folder, config, authors_names(saved(head), prefix))


TABLES = ("embed_tokens.weight", "lm_head.weight")
FP8 = Scheme(kind="fp8", rows=None, columns=None, inputs="static", input_scale="input_scale")
YARN = {"factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 4.0, "beta_slow": 1.0}
YARN |= {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.0, "llama_4_scaling_beta": 0.3}


def draw_ministral3(rng: np.random.Generator, target: Any, *, is_fp8: bool) -> PlainEagle:
    """A head as that of Mistral Medium 3.5, its queries growing with their positions."""
    head = draw_eagle1(rng, target, is_mistral=True)
    head.layer |= {"model_type": "ministral3", "rope_scaling": YARN, "num_hidden_layers": 2}
    tables = {name: head.weights[name] for name in TABLES}
    head.weights = draw_weights(rng, head, target, rows=target.vocab_size) | tables
    return round_to_fp8(head) if is_fp8 else head


def round_to_fp8(head: PlainEagle) -> PlainEagle:
    """The head with every matrix in FP8, fc's too: a scale each, and another for its inputs."""
    for i, name in enumerate(head.weights):
        if name.endswith(("_proj.weight", "fc.weight")):
            found = encode(head.weights[name], FP8)
            head.weights[name] = found["weight"].double() * found["weight_scale"].double()
            head.input_scales[name.removesuffix(".weight")] = torch.tensor(0.02 + 0.002 * i)

    def rounding(name: str, x: Tensor) -> Tensor:
        scale = head.input_scales[name].double()
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale

    head.rounding = rounding
    return head


def in_fp8(head: PlainEagle, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a file: numbers and scales of the matrices that are in FP8, by Mistral's names."""
    found = dict(tensors)
    for name, scale in head.input_scales.items():
        for part, tensor in encode(tensors[f"{name}.weight"], FP8).items():
            found[f"{name}.{part}"] = tensor.view(()) if part == "weight_scale" else tensor
        found[f"{name}.input_scale"] = scale
    return found


def write_hugging_face(folder: Path, head: PlainEagle) -> Path:
    """A Mistral's head by Hugging Face's names, in transformers' own FP8 if it is quantised."""
    config = {"architectures": ["EagleForCausalLM"]} | head.layer
    if head.input_scales:
        quantised = {"quant_method": "fp8", "activation_scheme": "static"}
        config["quantization_config"] = quantised | {"weight_block_size": None}
    theirs = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
    tensors = {}
    for name, tensor in in_fp8(head, saved(head, without=TABLES)).items():
        stem, _, last = name.rpartition(".")
        tensors[f"{stem}.{theirs.get(last, last)}"] = tensor
    return write(folder, config, tensors)


def write_consolidated(
    folder: Path, head: PlainEagle, *, without: tuple[str, ...] = TABLES
) -> Path:
    """EAGLE-1 as Mistral publishes it: params.json, consolidated.safetensors, no tables."""
    layer = head.layer
    rope = layer.get("rope_scaling") or {}
    folder.mkdir(parents=True, exist_ok=True)
    params: dict[str, Any] = {
        "dim": layer["hidden_size"],
        "n_layers": layer["num_hidden_layers"],
        "head_dim": layer["head_dim"],
        "hidden_dim": layer["intermediate_size"],
        "n_heads": layer["num_attention_heads"],
        "n_kv_heads": layer["num_key_value_heads"],
        "norm_eps": layer["rms_norm_eps"],
        "vocab_size": layer["vocab_size"],
        "rope_theta": layer["rope_theta"],
        "max_position_embeddings": layer["max_position_embeddings"],
    }
    if rope.get("rope_type") == "yarn":
        length = {"original_max_position_embeddings": rope["original_max_position_embeddings"]}
        ramp = {"alpha": rope["beta_slow"], "beta": rope["beta_fast"], "factor": rope["factor"]}
        params["yarn"] = length | ramp | {"apply_scale": True}
        params["llama_4_scaling"] = length | {"beta": rope["llama_4_scaling_beta"]}
    if head.input_scales:
        params["quantization"] = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    (folder / "params.json").write_text(json.dumps(params))
    tensors = {}
    for name, tensor in in_fp8(head, saved(head, without=without)).items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = interleaved(tensor, tensor.shape[0] // layer["head_dim"])
        tensors[consolidated_name(f"model.{name}")] = tensor.contiguous()
    save_file(tensors, folder / "consolidated.safetensors")
    return folder
