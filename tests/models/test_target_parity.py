"""Our targets compute what transformers' models compute; MiMo, which transformers lacks, what its
published definition says."""

from pathlib import Path

import pytest
import torch
from deepseek_oracle import deepseek_config
from dense_oracle import small
from gemma4_oracle import FULL, SLIDING, PagedRun, load, text_config
from grids import slow_unless
from target_families import (
    DENSE,
    FAMILIES,
    assert_near,
    logits_in_chunks,
    logits_of_dtype,
    mimo_config,
    mimo_oracle,
    prompts_of,
)

# Share of the logit range: float32 sums in another order, through up to seven layers (absorbed
# projections among them).
TOLERANCE = 1e-4
NUM_QUICK = 20  # shapes of a family, which cover every field
RANDOM_SHAPES = [
    (name, seed)
    for name in ("gemma4", "deepseek_v3", *DENSE, "ministral3")
    for seed in range(FAMILIES[name].num_shapes)
]

E2B = text_config(
    num_hidden_layers=7,
    layer_types=[SLIDING, SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL],
    num_kv_shared_layers=3,
    use_double_wide_mlp=True,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=96,
    num_key_value_heads=1,
)
A4B = text_config(
    attention_k_eq_v=True,
    enable_moe_block=True,
    num_experts=8,
    top_k_experts=2,
    moe_intermediate_size=12,
)
YARN = {  # of Mistral Medium 3.5
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 64.0, "beta_fast": 4.0, "beta_slow": 1.0},
    **{"original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 0.0},
    "llama_4_scaling_beta": 0,
}
WINDOWS = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
RELEASED_SHAPES = {
    "31B: k_eq_v and global KV heads": ("gemma4", text_config(attention_k_eq_v=True)),
    "E2B: per-layer inputs, shared KV, double-wide": ("gemma4", E2B),
    "26B-A4B: experts": ("gemma4", A4B),
    "deepseek": ("deepseek_v3", deepseek_config()),
    "llama": ("llama", small(num_hidden_layers=4, attention_bias=True)),
    "mistral": ("mistral", small(num_hidden_layers=4, sliding_window=8)),
    "ministral": (
        "ministral",
        small(
            num_hidden_layers=4,
            layer_types=["sliding_attention", "full_attention"] * 2,
            **WINDOWS,
        ),
    ),
    "ministral3": (
        "ministral3",
        small(num_hidden_layers=4, rope_parameters=YARN | {"llama_4_scaling_beta": 0.5}),
    ),
    "qwen2": ("qwen2", small(num_hidden_layers=4, **WINDOWS)),
    "qwen3": ("qwen3", small(num_hidden_layers=4, **WINDOWS)),
}


def assert_parity(name: str, config: dict, seed: int, folder: Path, *, relaid: bool) -> None:
    family = FAMILIES[name]
    model = family.make(config, seed)
    model.save_pretrained(folder)
    if relaid:
        family.relayout(folder, config)
    for prompt, logits in logits_in_chunks(folder, seed):
        assert_near(logits, family.logits(model, prompt), TOLERANCE)


@pytest.mark.parametrize(
    ("name", "seed"), slow_unless(lambda _, seed: seed < NUM_QUICK, RANDOM_SHAPES)
)
def test_logits_of_random_shapes_in_chunks(name: str, seed: int, tmp_path: Path) -> None:
    family = FAMILIES[name]
    assert_parity(name, family.random_config(seed), seed, tmp_path, relaid=family.is_relaid(seed))


@pytest.mark.parametrize(
    "seed", slow_unless(lambda seed: seed < NUM_QUICK, ((seed,) for seed in range(30)))
)
def test_mimo_is_its_published_definition(seed: int, tmp_path: Path) -> None:
    logits_of = mimo_oracle(mimo_config(seed), seed, tmp_path)
    for prompt, logits in logits_in_chunks(tmp_path, seed):
        assert_near(logits, logits_of(prompt), TOLERANCE)


@pytest.mark.parametrize("shape", [name for name in RELEASED_SHAPES if ":" in name])
def test_logits_of_released_shapes(shape: str, tmp_path: Path) -> None:
    assert_parity(*RELEASED_SHAPES[shape], 1, tmp_path, relaid=True)


