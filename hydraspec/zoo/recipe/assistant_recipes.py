"""The shapes and training settings of the zoo's assistants, by the name of their target."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import (
    Gemma4AssistantConfig,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedTextConfig,
)

from hydraspec.zoo.recipe.recipes import FULL, GEMMA4_COMMON, SLIDING, Training


@dataclass(frozen=True, kw_only=True)
class AssistantRecipe(Training):
    """Shape and training settings of a two-layer assistant (sliding, full). It has few steps on
    purpose, see README.md."""

    teacher: str | None = None  # the target whose assistant it begins as; None: from scratch
    hidden_size: int = 64
    intermediate_size: int = 64
    num_centroids: int | None = None
    centroid_top_k: int = 6
    batch_size: int = 256
    learning_rate: float = 4e-3
    weight_decay: float = 0.01
    num_draft_steps: int = 4
    step_weights: tuple[float, ...] = field(default=(1.0, 0.8, 0.6, 0.3))
    seed: int = 2

    def config(
        self, target: Gemma4TextConfig | Gemma4UnifiedTextConfig
    ) -> Gemma4AssistantConfig | Gemma4UnifiedAssistantConfig:
        """The assistant's config; its KV shapes are the target's."""
        layer = {kind: target.layer_types.index(kind) for kind in (SLIDING, FULL)}
        kv_heads = {k: target.per_layer_config[i].num_key_value_heads for k, i in layer.items()}
        shape = {
            **GEMMA4_COMMON,
            "num_key_value_heads": kv_heads[SLIDING],
            "num_global_key_value_heads": kv_heads[FULL],
            "attention_k_eq_v": target.attention_k_eq_v,
            "sliding_window": target.sliding_window,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 2,
            "num_kv_shared_layers": 2,
            "layer_types": [SLIDING, FULL],
            "final_logit_softcapping": None,
        }
        kind: type[Gemma4AssistantConfig | Gemma4UnifiedAssistantConfig]
        kind = Gemma4UnifiedAssistantConfig
        if isinstance(target, Gemma4TextConfig):
            kind = Gemma4AssistantConfig
            shape |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
        return kind(
            text_config={**shape, "model_type": target.model_type},
            backbone_hidden_size=target.hidden_size,
            use_ordered_embeddings=self.num_centroids is not None,
            num_centroids=self.num_centroids or 2048,
            centroid_intermediate_top_k=self.centroid_top_k if self.num_centroids else 32,
            tie_word_embeddings=True,
        )


ASSISTANTS: dict[str, AssistantRecipe] = {
    "tiny_gemma4": AssistantRecipe(steps=200),
    "tiny_gemma4_e": AssistantRecipe(steps=150, num_centroids=32),
    "tiny_gemma4_moe": AssistantRecipe(steps=150),
    "tiny_gemma4_unified": AssistantRecipe(
        teacher="tiny_gemma4_moe", steps=40, batch_size=16, learning_rate=1e-3
    ),
}
