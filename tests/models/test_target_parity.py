"""Our Gemma 4 target computes what transformers' Gemma4ForCausalLM computes, for every released
shape.
"""

import random
from pathlib import Path

import pytest
import torch
from gemma4_oracle import (
    FULL,
    SLIDING,
    PagedRun,
    load,
    make_target,
    oracle_logits,
    random_text_config,
    run_in_chunks,
    text_config,
    to_public_layout,
)

# Share of the logit range: float32 sums in another order, through up to seven layers.
TOLERANCE = 1e-4

RELEASED_SHAPES = {
    "31B: k_eq_v and global KV heads": text_config(attention_k_eq_v=True),
    "E2B: per-layer inputs, shared KV, double-wide": text_config(
        num_hidden_layers=7,
        layer_types=[SLIDING, SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL],
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=96,
        num_key_value_heads=1,
    ),
    "26B-A4B: experts": text_config(
        attention_k_eq_v=True,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=12,
    ),
}


def prompts_of(seed: int, vocab: int = 96) -> list[list[int]]:
    """Three prompts, shorter than, about and well beyond a window."""
    draw = random.Random(seed)
    return [
        [draw.randrange(vocab) for _ in range(draw.randint(*n))]
        for n in [(2, 6), (7, 20), (21, 45)]
    ]


def assert_parity(config: dict, folder: Path, seed: int, *, public: bool) -> None:
    oracle = make_target(config, seed)
    oracle.save_pretrained(folder)
    if public:
        to_public_layout(folder, config)
    run = PagedRun(load(folder), 3, block_size=random.Random(seed).choice([1, 4, 16]), seed=seed)
    run.slack = seed % 3 * 7
    prompts = prompts_of(seed)
    for prompt, logits in zip(prompts, run_in_chunks(run, prompts, seed), strict=True):
        expected = oracle_logits(oracle, prompt)
        span = expected.max() - expected.min()
        assert (logits - expected).abs().max() <= TOLERANCE * span


@pytest.mark.parametrize("seed", range(36))
def test_logits_of_random_shapes_in_chunks(seed: int, tmp_path: Path) -> None:
    assert_parity(random_text_config(seed), tmp_path, seed, public=seed % 2 == 0)


@pytest.mark.parametrize("name", RELEASED_SHAPES)
def test_logits_of_released_shapes(name: str, tmp_path: Path) -> None:
    assert_parity(RELEASED_SHAPES[name], tmp_path, 1, public=True)


@pytest.mark.parametrize("name", RELEASED_SHAPES)
def test_greedy_tokens_match_generate(name: str, tmp_path: Path) -> None:
    oracle = make_target(RELEASED_SHAPES[name], 5)
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


def test_the_random_shapes_cover_every_field() -> None:
    drawn = [random_text_config(seed) for seed in range(36)]
    for field in (
        *("attention_k_eq_v", "attention_bias", "enable_moe_block", "num_kv_shared_layers"),
        *("use_double_wide_mlp", "hidden_size_per_layer_input", "final_logit_softcapping"),
        "tie_word_embeddings",
    ):
        used = [bool(config.get(field)) for config in drawn]
        assert 3 <= sum(used) < len(used), field
    assert any(config["num_hidden_layers"] % 2 for config in drawn)


def test_narrow_types_stay_near_the_wide_one(tmp_path: Path) -> None:
    # bfloat16 runs the references: same weights, the published order of rounding.
    make_target(text_config(attention_k_eq_v=True), 3).save_pretrained(tmp_path)
    prompts = prompts_of(3)
    wide = run_in_chunks(PagedRun(load(tmp_path, torch.float64), 3), prompts, 3)
    narrow = run_in_chunks(PagedRun(load(tmp_path, torch.bfloat16), 3), prompts, 3)
    for a, b in zip(wide, narrow, strict=True):
        assert (a - b).abs().max() < 0.1 * (a.max() - a.min())


def test_float64_agrees_with_float32(tmp_path: Path) -> None:
    make_target(RELEASED_SHAPES["26B-A4B: experts"], 3).save_pretrained(tmp_path)
    prompts = prompts_of(4)
    wide = run_in_chunks(PagedRun(load(tmp_path, torch.float64), 3), prompts, 3)
    narrow = run_in_chunks(PagedRun(load(tmp_path), 3), prompts, 3)
    for a, b in zip(wide, narrow, strict=True):
        assert (a - b).abs().max() < TOLERANCE * (a.max() - a.min())