@pytest.mark.parametrize("shape", RELEASED_SHAPES)
def test_greedy_tokens_match_generate(shape: str, tmp_path: Path) -> None:
    name, config = RELEASED_SHAPES[shape]
    oracle = FAMILIES[name].make(config, 5)
    oracle.generation_config.eos_token_id = None
    oracle.save_pretrained(tmp_path)
    prompt = prompts_of(5)[1]
    expected = oracle.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
    run = PagedRun(load(tmp_path), 1)
    _, logits = run.step({0: prompt})[0]
    tokens = [*prompt, int(logits[-1].argmax())]
    while len(tokens) < len(prompt) + 24:
        _, logits = run.step({0: tokens[-1:]})[0]
        tokens.append(int(logits[-1].argmax()))
    assert tokens == expected[0].tolist()


@pytest.mark.parametrize(
    "shape", ["31B: k_eq_v and global KV heads", "26B-A4B: experts", "deepseek", "llama", "qwen3"]
)
def test_other_types_stay_near(shape: str, tmp_path: Path) -> None:
    """float64 runs the CPU's functions as float32 does; bfloat16 runs the references, in the
    published order of rounding."""
    name, config = RELEASED_SHAPES[shape]
    FAMILIES[name].make(config, 3).save_pretrained(tmp_path)
    wide, plain, narrow = (
        logits_of_dtype(tmp_path, dtype, 3)
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    )
    assert_near(plain, wide, TOLERANCE)
    if shape in ("26B-A4B: experts", "deepseek"):
        # Rounding changes which experts near ties choose, so only most rows stay near.
        off = (narrow - wide).abs().amax(-1) / (wide.max() - wide.min())
        assert off.median() < 0.05
    else:
        assert_near(narrow, wide, 0.1)


def uses(name: str, key: str) -> int:
    """Quick shapes of a family whose configuration sets `key`."""
    family = FAMILIES[name]
    return sum(bool(family.random_config(seed).get(key)) for seed in range(NUM_QUICK))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("gemma4", ["attention_k_eq_v", "attention_bias", "enable_moe_block"]),
        ("gemma4", ["num_kv_shared_layers", "use_double_wide_mlp", "tie_word_embeddings"]),
        ("gemma4", ["hidden_size_per_layer_input", "final_logit_softcapping"]),
        ("deepseek_v3", ["norm_topk_prob", "rope_interleave", "attention_bias"]),
        ("deepseek_v3", ["tie_word_embeddings", "q_lora_rank"]),
        ("llama", ["tie_word_embeddings", "hidden_act", "attention_bias", "mlp_bias", "head_dim"]),
        ("mistral", ["tie_word_embeddings", "hidden_act", "sliding_window"]),
        ("qwen2", ["tie_word_embeddings", "hidden_act", "use_sliding_window", "layer_types"]),
        ("qwen3", ["tie_word_embeddings", "hidden_act", "use_sliding_window", "layer_types"]),
        ("qwen3", ["attention_bias"]),
    ],
)
def test_the_random_shapes_cover_every_field(name: str, keys: list[str]) -> None:
    for key in keys:
        assert 3 <= uses(name, key) < NUM_QUICK, key


def test_the_random_shapes_cover_ropes_and_depths() -> None:
    for name in DENSE:
        drawn = [FAMILIES[name].random_config(seed)["rope_parameters"] for seed in range(NUM_QUICK)]
        kinds = {rope["rope_type"] for rope in drawn}
        assert kinds == {"default", "linear", "dynamic", "llama3", "yarn"}
    gemma4 = [FAMILIES["gemma4"].random_config(seed) for seed in range(NUM_QUICK)]
    assert any(config["num_hidden_layers"] % 2 for config in gemma4)
    growing = [
        FAMILIES["ministral3"].random_config(seed)["rope_parameters"]
        for seed in range(FAMILIES["ministral3"].num_shapes)
    ]
    for key, value in (("mscale_all_dim", 0), ("mscale", 1), ("llama_4_scaling_beta", 0)):
        assert 3 <= sum(rope[key] == value for rope in growing) <= 9, key
    deepseek = [FAMILIES["deepseek_v3"].random_config(seed) for seed in range(NUM_QUICK)]
    assert any(config["first_k_dense_replace"] == 0 for config in deepseek)
    dense = [c for c in deepseek if c["first_k_dense_replace"] >= c["num_hidden_layers"]]
    assert 0 < len(dense) < NUM_QUICK
    ropes = [config["rope_parameters"] for config in deepseek]
    assert any("attention_factor" in rope for rope in ropes)
    assert any("mscale" in rope and rope.get("mscale_all_dim") == 0.5 for rope in ropes)
