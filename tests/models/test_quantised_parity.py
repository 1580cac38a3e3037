"""Our quantised targets compute what transformers with compressed-tensors computes from the same
folder; layouts that it lacks, what their published definitions say.

Rounding to e4m3 turns the noise of float32 into whole steps, so most comparisons run in float64.
"""

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_oracle import make_dense, small
from gemma4_oracle import random_text_config
from grids import slow_unless
from quantised_folders import (
    FORMATS,
    IGNORED,
    Quantised,
    calibrated,
    drawn_scheme,
    library_oracle,
    oracle_logits,
    quantise,
    random_shape,
    shaken_logits,
)
from quantised_reference import (
    plain_reference,
    to_transformers_fp8,
    write_expert_channels,
    write_mistral,
)
from target_families import FAMILIES, assert_near, logits_in_chunks, prompts_of
from transformers import PreTrainedModel

from hydraspec.models.checkpoint.quantization import decode

# Shares of the logit range. In float64 sums differ in the last bits (measured: 7e-15), and a number
# that rounds the other way moves logits by 1e-3 and more.
TOLERANCE = 1e-9
FLOAT32_TOLERANCE = 1e-4
NOISE = 1e-6  # of a number and of its row, several times float32's own
NUM_TRIALS = 8  # draws of noise that leave a stable prompt's logits where they are
FAMILY_NAMES = ("gemma4", "llama", "qwen3")
NUM_SHAPES, NUM_QUICK = 8, 2  # of a format and family
SHAPES = [
    (name, family, seed)
    for name in FORMATS
    for family in FAMILY_NAMES
    for seed in range(NUM_SHAPES)
]


def is_quick(name: str, family: str, seed: int) -> bool:
    """One shape of each format and family; formats and families each meet both of the first."""
    return seed == (list(FORMATS).index(name) + FAMILY_NAMES.index(family)) % NUM_QUICK


RANDOM_SHAPES = slow_unless(is_quick, SHAPES)


def written(name: str, family: str, seed: int, folder: Path) -> tuple[PreTrainedModel, Quantised]:
    """A random model and its quantised folder."""
    draw = random.Random(f"{name} {family} {seed}")
    scheme = drawn_scheme(name, draw)
    model = FAMILIES[family].make(random_shape(family, seed, scheme.columns or 1), seed)
    scales = None
    if name == "fp8_static":  # each projection has its own, even of the same inputs
        found = calibrated(model, prompts_of(seed))
        scales = {module: scale * draw.uniform(1, 1.2) for module, scale in found.items()}
    dtype = draw.choice([torch.float32, torch.bfloat16])
    ignore = IGNORED[seed % len(IGNORED)]
    return model, quantise(
        folder, model, scheme, ignore=ignore, scale_dtype=dtype, input_scales=scales
    )


@pytest.mark.parametrize(("name", "family", "seed"), RANDOM_SHAPES)
def test_the_oracle_is_the_published_arithmetic(
    name: str, family: str, seed: int, tmp_path: Path
) -> None:
    """It decompresses what `decode` reads, and rounds inputs as the plain reference does."""
    model, quantised = written(name, family, seed, tmp_path)
    oracle, prompt = library_oracle(tmp_path, type(model)), prompts_of(seed)[1]
    logits = oracle_logits(oracle, prompt)
    for module in quantised.modules:
        linear = oracle.get_submodule(module)
        weight = decode(quantised.of(module), quantised.scheme, linear.in_features)
        assert torch.equal(linear.weight.float(), weight)
    assert torch.equal(oracle_logits(plain_reference(model, quantised), prompt), logits)
    unrounded = plain_reference(model, quantised, float_rows=("",))
    off = (oracle_logits(unrounded, prompt) - logits).abs().max()
    assert (off > 1e-3 * (logits.max() - logits.min())) == (name != "w4a16")


def assert_parity(folder: Path, oracle: PreTrainedModel, seed: int) -> None:
    """Logits and greedy tokens of every position of three prompts are the oracle's, in float64."""
    for prompt, logits in logits_in_chunks(folder, seed, torch.float64):
        expected = oracle_logits(oracle, prompt)
        assert_near(logits, expected, TOLERANCE)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(("name", "family", "seed"), RANDOM_SHAPES)
def test_logits_of_random_shapes_in_chunks(
    name: str, family: str, seed: int, tmp_path: Path
) -> None:
    model, _ = written(name, family, seed, tmp_path)
    assert_parity(tmp_path, library_oracle(tmp_path, type(model)), seed)


