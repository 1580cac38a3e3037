"""Building, masking, running and saving transformers' classes the way the zoo needs them.

The Gemma 4 side is here; what differs for the other families is in plain_targets.py.

Letters: B batch, T target rows, Q draft rows, D target hidden width, K draft steps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts

from hydraspec.zoo.recipe.plain_targets import load_plain, run_plain
from hydraspec.zoo.recipe.recipes import FULL, SLIDING

Masks = dict[str, Tensor]
SharedKV = dict[str, tuple[Tensor, Tensor]]


@dataclass
class TargetOutput:
    """Outputs of a target's forward pass that the drafter reads."""

    hidden: Tensor  # [B, T, D] after the final norm
    logits: Tensor  # [B, T, V]
    kv: SharedKV  # Gemma 4: per layer type, keys and values [B, kv heads, T, head dim]
    aux: list[Tensor] = field(default_factory=list)  # [B, T, D] per aux layer id


def dense_experts(
    experts: Gemma4TextExperts, hidden: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """All experts on all tokens, weighted: wasteful but static, so that a CUDA graph can hold it.

    hidden [N, D], index and weights [N, k] -> [N, D].
    """
    gate, up = torch.einsum("nd,eid->nei", hidden, experts.gate_up_proj).chunk(2, dim=-1)
    per_expert = torch.zeros(len(hidden), experts.num_experts, device=hidden.device)
    per_expert = per_expert.scatter(1, index, weights.float()).to(hidden.dtype)
    inner = experts.act_fn(gate) * up * per_expert[:, :, None]
    return torch.einsum("nei,edi->nd", inner, experts.down_proj)


ALL_EXPERTS_FUNCTIONS.register("zoo_dense", dense_experts)


def initialise(model: nn.Module, seed: int) -> None:
    """Fan-in scaled matrices, query and key norms that give attention logits of deviation 2.

    transformers' defaults (all norms 1, attention scale 1) start with near one-hot attention.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            nn.init.constant_(parameter, 2**0.5 * parameter.numel() ** -0.25)
        elif parameter.dim() >= 2:
            std = parameter.shape[-1] ** -0.5
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * std)


def vary_layer_scalars(model: Gemma4ForCausalLM) -> None:
    """Fix `layer_scalar` to values other than 1, so that a reader that loses them is found out."""
    for i, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_((1.0, 0.9375, 1.0625)[i % 3])


def causal_masks(length: int, window: int, device: torch.device) -> Masks:
    """Boolean masks [1, 1, T, T], true where a row may look."""
    rows = torch.arange(length, device=device)[None]
    return draft_masks(rows, length, window)


def draft_masks(rows: Tensor, length: int, window: int) -> Masks:
    """Masks [B, 1, Q, T] of draft rows at positions `rows` [B, Q].

    Full layers see 0..p, sliding layers the last `window` entries of it.
    """
    keys = torch.arange(length, device=rows.device)
    behind = rows[:, None, :, None] - keys
    return {FULL: behind >= 0, SLIDING: (behind >= 0) & (behind < window)}


def target_masks(model: PreTrainedModel, length: int) -> Masks:
    """Attention masks for `run_target`."""
    if not isinstance(model, Gemma4ForCausalLM):
        return {}
    return causal_masks(length, model.config.sliding_window, model.device)


def run_target(
    model: PreTrainedModel, tokens: Tensor, masks: Masks, aux_layer_ids: Sequence[int] = ()
) -> TargetOutput:
    """An uncached forward pass over tokens [B, T].

    Aux id i is the residual stream after i layers, below the number of layers.
    """
    if not isinstance(model, Gemma4ForCausalLM):
        hidden, logits, aux = run_plain(model, tokens, aux_layer_ids)
        return TargetOutput(hidden, logits, {}, aux)
    kv: SharedKV = {}
    output = model.model(
        input_ids=tokens,
        attention_mask=masks,
        use_cache=False,
        shared_kv_states=kv,
        output_hidden_states=bool(aux_layer_ids),
    )
    aux = [output.hidden_states[i] for i in aux_layer_ids]
    hidden = output.last_hidden_state
    return TargetOutput(hidden, target_logits(model, hidden), kv, aux)


def target_logits(model: Any, hidden: Tensor) -> Tensor:
    """[..., D] after the final norm -> [..., V]."""
    logits: Tensor = model.lm_head(hidden).float()
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def run_draft_step(
    assistant: Gemma4AssistantForCausalLM,
    embedded: Tensor,
    hidden: Tensor,
    rows: Tensor,
    kv: SharedKV,
    masks: Masks,
) -> tuple[Tensor, Tensor]:
    """A draft step for every row: the scaled target embedding and the backbone hidden [B, Q, D].

    Returns the draft's normed state [B, Q, draft width] and the hidden state of the next step
    [B, Q, D]. All steps of a row use its position p, the last one with target KV.
    """
    state = assistant.model(
        inputs_embeds=assistant.pre_projection(torch.cat([embedded, hidden], dim=-1)),
        attention_mask=masks,
        position_ids=rows,
        shared_kv_states=kv,
        use_cache=False,
    ).last_hidden_state
    return state, assistant.post_projection(state)


def _public_layout(config: dict[str, Any]) -> dict[str, Any]:
    """Text config in the layout of the released checkpoints.

    transformers saves full layers' head size and KV heads as `per_layer_config`; released files
    have `global_head_dim` and `num_global_key_value_heads`. Also drops what is only a default of
    the generic config class.
    """
    config = dict(config)
    overrides = list(config.pop("per_layer_config").values())
    config["global_head_dim"] = overrides[0]["head_dim"]
    config["num_global_key_value_heads"] = overrides[0].get("num_key_value_heads")
    generic = ("_name_or_path", "chunk_size_feed_forward", "id2label", "label2id", "problem_type")
    for key in (*generic, "is_encoder_decoder", "return_dict", "output_attentions"):
        config.pop(key, None)
    config.pop("output_hidden_states", None)
    return dict(sorted(config.items()))


def save_checkpoint(model: PreTrainedModel, folder: Path, stop_tokens: list[int]) -> None:
    """Save in bfloat16 with `save_pretrained`, the config in the released layout."""
    model.generation_config.bos_token_id = 2
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = stop_tokens
    model.to(torch.bfloat16).save_pretrained(str(folder))
    (folder / "model.safetensors").chmod(0o644)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if "text_config" in config:
        config["text_config"] = _public_layout(config["text_config"])
        config["text_config"]["eos_token_id"] = stop_tokens
    else:
        config = _public_layout(config)
    config["eos_token_id"] = stop_tokens
    path.write_text(json.dumps(config, indent=2) + "\n")


def load_target(folder: Path, device: torch.device | str = "cpu") -> PreTrainedModel:
    """The saved bfloat16 weights, run in float32."""
    if json.loads((folder / "config.json").read_text())["model_type"] != "gemma4_text":
        return load_plain(folder, device)
    model: PreTrainedModel = Gemma4ForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    return model.to(device).eval()


def load_assistant(folder: Path, device: torch.device | str = "cpu") -> Gemma4AssistantForCausalLM:
    """The assistant of a folder, in float32, for evaluation."""
    model = Gemma4AssistantForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    return model.to(device).eval()
