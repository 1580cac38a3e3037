"""Writes drafter heads as files in the published formats, and reads them into plain definitions.

EAGLE-3 and P-EAGLE use the speculators format, EAGLE-1 Mistral's consolidated format; an MTP layer
is a part of its target's file, in DeepSeek-V3's layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from hydraspec.models.checkpoint.mistral_names import consolidated_name, half_split, interleaved
from hydraspec.models.checkpoint.mistral_names import hugging_face_name as plain_name
from hydraspec.zoo.recipe.block_heads import BlockHead
from hydraspec.zoo.recipe.draft_heads import DraftHead, Eagle1Head, Eagle3Head, LayerShape, MTPHead
from hydraspec.zoo.recipe.modeling import ROUTER_BIAS, write_json, write_tensors
from hydraspec.zoo.recipe.recipes import CHECKPOINTS, DraftRecipe
from hydraspec.zoo.recipe.train_drafter import MASK_TOKEN_ID, build

MAX_POSITIONS = 2048
PROPOSED_DRAFTS = 3
SPECULATORS_VERSION = "0.9.0"
_ARCHITECTURES = {"eagle3": "Eagle3DraftModel", "peagle": "PEagleDraftModel"}


def folder_of(name: str, recipe: DraftRecipe, out: Path = CHECKPOINTS) -> Path:
    """The folder of a drafter's tensors, which for an MTP layer is its target's."""
    return out / (recipe.target if recipe.kind == "mtp" else name)


def save_head(head: DraftHead, recipe: DraftRecipe, target: PreTrainedModel, folder: Path) -> None:
    """Write a head's tensors in bfloat16, and its config, which an MTP layer has not."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.to(torch.bfloat16) for k, v in head.state_dict().items()}
    if isinstance(head, MTPHead):
        _save_mtp(head, target, folder)
    elif isinstance(head, Eagle1Head):
        write_tensors(folder, _to_consolidated(state, head.layer), "consolidated")
        write_json(folder / "params.json", _params(head, target))
    else:
        assert isinstance(head, Eagle3Head)
        if head.token_ids is not None:
            state |= vocabulary_tensors(head.token_ids, head.shape.vocab_size)
        write_tensors(folder, state)
        write_json(folder / "config.json", _speculators_config(head, recipe, target))


def vocabulary_tensors(token_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """The tensors d2t and t2d of a draft vocabulary, given by its ids [V_draft] of the target."""
    ids = token_ids.cpu()
    marks = torch.zeros(vocab_size, dtype=torch.bool)
    marks[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": marks}


def read_tensors(
    head: DraftHead | BlockHead, folder: Path, device: torch.device
) -> dict[str, Tensor]:
    """Read the weights of a saved head, and set its `token_ids` where the file has a vocabulary."""
    state: dict[str, Tensor] = load_file(folder / "model.safetensors")
    offsets = state.pop("d2t", None)
    state.pop("t2d", None)
    if offsets is not None:
        head.token_ids = (offsets + torch.arange(len(offsets))).to(device)
    return state


def proposals(
    algorithm: str, proposal: dict[str, Any], target: PreTrainedModel, name: str
) -> dict[str, Any]:
    """The `speculators_config` of a drafter for the zoo's target `name`."""
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {"architectures": [type(target).__name__], "name_or_path": f"zoo:{name}"},
    }


def load_head(folder: Path, recipe: DraftRecipe, target: PreTrainedModel) -> DraftHead:
    """A saved head in float32, on the target's device."""
    head = build(recipe, target.config)
    if isinstance(head, MTPHead):
        state = _read_mtp(target.config, folder)
    elif isinstance(head, Eagle1Head):
        state = _from_consolidated(load_file(folder / "consolidated.safetensors"), head.layer)
    else:
        state = read_tensors(head, folder, target.device)
    head.load_state_dict({k: v.float() for k, v in state.items()})
    return head.to(target.device).eval()


# ------------------------------------------------------------------ speculators


def _llama_config(shape: LayerShape, num_layers: int, vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": MAX_POSITIONS,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": vocab_size,
    }


def _speculators_config(
    head: Eagle3Head, recipe: DraftRecipe, target: PreTrainedModel
) -> dict[str, Any]:
    shape = head.shape
    proposal = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": PROPOSED_DRAFTS,
        "verifier_accept_k": 1,
    }
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[recipe.kind]],
        "draft_vocab_size": shape.draft_vocab_size,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": list(recipe.aux_layer_ids),
        "embed_requires_grad": recipe.kind == "peagle",
        "fc_norm": shape.fc_norm,
        "norm_before_fc": shape.norm_before_fc,
        "norm_before_residual": shape.norm_before_residual,
        "norm_output": shape.norm_output,
        "speculators_config": proposals(recipe.kind, proposal, target, recipe.target),
        "speculators_model_type": recipe.kind,
        "speculators_version": SPECULATORS_VERSION,
        "target_hidden_size": shape.target_size,
        "tie_word_embeddings": False,
        "transformer_layer_config": _llama_config(shape.layer, shape.num_layers, shape.vocab_size),
    }
    if shape.mask_token_id is not None:
        config["mask_token_id"] = MASK_TOKEN_ID
    if recipe.supports_mm_inputs:
        config["supports_mm_inputs"] = True
    return config


