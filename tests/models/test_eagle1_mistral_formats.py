"""A Mistral EAGLE-1 head is the same head in Mistral's own format and in Hugging Face's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eagle_folders import FakeTarget, draw_eagle1, matrix, write, write_consolidated
from eagle_rows import PagedRows, load

FORMATS: dict[str, dict[str, Any]] = {
    "by its layers": {},
    "by its class": {"model_type": "llama", "architectures": ["EagleMistralForCausalLM"]},
}


@pytest.mark.parametrize("name", FORMATS)
def test_input_norm_and_final_norm_are_kept(name: str, tmp_path: Path) -> None:
    """Catches the other EAGLE-1 heads' rule, which has neither and feeds back the unnormed."""
    rng = np.random.default_rng(9)
    target = FakeTarget(rng, hidden_size=16, vocab_size=40)
    plain = draw_eagle1(rng, target, is_mistral=True)
    plain.layer.pop("rope_scaling", None)
    own = load(write_consolidated(tmp_path / "own", plain), "eagle", target)
    config = {"architectures": ["EagleForCausalLM"]} | plain.layer | FORMATS[name]
    tables = ("embed_tokens.weight", "lm_head.weight")
    tensors = {n: t.contiguous() for n, t in plain.weights.items() if n not in tables}
    theirs = load(write(tmp_path / "hf", config, tensors), "eagle", target)
    assert theirs.spec.feedback == own.spec.feedback == "post_norm"
    tokens, hidden = torch.from_numpy(rng.integers(0, 40, 6)), matrix(rng, 6, 16)
    states = []
    with torch.inference_mode():
        for head in (own, theirs):
            torch.manual_seed(0)
            paged = PagedRows(head, 6)
            states.append(head.forward(paged.rows(tokens, 0), hidden, paged.caches, step=0))
    expected = plain.run(tokens, hidden)
    for found in states:
        for ours, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)