@pytest.mark.parametrize(
    ("name", "seeds"),
    slow_unless(
        lambda _, seeds: len(seeds) == NUM_QUICK,
        [(name, range(n)) for name in FORMATS for n in (NUM_QUICK, NUM_SHAPES)],
    ),
)
def test_float32_where_noise_moves_nothing(name: str, seeds: range, tmp_path: Path) -> None:
    """In float32 a number within rounding noise of the middle between two of e4m3 falls to either
    side, so that only prompts whose logits withstand noise on every rounded row count."""
    stable, others = [], []  # how far prompts are off, as shares of the tolerance
    for family, seed in ((family, seed) for family in FAMILY_NAMES for seed in seeds):
        folder = tmp_path / f"{family} {seed}"
        model, quantised = written(name, family, seed, folder)
        oracle = library_oracle(folder, type(model))
        for prompt, logits in logits_in_chunks(folder, seed):
            expected = oracle_logits(oracle, prompt)
            limit = FLOAT32_TOLERANCE * (expected.max() - expected.min())
            shaken = (
                shaken_logits(oracle, quantised.modules, prompt, NOISE, trial)
                for trial in range(NUM_TRIALS)
            )
            is_stable = all((each - expected).abs().max() <= limit for each in shaken)
            (stable if is_stable else others).append(float((logits - expected).abs().max() / limit))
    total = len(stable) + len(others)
    flipped = sum(off > 1 for off in others)
    logging.info(
        "%s: %d of %d prompts are stable, off by %.2g of the tolerance; %d of the others flipped",
        *(name, len(stable), total, max(stable), flipped),
    )
    assert max(stable) <= 1
    assert len(stable) >= (total if name == "w4a16" else 0.25 * total)
    assert flipped <= 0.25 * total


@pytest.mark.parametrize("block", [(128, 128), (16, 16), (24, 10), None], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("inputs", ["dynamic", "static"])
def test_transformers_own_fp8(
    family: str, block: tuple[int, int] | None, inputs: str, tmp_path: Path
) -> None:
    """Blocks that do not divide the matrices, and one scale for all; scales of inputs likewise."""
    model = FAMILIES[family].make(FAMILIES[family].random_config(4), 4)
    scales = calibrated(model, prompts_of(4)) if inputs == "static" else None
    model.save_pretrained(tmp_path)
    quantised = to_transformers_fp8(tmp_path, block, scales)
    assert_parity(tmp_path, plain_reference(model, quantised), 4)


@pytest.mark.parametrize(
    "seed", slow_unless(lambda seed: seed < 3, ((seed,) for seed in range(24)))
)
def test_deepseek_in_blocks(seed: int, tmp_path: Path) -> None:
    """The matrix that attention absorbs is dequantised, and its rows are not rounded."""
    model = FAMILIES["deepseek_v3"].make(FAMILIES["deepseek_v3"].random_config(seed), seed)
    block = [(16, 16), (128, 128), (8, 12)][seed % 3]
    model.save_pretrained(tmp_path)
    quantised = to_transformers_fp8(tmp_path, block)
    oracle = plain_reference(model, quantised, float_rows=("kv_b_proj",))
    oracle.set_experts_implementation("eager")
    assert_parity(tmp_path, oracle, seed)


@pytest.mark.parametrize(
    "seed", slow_unless(lambda seed: seed < 2, ((seed,) for seed in range(12)))
)
def test_gemma4_experts_one_by_one(seed: int, tmp_path: Path) -> None:
    config = random_text_config(seed) | {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 1 + seed % 3,
        "moe_intermediate_size": 12,
    }
    model = FAMILIES["gemma4"].make(config, seed)
    quantised = write_expert_channels(tmp_path, model)
    assert_parity(tmp_path, plain_reference(model, quantised), seed)


@pytest.mark.parametrize("apply_scale", [True, False])
@pytest.mark.parametrize("window", [None, 8])
def test_mistral_in_its_own_format(window: int | None, apply_scale: bool, tmp_path: Path) -> None:
    """Static scales, one for each matrix and one for its inputs, and YaRN as released."""
    yarn = {"factor": 16, "original_max_position_embeddings": 16, "alpha": 1, "beta": 4}
    rope: dict[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16,
        "beta_slow": 1,
        "beta_fast": 4,
    }
    if not apply_scale:
        rope["attention_factor"] = 1.0
    config = small(rope_parameters=rope, sliding_window=window)
    model = make_dense("mistral", config, 6)
    scales = calibrated(model, prompts_of(6))
    quantised = write_mistral(tmp_path, model, scales, yarn | {"apply_scale": apply_scale})
    assert_parity(tmp_path, plain_reference(model, quantised), 6)