# ------------------------------------------------------------------ Mistral consolidated


def _params(head: Eagle1Head, target: PreTrainedModel) -> dict[str, Any]:
    shape = head.layer
    params: dict[str, Any] = {
        "dim": shape.hidden_size,
        "head_dim": shape.head_dim,
        "hidden_dim": shape.intermediate_size,
        "max_position_embeddings": MAX_POSITIONS,
        "n_heads": shape.num_heads,
        "n_kv_heads": shape.num_kv_heads,
        "n_layers": head.num_layers,
        "norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "tied_embeddings": False,
        "vocab_size": target.config.vocab_size,
    }
    if shape.yarn is not None:
        length = {"original_max_position_embeddings": shape.yarn.length}
        params["yarn"] = {
            "factor": shape.yarn.factor,
            "alpha": shape.yarn.beta_slow,
            "beta": shape.yarn.beta_fast,
            "apply_scale": True,
            **length,
        }
        params["llama_4_scaling"] = {"beta": shape.yarn.query_beta, **length}
    return params


def _rotary_heads(name: str, shape: LayerShape) -> int | None:
    if name.endswith("q_proj.weight"):
        return shape.num_heads
    return shape.num_kv_heads if name.endswith("k_proj.weight") else None


def _to_consolidated(state: dict[str, Tensor], shape: LayerShape) -> dict[str, Tensor]:
    found = {}
    for name, tensor in state.items():
        heads = _rotary_heads(name, shape)
        found[consolidated_name(f"model.{name}")] = (
            tensor if heads is None else interleaved(tensor, heads)
        )
    return found


def _from_consolidated(tensors: dict[str, Tensor], shape: LayerShape) -> dict[str, Tensor]:
    found = {}
    for public, tensor in tensors.items():
        name = plain_name(public).removeprefix("model.")
        heads = _rotary_heads(name, shape)
        found[name] = tensor if heads is None else half_split(tensor, heads)
    return found


# ------------------------------------------------------------------ MTP


def _save_mtp(head: MTPHead, target: PreTrainedModel, folder: Path) -> None:
    """Write an MTP layer into its target's file, with the copies of embedding and head."""
    prefix = f"model.layers.{target.config.num_hidden_layers}."
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    ours = {
        "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        "shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    for name, tensor in head.state_dict().items():
        ours |= _single_experts(name.removeprefix("block."), tensor)
    for name, tensor in ours.items():
        dtype = torch.float32 if name.endswith(ROUTER_BIAS) else torch.bfloat16
        tensors[prefix + name] = tensor.to(dtype)
    write_tensors(folder, tensors)


def _single_experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Tensors of single experts, as releases name them, from packed ones; others as they are."""
    stem, _, last = name.rpartition(".")
    if last == "down_proj":
        return {f"{stem}.{i}.down_proj.weight": part for i, part in enumerate(tensor)}
    if last != "gate_up_proj":
        return {name: tensor}
    found: dict[str, Tensor] = {}
    for i, both in enumerate(tensor):
        gate, up = both.chunk(2)
        found |= {f"{stem}.{i}.gate_proj.weight": gate, f"{stem}.{i}.up_proj.weight": up}
    return found


def _read_mtp(config: Any, folder: Path) -> dict[str, Tensor]:
    prefix = f"model.layers.{config.num_hidden_layers}."
    tensors = {
        name.removeprefix(prefix): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.startswith(prefix)
    }
    del tensors["embed_tokens.weight"], tensors["shared_head.head.weight"]
    experts = range(config.n_routed_experts)
    stem = "mlp.experts"
    gates = [tensors.pop(f"{stem}.{i}.gate_proj.weight") for i in experts]
    ups = [tensors.pop(f"{stem}.{i}.up_proj.weight") for i in experts]
    downs = [tensors.pop(f"{stem}.{i}.down_proj.weight") for i in experts]
    pairs = zip(gates, ups, strict=True)
    tensors[f"{stem}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
    tensors[f"{stem}.down_proj"] = torch.stack(downs)
    own = ("enorm.", "hnorm.", "eh_proj.", "shared_head.")
    return {(k if k.startswith(own) else f"block.{k}"): v for k, v in tensors.items()}
