"""Our dense target computes what transformers' Llama, Mistral, Qwen2 and Qwen3 compute, and what
MiMo's definition says.
"""

import random
from pathlib import Path

import pytest
import torch
from dense_oracle import (
    make_dense,
    make_mimo,
    mimo_logits,
    oracle,
    random_config,
    small,
    to_old_rope_layout,
)
from gemma4_oracle import PagedRun, load, run_in_chunks
from torch import Tensor

# Share of the logit range: float32 sums in another order, through up to five layers.
TOLERANCE = 1e-4
SEEDS = range(30)

WINDOWS = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}


def prompts_of(seed: int, vocab: int = 96) -> list[list[int]]:
    """Three prompts, shorter than, about and well beyond a window."""
    draw = random.Random(seed)
    return [
        [draw.randrange(vocab) for _ in range(draw.randint(*n))]
        for n in [(2, 6), (7, 20), (21, 45)]
    ]


def logits_in_chunks(folder: Path, seed: int, prompts: list[list[int]]) -> list[Tensor]:
    run = PagedRun(load(folder), 3, block_size=random.Random(seed).choice([1, 4, 16]), seed=seed)
    run.slack = seed % 3 * 7
    return run_in_chunks(run, prompts, seed)


def assert_near(logits: Tensor, expected: Tensor) -> None:
    assert (logits - expected).abs().max() <= TOLERANCE * (expected.max() - expected.min())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("seed", SEEDS)
def test_logits_of_random_shapes_in_chunks(family: str, seed: int, tmp_path: Path) -> None:
    model = make_dense(family, random_config(family, seed), seed)
    model.save_pretrained(tmp_path)
    if seed % 2:
        to_old_rope_layout(tmp_path)
    prompts = prompts_of(seed)
    for prompt, logits in zip(prompts, logits_in_chunks(tmp_path, seed, prompts), strict=True):
        assert_near(logits, oracle(model, prompt)[0])


@pytest.mark.parametrize("seed", SEEDS)
def test_mimo_is_its_published_definition(seed: int, tmp_path: Path) -> None:
    config = random_config("qwen2", seed)
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 640000.0}
    for key in ("layer_types", "hidden_act"):  # its code has neither
        config.pop(key, None)
    weights = make_mimo(config, seed, tmp_path)
    prompts = prompts_of(seed)
    for prompt, logits in zip(prompts, logits_in_chunks(tmp_path, seed, prompts), strict=True):
        assert_near(logits, mimo_logits(weights, config, prompt))


def test_the_random_shapes_cover_every_field() -> None:
    drawn = {f: [random_config(f, s) for s in SEEDS] for f in ("llama", "mistral", "qwen2")}
    drawn["qwen3"] = [random_config("qwen3", s) for s in SEEDS]

    def is_sometimes(family: str, key: str) -> bool:
        used = [bool(config.get(key)) for config in drawn[family]]
        return 3 <= sum(used) < len(used)

    for family in drawn:
        assert is_sometimes(family, "tie_word_embeddings")
        assert is_sometimes(family, "hidden_act")
        kinds = {config["rope_parameters"]["rope_type"] for config in drawn[family]}
        assert kinds == {"default", "linear", "dynamic", "llama3", "yarn"}
    assert all(is_sometimes("llama", key) for key in ("attention_bias", "mlp_bias", "head_dim"))
    assert is_sometimes("mistral", "sliding_window")
    assert is_sometimes("qwen3", "attention_bias")
    for family in ("qwen2", "qwen3"):
        assert is_sometimes(family, "use_sliding_window")
        assert is_sometimes(family, "layer_types")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True}),
        ("mistral", {"sliding_window": 8}),
        ("ministral", {"layer_types": ["sliding_attention", "full_attention"] * 2, **WINDOWS}),
        ("qwen2", WINDOWS),
        ("qwen3", WINDOWS),
    ],
)
def test_greedy_tokens_match_generate(family: str, changes: dict, tmp_path: Path) -> None:
    model = make_dense(family, small(num_hidden_layers=4, **changes), 5)
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    prompt = prompts_of(5)[1]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
    run = PagedRun(load(tmp_path), 1)
    _, logits = run.step({0: prompt})[0]
    tokens = [*prompt, int(logits[-1].argmax())]
    while len(tokens) < len(prompt) + 24:
        _, logits = run.step({0: tokens[-1:]})[0]
        tokens.append(int(logits[-1].argmax()))
    assert tokens == expected[0].tolist()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_other_types_stay_near(family: str, tmp_path: Path) -> None:
    """float64 runs the CPU functions, bfloat16 the references, in the published order."""
    make_dense(family, small(), 3).save_pretrained(tmp_path)
    prompts = prompts_of(3)

    def logits_of(dtype: torch.dtype) -> list[Tensor]:
        return run_in_chunks(PagedRun(load(tmp_path, dtype), 3), prompts, 3)

    for wide, plain, narrow in zip(
        *map(logits_of, (torch.float64, torch.float32, torch.bfloat16)), strict=True
    ):
        span = wide.max() - wide.min()
        assert (wide - plain).abs().max() < TOLERANCE * span
        assert (wide - narrow).abs().max() < 0.1 * span
