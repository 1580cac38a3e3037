"""Random block drafters over every option, and the folders they are published in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from block_oracle import PlainBlock
from eagle_folders import draw_layer, matrix, write

FORMATS = ("z-lab", "speculators", "deepseek-ai")
SLIDING = "sliding_attention"
ARCHITECTURES = {
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkDraftModel",
    "dflash2": "DFlash2DraftModel",
}


def draw_block_weights(
    rng: np.random.Generator, head: PlainBlock, target: Any, *, rows: int
) -> None:
    """Fills in every tensor of the head, norms away from 1."""
    layer, size = head.layer, head.layer["hidden_size"]
    found = head.weights

    def norm(name: str, width: int = size) -> None:
        found[f"{name}.weight"] = torch.from_numpy(rng.uniform(0.5, 1.5, width))

    def linear(name: str, outer: int, inner: int, *, bias: bool = False) -> None:
        found[f"{name}.weight"] = matrix(rng, outer, inner)
        if bias:
            found[f"{name}.bias"] = matrix(rng, outer, 4)[:, 0]

    found["embed_tokens.weight"] = matrix(rng, target.vocab_size, size) * size**0.5
    linear("lm_head", rows, size)
    linear("fc", size, len(head.aux_layer_ids) * target.hidden_size)
    norm("hidden_norm")
    norm("norm")
    q, kv = layer["num_attention_heads"], layer["num_key_value_heads"]
    dim, bias, inner = layer["head_dim"], layer["attention_bias"], layer["intermediate_size"]
    for i in range(layer["num_hidden_layers"]):
        name = f"layers.{i}"
        norm(f"{name}.input_layernorm")
        norm(f"{name}.post_attention_layernorm")
        for part, heads in (("q", q), ("k", kv), ("v", kv)):
            linear(f"{name}.self_attn.{part}_proj", heads * dim, size, bias=bias)
        linear(f"{name}.self_attn.o_proj", size, q * dim, bias=bias)
        norm(f"{name}.self_attn.q_norm", dim)
        norm(f"{name}.self_attn.k_norm", dim)
        for part in ("gate", "up"):
            linear(f"{name}.mlp.{part}_proj", inner, size)
        linear(f"{name}.mlp.down_proj", size, inner)
        if head.method == "dflash2":
            taps, groups = head.flags["conv_kernel_size"], size // head.flags["conv_group_size"]
            for part in ("attention_conv", "mlp_conv"):
                base = torch.from_numpy(rng.normal(0, 0.4, (2, taps, size)))
                found[f"{name}.{part}.base_kernel"] = base
                linear(f"{name}.{part}.kernel_projection", 2 * taps * groups, size)
    if head.method == "dflash2":
        rank, tokens = head.flags["selector_rank"], target.vocab_size
        for book in ("predecessor_codebook", "successor_codebook"):
            found[f"candidate_selector.{book}"] = matrix(rng, tokens, rank) * rank**0.5
        linear("candidate_selector.hidden_projection", rank, size)
    rank = head.flags.get("markov_rank", 0)
    if rank:
        found["markov_head.markov_w1.weight"] = matrix(rng, target.vocab_size, rank) * rank**0.5
        found["markov_head.markov_w2.weight"] = matrix(rng, rows, rank)
        kind = head.flags["markov_head_type"]
        if kind == "gated":
            linear("markov_head.gate_proj", rank, size + rank, bias=True)
        elif kind == "rnn":
            linear("markov_head.joint_proj", 3 * rank, 2 * rank + size, bias=True)
    if head.flags.get("enable_confidence_head"):
        reads_markov = head.flags["confidence_head_with_markov"]
        linear("confidence_head.proj", 1, size + rank * reads_markov, bias=True)


def draw_dspark(rng: np.random.Generator, target: Any, form: str) -> PlainBlock:
    """A DSpark head of speculators or deepseek-ai, over its options."""
    head = draw_block(rng, target, form)
    head.method = "dspark"
    head.samples_anchor = form == "deepseek-ai" or bool(rng.random() < 0.5)
    head.flags = {
        "markov_rank": int(rng.choice([3, 6])),
        "markov_head_type": str(rng.choice(["vanilla", "gated", "rnn"])),
        "enable_confidence_head": bool(rng.random() < 0.7),
        "confidence_head_with_markov": bool(rng.random() < 0.6),
    }
    head.weights = {}
    draw_block_weights(
        rng, head, target, rows=target.vocab_size if head.ids is None else len(head.ids)
    )
    return head


def draw_dflash2(rng: np.random.Generator, target: Any, form: str) -> PlainBlock:
    """A DFlash2 head of speculators or z-lab, over its options."""
    head = draw_block(rng, target, form)
    head.method = "dflash2"
    is_z_lab = form == "z-lab"
    head.flags = {
        "conv_kernel_size": int(rng.integers(1, 4)),
        "conv_group_size": int(rng.choice([1, 2, head.layer["hidden_size"]])),
        "selector_rank": int(rng.choice([3, 6])),
        "selector_top_k": int(rng.choice([2, 5, target.vocab_size])),
        "final_logit_softcapping": 2.0 if is_z_lab and rng.random() < 0.5 else None,
        "output_multiplier": 0.6 if is_z_lab and rng.random() < 0.5 else 1.0,
    }
    head.embed_scale = 0.7 if is_z_lab and rng.random() < 0.5 else 1.0
    head.ids = None
    tables = {name: head.weights[name] for name in ("embed_tokens.weight", "lm_head.weight")}
    head.weights = {}
    draw_block_weights(rng, head, target, rows=target.vocab_size)
    head.weights |= tables if is_z_lab else {}
    return head


def draw_block(
    rng: np.random.Generator, target: Any, form: str, kind: type[PlainBlock] = PlainBlock
) -> PlainBlock:
    """A head of a format, over its options. z-lab's heads read the target's tables."""
    size = target.hidden_size
    layer = draw_layer(rng, target, kind="qwen3", size=size)
    if form == "deepseek-ai":
        for key in ("layer_types", "sliding_window", "use_sliding_window"):
            layer.pop(key, None)
    count = int(rng.integers(1, 4))
    least = 0 if form == "deepseek-ai" else 1
    ids = rng.permutation(np.arange(least, target.num_layers + 1))[:count]
    causal = {SLIDING: form == "z-lab" or bool(rng.random() < 0.5)}
    if form == "z-lab" and rng.random() < 0.6:
        causal = dict.fromkeys((SLIDING, "full_attention"), bool(rng.random() < 0.6))
    head = kind(
        method="dflash",
        layer=layer,
        weights={},
        aux_layer_ids=tuple(int(i) for i in ids),
        mask_token=int(rng.integers(0, target.vocab_size)),
        block_size=int(rng.integers(4, 10)),
        samples_anchor=form == "deepseek-ai",
        causal=causal,
    )
    rows = target.vocab_size
    if form == "speculators" and rng.random() < 0.6:
        rows -= 7
        head.ids = torch.from_numpy(rng.permutation(target.vocab_size)[:rows]).sort().values
    draw_block_weights(rng, head, target, rows=rows)
    if form == "z-lab":
        head.weights["embed_tokens.weight"] = target.table.weight
        head.weights["lm_head.weight"] = target.head.weight
        head.embed_scale = getattr(target, "embed_scale", None) or 1.0
        if rng.random() < 0.4:
            head.mask_embedding = matrix(rng, 1, size)[0] * size**0.5
    return head


def write_block(folder: Path, head: PlainBlock, target: Any, form: str) -> Path:
    """The head as its format's authors write it."""
    tensors = {name: tensor.contiguous() for name, tensor in head.weights.items()}
    if form == "speculators":
        return _write_speculators(folder, head, tensors, target)
    config = {
        **head.layer,
        "num_target_layers": target.num_layers,
        "block_size": head.block_size,
        "tie_word_embeddings": False,
    }
    outputs = [i - 1 for i in head.aux_layer_ids]
    if form == "deepseek-ai":
        config |= {
            "architectures": ["Qwen3DSparkModel"],
            "target_layer_ids": outputs,
            "mask_token_id": head.mask_token,
            "num_anchors": 512,
        }
        return write(folder, config | _heads(head), tensors)
    dflash = {"target_layer_ids": outputs, "mask_token_id": head.mask_token}
    if "full_attention" in head.causal:
        dflash["causal"] = head.causal["full_attention"]
    if head.method == "dflash2":
        dflash |= head.flags | {"input_embedding_scale": head.embed_scale}
    config |= {"architectures": [ARCHITECTURES[head.method]], "dflash_config": dflash}
    for name in ("embed_tokens.weight", "lm_head.weight"):
        del tensors[name]
    if head.mask_embedding is not None:
        tensors["mask_embedding"] = head.mask_embedding
    return write(folder, config, tensors)


def _heads(head: PlainBlock) -> dict[str, Any]:
    """Keys of DSpark's further heads."""
    plain = {"markov_rank": 0, "enable_confidence_head": False}
    return plain if head.method == "dflash" else head.flags


def _write_speculators(
    folder: Path, head: PlainBlock, tensors: dict[str, torch.Tensor], target: Any
) -> Path:
    k = head.block_size - (not head.samples_anchor)
    rows = len(head.weights["lm_head.weight"])
    if head.ids is not None:
        tensors["d2t"] = head.ids - torch.arange(rows)
    config = {
        "architectures": [ARCHITECTURES[head.method]],
        "speculators_model_type": head.method,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": head.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": k}],
            "verifier": {"name_or_path": "some/target"},
        },
        "aux_hidden_state_layer_ids": list(head.aux_layer_ids),
        "block_size": head.block_size,
        "draft_vocab_size": rows,
        "mask_token_id": head.mask_token,
        "sample_from_anchor": head.samples_anchor,
        "sliding_window_non_causal": not head.causal.get(SLIDING, False),
        "transformer_layer_config": head.layer,
    }
    return write(folder, config | _heads(head), tensors)
