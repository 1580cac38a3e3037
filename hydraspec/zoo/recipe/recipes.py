"""The shapes and training settings of every zoo checkpoint, by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import (
    DeepseekV3Config,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    Ministral3Config,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from hydraspec.zoo.recipe.draft_heads import LayerShape, Yarn
from hydraspec.zoo.recipe.tokenizer import VOCAB_SIZE

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
SEQUENCE_LENGTH = 136
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = Yarn(factor=32.0, length=64, beta_fast=1.0, beta_slow=0.25, query_beta=0.4)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
# Fields of all Gemma 4 targets. head_dim belongs to sliding layers, global_head_dim to full ones.
GEMMA4_COMMON: dict[str, Any] = {
    **_COMMON,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 32,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "gemma4": (Gemma4TextConfig, GEMMA4_COMMON),
    "gemma4_unified": (Gemma4UnifiedTextConfig, GEMMA4_COMMON),
    "qwen3": (Qwen3Config, {**_COMMON, "head_dim": 32}),
    "mistral": (MistralConfig, {**_COMMON, "head_dim": 32, "sliding_window": None}),
    "ministral3": (Ministral3Config, {**_COMMON, "head_dim": 32, "sliding_window": None}),
    "deepseek_v3": (DeepseekV3Config, _COMMON),
}


def layer_types(num_layers: int, every: int) -> list[str]:
    """Types of the layers: every `every`-th is full, and so is the last; others are sliding."""
    kinds = [FULL if (i + 1) % every == 0 else SLIDING for i in range(num_layers)]
    return [*kinds[:-1], FULL]


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a model's training."""

    steps: int
    learning_rate: float
    weight_decay: float
    batch_size: int
    seed: int

    @property
    def warmup_steps(self) -> int:
        """Number of first steps in which the learning rate rises."""
        return max(1, self.steps // 10)

    def rate(self, step: int, progress: float) -> float:
        """Learning rate: linear warm-up, flat to 30 % of the way, then linear to zero."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        return self.learning_rate * warm * min(1.0, max(0.0, (1 - progress) / 0.7))


@dataclass(frozen=True, kw_only=True)
class TargetRecipe(Training):
    """Config fields and training settings of a target."""

    shape: dict[str, Any]
    family: str = "gemma4"
    teacher: str | None = None  # the target that it is distilled from; None: trained from scratch
    start: str | None = None  # a trained target of the same tensors; None: from scratch
    batch_size: int = 256
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    seed: int = 1

    @property
    def warmup_steps(self) -> int:
        """Number of first steps in which the learning rate rises, the same for all targets that are
        trained from scratch."""
        return 200 if self.teacher is None and self.start is None else 20

    def config(self) -> Any:
        """A new config of the family's class."""
        kind, common = FAMILIES[self.family]
        return kind(**{**common, **self.shape})


@dataclass(frozen=True, kw_only=True)
class DraftRecipe(Training):
    """Shape and training settings of a drafter with its own KV. It has few steps on purpose, see
    README.md. Fields that a kind does not have keep their defaults."""

    kind: Literal["eagle3", "peagle", "eagle", "mtp"]
    target: str
    layer: LayerShape | None = None  # None: the target's own block (MTP)
    num_layers: int = 1
    start: str | None = None  # a trained head of the same tensors; None: from scratch
    aux_layer_ids: tuple[int, ...] = ()
    draft_vocab_size: int | None = None  # None: the target's
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    supports_mm_inputs: bool = False  # rows before those of images read the merged embedding
    batch_size: int = 128
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    step_weights: tuple[float, ...] = field(default=(1.0, 0.8, 0.6, 0.4))
    seed: int = 3


TARGETS: dict[str, TargetRecipe] = {
    # Dense; full layers use k_eq_v with one KV head, as the 31B model does.
    "tiny_gemma4": TargetRecipe(
        shape={
            "hidden_size": 160,
            "intermediate_size": 480,
            "num_hidden_layers": 16,
            "layer_types": layer_types(16, 6),
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        },
        steps=8500,
    ),
    # Per-layer inputs, shared KV and double-wide MLPs on the sharing layers, as E2B and E4B.
    "tiny_gemma4_e": TargetRecipe(
        shape={
            "hidden_size": 96,
            "intermediate_size": 224,
            "num_hidden_layers": 14,
            "layer_types": layer_types(14, 5),
            "num_key_value_heads": 1,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
        },
        steps=8900,
        learning_rate=2.5e-3,
    ),
    # A mixture of experts beside a dense MLP in every layer, as the 26B-A4B model.
    "tiny_gemma4_moe": TargetRecipe(
        shape={
            "hidden_size": 96,
            "intermediate_size": 128,
            "num_hidden_layers": 12,
            "layer_types": layer_types(12, 6),
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        steps=8000,
        learning_rate=2.5e-3,
    ),
    # The shape of the 12B: dense, k_eq_v full layers with one KV head. It is distilled on one core
    # of a CPU from a target with the same attention and with experts.
    "tiny_gemma4_unified": TargetRecipe(
        family="gemma4_unified",
        teacher="tiny_gemma4_moe",
        shape={
            "hidden_size": 96,
            "intermediate_size": 224,
            "num_hidden_layers": 12,
            "layer_types": layer_types(12, 6),
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
        },
        steps=240,
        batch_size=16,
        learning_rate=1e-3,
        weight_decay=0.01,
    ),
    # Norms over queries and keys, tied head. Deep and narrow, as the others below: on a CPU a step
    # over several rows then costs little more than a step over one.
    "tiny_qwen3": TargetRecipe(
        family="qwen3",
        shape={
            "hidden_size": 80,
            "intermediate_size": 192,
            "num_hidden_layers": 18,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        steps=5300,
        batch_size=192,
        learning_rate=2.5e-3,
    ),
    # Untied head, no window, as Mistral 7B v0.3.
    "tiny_mistral": TargetRecipe(
        family="mistral",
        shape={
            "hidden_size": 80,
            "intermediate_size": 200,
            "num_hidden_layers": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        steps=6900,
        batch_size=192,
        learning_rate=2e-3,
    ),
    # tiny_mistral's weights, trained on with YaRN, whose gain is not 1, and queries that grow from
    # position 64 on, which is inside the workload's texts. In Mistral's multimodal wrapper.
    "tiny_ministral3": TargetRecipe(
        family="ministral3",
        start="tiny_mistral",
        shape={
            "hidden_size": 80,
            "intermediate_size": 200,
            "num_hidden_layers": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": YARN.factor,
                "original_max_position_embeddings": YARN.length,
                "beta_fast": YARN.beta_fast,
                "beta_slow": YARN.beta_slow,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "llama_4_scaling_beta": YARN.query_beta,
            },
        },
        steps=160,
        batch_size=24,
        learning_rate=7e-4,
    ),
    # Latent attention; three dense layers, then experts in groups of two; one MTP layer last.
    "tiny_deepseek": TargetRecipe(
        family="deepseek_v3",
        shape={
            "hidden_size": 80,
            "intermediate_size": 160,
            "moe_intermediate_size": 24,
            "num_hidden_layers": 12,
            "first_k_dense_replace": 3,
            "num_key_value_heads": 4,
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 32,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 1,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        steps=4200,
        batch_size=192,
        learning_rate=2e-3,
    ),
}


DRAFTERS: dict[str, DraftRecipe] = {
    # The whole vocabulary, the normed state as residual.
    "tiny_qwen3-eagle3": DraftRecipe(
        kind="eagle3",
        target="tiny_qwen3",
        layer=LayerShape(hidden_size=80, intermediate_size=224),
        aux_layer_ids=(2, 9, 15),
        norm_before_residual=True,
        steps=330,
    ),
    # Half the vocabulary, a norm before fc, the raw state as residual.
    "tiny_gemma4-eagle3": DraftRecipe(
        kind="eagle3",
        target="tiny_gemma4",
        layer=LayerShape(hidden_size=160, intermediate_size=160, num_kv_heads=1),
        aux_layer_ids=(2, 8, 13),
        draft_vocab_size=384,
        norm_before_fc=True,
        steps=200,
    ),
    "tiny_qwen3-peagle": DraftRecipe(
        kind="peagle",
        target="tiny_qwen3",
        layer=LayerShape(hidden_size=80, intermediate_size=160, num_kv_heads=1),
        num_layers=2,
        aux_layer_ids=(2, 9, 15),
        norm_before_residual=True,
        steps=300,
    ),
    # Narrower than its target, norms on every aux state.
    "tiny_gemma4-peagle": DraftRecipe(
        kind="peagle",
        target="tiny_gemma4",
        layer=LayerShape(hidden_size=80, intermediate_size=192, num_kv_heads=1),
        num_layers=2,
        aux_layer_ids=(2, 8, 13),
        draft_vocab_size=384,
        fc_norm=True,
        steps=300,
    ),
    "tiny_mistral-eagle": DraftRecipe(
        kind="eagle",
        target="tiny_mistral",
        layer=LayerShape(hidden_size=80, intermediate_size=200, rope_theta=1e6),
        num_layers=2,
        steps=400,
    ),
    # Mistral's own layout says whether YaRN's gain is applied, and has no mscale_all_dim: the gain
    # of the head is larger than its target's.
    "tiny_ministral3-eagle": DraftRecipe(
        kind="eagle",
        target="tiny_ministral3",
        start="tiny_mistral-eagle",
        layer=LayerShape(hidden_size=80, intermediate_size=200, rope_theta=1e6, yarn=YARN),
        num_layers=2,
        batch_size=16,
        steps=40,
    ),
    # Goes into its target's own folder.
    "tiny_deepseek-mtp": DraftRecipe(
        kind="mtp", target="tiny_deepseek", step_weights=(1.0, 0.5, 0.3), steps=1000
    ),
}
