"""Our quantised targets compute what transformers with compressed-tensors computes from the same
folder; layouts that it lacks, what their published definitions say.

Rounding to e4m3 turns the noise of float32 into whole steps, so most comparisons run in float64.
"""

import random
from pathlib import Path

import pytest
import torch
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
)
from quantised_reference import (
    plain_reference,
)
from target_families import FAMILIES, prompts_of
from transformers import PreTrainedModel

from hydraspec.models.checkpoint.quantization import decode

FAMILY_NAMES = ("gemma4", "llama", "qwen3")
NUM_SHAPES, NUM_QUICK = 8, 2  # of a format and family
SHAPES = [
    (name, family, seed)
    for name in FORMATS
    for family in FAMILY_NAMES
    for seed in range(NUM_SHAPES)
]
RANDOM_SHAPES = slow_unless(lambda name, family, seed: seed < NUM_QUICK, SHAPES)


def written(name: str, family: str, seed: int, folder: Path) -> tuple[PreTrainedModel, Quantised]:
    """A random model and its quantised folder."""
    draw = random.Random(f"{name} {family} {seed}")
    scheme = drawn_scheme(name, draw)
    model = FAMILIES[family].make(random_shape(family, seed, scheme.columns or 1), seed)
    scales = calibrated(model, prompts_of(seed)) if name == "fp8_static" else None
    dtype = draw.choice([torch.float32, torch.bfloat16])
    ignore = IGNORED[seed % len(IGNORED)]
    found = quantise(folder, model, scheme, ignore=ignore, scale_dtype=dtype, input_scales=scales)
    return model, found


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
