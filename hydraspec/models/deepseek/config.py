"""DeepSeek-V3's config.json, read raw: the released keys and transformers' newer ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hydraspec.models.checkpoint.config_reader import ConfigReader
from hydraspec.models.parts import DecoderConfig, Divided
from hydraspec.models.rope_scaling import MAX_GAIN, Rope, read_rope, yarn_mscale

# Files may leave out values that equal transformers' (DeepseekV3Config), except widths.
DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 4096,
    # Only released files have these.
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}


@dataclass(slots=True, frozen=True, kw_only=True)
class ExpertsShape:
    """A mixture-of-experts layer: E routed experts in groups, and shared ones that always run."""

    num_experts: int
    top_k: int
    intermediate_size: int
    num_shared: int
    num_groups: int
    kept_groups: int
    renormalised: bool  # the k scores are made to sum to 1 before they are scaled
    scale: float


@dataclass(slots=True, frozen=True, kw_only=True)
class DeepseekConfig(DecoderConfig):
    """The model's shape. Heads are split as [nope, rope]; values have another width."""

    intermediate_size: int  # of dense layers
    num_layers: int
    num_dense_layers: int  # leading layers without experts
    num_mtp_layers: int  # after the last layer; a target ignores them
    q_rank: int | None  # None: queries are one projection
    kv_rank: int  # width of the cached latent
    nope_dim: int
    rope_dim: int
    value_dim: int
    attention_bias: bool
    rope: Rope  # of the rope part of a head; its gain is for cosines and sines
    rope_interleaved: bool  # pairs are (0, 1), (2, 3), ... in the checkpoint; else (i, i + r/2)
    score_scale: float  # 1/sqrt(query_dim), times YaRN's gain squared where the config asks
    experts: ExpertsShape | None

    @property
    def row_size(self) -> int:
        """Numbers cached per token and layer."""
        return self.kv_rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Width of a query head before absorption."""
        return self.nope_dim + self.rope_dim

    @property
    def divided(self) -> Divided:
        """Dimensions that tensor-parallel ranks divide. The shared experts' width is a multiple of
        a routed expert's.
        """
        widths = {"intermediate_size": self.intermediate_size}
        if self.experts is not None:
            widths["moe_intermediate_size"] = self.experts.intermediate_size
        return Divided(self.num_heads, {}, widths)


def read_deepseek_config(config: Mapping[str, Any], where: str) -> DeepseekConfig:
    """The shape in a raw config.json; `where` names the folder in messages.

    Raises CheckpointError for keys that are absent, out of range or not supported.
    """
    reader = ConfigReader(config, where, DEFAULTS)
    _refuse_unsupported(reader)
    num_layers, rope_dim = reader.count("num_hidden_layers"), reader.count("qk_rope_head_dim")
    if rope_dim % 2:
        raise reader.fail("qk_rope_head_dim", "an even number, since it is rotated in pairs")
    num_dense = reader.count("first_k_dense_replace", least=0)
    max_positions = reader.count("max_position_embeddings")
    num_mtp = reader.count("num_nextn_predict_layers", 0, least=0)
    return DeepseekConfig(
        vocab_size=reader.count("vocab_size"),
        hidden_size=reader.count("hidden_size"),
        intermediate_size=reader.count("intermediate_size"),
        num_layers=num_layers,
        num_dense_layers=num_dense,
        num_mtp_layers=num_mtp,
        num_heads=reader.count("num_attention_heads"),
        q_rank=None if config.get("q_lora_rank") is None else reader.count("q_lora_rank"),
        kv_rank=reader.count("kv_lora_rank"),
        nope_dim=reader.count("qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=reader.count("v_head_dim"),
        attention_bias=bool(reader.get("attention_bias", False)),
        max_position_embeddings=max_positions,
        rms_norm_eps=reader.eps("rms_norm_eps"),
        tied=bool(reader.get("tie_word_embeddings", False)),
        rope=read_rope(reader, rope_dim, max_positions),
        rope_interleaved=bool(reader.get("rope_interleave", True)),
        score_scale=_score_scale(reader, reader.count("qk_nope_head_dim") + rope_dim),
        experts=_experts_shape(reader) if num_dense < num_layers + num_mtp else None,
    )


def _score_scale(reader: ConfigReader, query_dim: int) -> float:
    """Factor of attention scores. It has YaRN's temperature, squared, where mscale_all_dim is set
    (as in every release).
    """
    values = reader.get("rope_scaling") or reader.get("rope_parameters") or {}
    part = ConfigReader(values, reader.where)
    stretched = values.get("rope_type", values.get("type", "default")) != "default"
    gain = 1.0
    if stretched and values.get("mscale_all_dim"):
        gain = yarn_mscale(part.number("factor"), part.number("mscale_all_dim", most=MAX_GAIN))
    return float(query_dim**-0.5 * gain**2)


def _refuse_unsupported(reader: ConfigReader) -> None:
    for key, only in (
        ("hidden_act", "silu"),
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("moe_layer_freq", 1),
    ):
        if reader.get(key) != only:
            raise reader.fail(key, f"{only!r}, the only one released")


def _experts_shape(reader: ConfigReader) -> ExpertsShape | None:
    if reader.get("n_routed_experts") is None:
        return None
    experts, top_k = reader.count("n_routed_experts"), reader.count("num_experts_per_tok")
    groups, kept = reader.count("n_group"), reader.count("topk_group")
    if experts % groups or experts // groups < 2:
        raise reader.fail(
            "n_group", f"a divisor of n_routed_experts {experts} with 2 or more experts a group"
        )
    if kept > groups:
        raise reader.fail("topk_group", f"at most n_group {groups}")
    if top_k > kept * (experts // groups):
        raise reader.fail(
            "num_experts_per_tok", f"at most the {kept * (experts // groups)} of the kept groups"
        )
    return ExpertsShape(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=reader.count("moe_intermediate_size"),
        num_shared=reader.count("n_shared_experts"),
        num_groups=groups,
        kept_groups=kept,
        renormalised=bool(reader.get("norm_topk_prob", True)),
        scale=reader.number("routed_scaling_factor"),
    )
