"""The shapes of drafters that ship without weights fit their targets, and run: here with the same
configs made small, as benchmarks run them with random weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_targets import run_config

from hydraspec.config.schema import Verification
from hydraspec.engine.native import NativeEngine
from hydraspec.models.block_drafter.config import read_block_drafter
from hydraspec.models.checkpoint.reader import open_checkpoint
from hydraspec.models.dense.config import DenseConfig, read_dense_config
from hydraspec.models.detect import open_draft
from hydraspec.models.draft_families import FAMILIES
from hydraspec.models.eagle.config import EagleConfig, read_eagle
from hydraspec.models.mtp.config import read_mtp_config
from hydraspec.types import Completion, Request, SamplingParams, StepRecord

# layers, hidden width, query and KV heads, inner width, vocabulary
PUBLISHED = {
    "llama3_1_8b": (32, 4096, 32, 8, 14336, 128256),
    "mimo_7b": (36, 4096, 32, 8, 11008, 151680),
    "mistral_7b": (32, 4096, 32, 8, 14336, 32768),
    "mistral_medium_3_5": (88, 12288, 96, 8, 28672, 131072),
    "qwen3_8b": (36, 4096, 32, 8, 12288, 151936),
}
HEADS = {
    "gemma4_31b-eagle3": ("eagle3", 1, (2, 30, 57)),
    "llama3_1_8b-eagle3": ("eagle3", 1, (2, 16, 29)),
    "mistral_7b-eagle": ("eagle", 1, None),
    "mistral_medium_3_5-eagle": ("eagle", 2, None),
    "qwen3_8b-eagle3": ("eagle3", 1, (2, 18, 33)),
    "qwen3_8b-peagle": ("peagle", 4, (2, 10, 18, 26, 34)),
}
RUNS = {
    "eagle3 on gemma4": ("eagle3", "gemma4_31b", "gemma4_31b-eagle3"),
    "eagle3 on qwen3": ("eagle3", "qwen3_8b", "qwen3_8b-eagle3"),
    "peagle on qwen3": ("peagle", "qwen3_8b", "qwen3_8b-peagle"),
    "dflash on qwen3": ("dflash", "qwen3_8b", "qwen3_8b-dflash"),
    "dflash on gemma4": ("dflash", "gemma4_31b", "gemma4_31b-dflash"),
    "dspark on qwen3": ("dspark", "qwen3_8b", "qwen3_8b-dspark"),
    "eagle3 on the 12B": ("eagle3", "gemma4_12b", "gemma4_12b-eagle3"),
    "dspark on the 12B": ("dspark", "gemma4_12b", "gemma4_12b-dspark"),
    "dflash2 on qwen3": ("dflash2", "qwen3_8b", "qwen3_8b-dflash2"),
    "eagle on mistral": ("eagle", "mistral_7b", "mistral_7b-eagle"),
    "eagle on mistral medium, in fp8": (
        *("eagle", "mistral_medium_3_5", "mistral_medium_3_5-eagle"),
    ),
    "mtp of deepseek": ("mtp", "deepseek_v3_6_layers", None),
    "mtp of mimo": ("mtp", "mimo_7b", None),
}
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 8,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "vocab_size": 64,
    "draft_vocab_size": 40,
    "mask_token_id": 63,
    "num_target_layers": 6,
    "max_position_embeddings": 256,
}


def read_head(name: str) -> tuple[EagleConfig, DenseConfig]:
    head = read_eagle(open_draft(f"shape:{name}"), HEADS[name][0])
    return head, read_dense_config(head.layers, name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_target_is_that_of_the_release(name: str) -> None:
    found = read_dense_config(open_checkpoint(f"shape:{name}").config, name)
    heads = found.num_heads, found.num_kv_heads
    sizes = (len(found.kinds), found.hidden_size, *heads, found.intermediate_size)
    assert (*sizes, found.vocab_size) == PUBLISHED[name]
    assert found.sliding_window is None
    assert found.head_dim == 128


@pytest.mark.parametrize("name", HEADS)
def test_a_head_fits_its_target(name: str) -> None:
    head, layers = read_head(name)
    assert (head.method, len(layers.kinds), head.aux_layer_ids) == HEADS[name]
    target = open_checkpoint(f"shape:{name.partition('-')[0]}").config
    assert layers.hidden_size == target["hidden_size"]
    assert layers.vocab_size == target["vocab_size"]
    assert all(i <= target["num_hidden_layers"] for i in head.aux_layer_ids or ())
    assert not head.notes  # nothing is left to a default


def test_the_head_of_31b_is_as_large_as_the_released_file() -> None:
    """RedHatAI/gemma-4-31B-it-speculator.eagle3: 4,470,642,280 bytes, 1,640 of them the header."""
    head, layers = read_head("gemma4_31b-eagle3")
    size, rows = layers.hidden_size, head.draft_vocab_size or 0
    heads = layers.num_heads + layers.num_kv_heads
    attention = 2 * size * (heads + layers.num_kv_heads) * layers.head_dim
    attention += size * layers.num_heads * layers.head_dim
    tables = (layers.vocab_size + rows) * size
    numbers = tables + 3 * size * size + attention + 3 * size * layers.intermediate_size + 4 * size
    assert 2 * numbers + 8 * rows + layers.vocab_size == 4_470_642_280 - 1_640


@pytest.mark.parametrize(("method", "most"), [("dflash", 15), ("dspark", 7)])
def test_a_block_drafter_fits_its_target(method: str, most: int) -> None:
    """z-lab/Qwen3-8B-DFlash-b16, and DeepSpec's settings of the same layers."""
    head = read_block_drafter(open_draft(f"shape:qwen3_8b-{method}"), method)
    layers = read_dense_config(head.layers, method)
    assert (head.method, head.most_drafts) == (method, most)
    assert head.aux_layer_ids == (2, 10, 18, 26, 34)
    assert (len(layers.kinds), layers.hidden_size, layers.qk_norm) == (5, 4096, True)
    assert not head.notes


def test_the_block_drafter_of_31b_fits_its_target() -> None:
    """z-lab/gemma-4-31B-it-DFlash."""
    head = read_block_drafter(open_draft("shape:gemma4_31b-dflash"), "dflash")
    layers = read_dense_config(head.layers, "dflash")
    assert (head.most_drafts, head.mask_token_id, head.softcap) == (15, 4, 30.0)
    assert head.aux_layer_ids == (2, 13, 24, 36, 47, 58)
    assert (layers.hidden_size, layers.num_heads, layers.sliding_window) == (5376, 64, 2048)
    assert layers.kinds == ("sliding_attention",) * 4 + ("full_attention",)
    assert [("is_causal" in note) for note in head.notes] == [True]  # it does not say


@pytest.mark.parametrize("method", ["eagle3", "dflash", "dspark"])
def test_the_drafters_of_the_12b_are_those_of_deepspec(method: str) -> None:
    """Their settings of google/gemma-4-12B-it: the same layers of the target, blocks of seven."""
    opened = open_draft(f"shape:gemma4_12b-{method}")
    head = read_eagle(opened, method) if method == "eagle3" else read_block_drafter(opened, method)
    layers = FAMILIES[head.family].read(head.layers, method)
    assert (head.family, head.aux_layer_ids) == ("gemma4", (6, 18, 30, 42, 47))
    assert (layers.hidden_size, len(layers.layers)) == (3840, 1 if method == "eagle3" else 5)
    assert isinstance(head, EagleConfig) or (head.most_drafts, head.mask_token_id) == (7, 4)
    assert not head.notes


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3_6_layers", "mimo_7b"])
def test_mtp_layers_are_announced(name: str) -> None:
    config = read_mtp_config(open_draft(f"shape:{name}"))
    assert config.num_layers == 1
    assert config.layout.name == ("MiMo" if name == "mimo_7b" else "DeepSeek-V3")


# ------------------------------------------------------------------ made small


def made_small(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The same config with other sizes: its flags, formats and defaults stay."""
    small: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and key != "rope_parameters":
            small[key] = made_small(value, layers)
        elif key in ("eagle_aux_hidden_state_layer_ids", "target_layer_ids"):
            small[key] = list(range(len(value)))
        elif key == "num_hidden_layers":
            small[key] = min(value, layers)
        elif key == "layer_types":
            small[key] = value[:layers]
        else:
            small[key] = value if value is None else SMALL.get(key, value)
    return small


def write_small(folder: Path, shape: str) -> Path:
    config = json.loads((open_draft(f"shape:{shape}").folder / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(made_small(config, 6)))
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_the_shape_made_small_runs_as_a_benchmark_does(name: str, tmp_path: Path) -> None:
    """Random weights for target and head, synthetic acceptance: catches a shape that does not load
    and a head that does not fit before a device is asked.
    """
    method, target, head = RUNS[name]
    folder = write_small(tmp_path / "target", target)
    drafter = folder if head is None else write_small(tmp_path / "head", head)
    config = run_config(folder, method=method, drafter=drafter, k=1 if head is None else 3)
    config.method.verification = Verification.synthetic
    config.method.synthetic_acceptance_length = 1.75
    engine = NativeEngine(config)
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    requests = [
        Request(index=i, id=str(i), sampling=sampling, prompt_token_ids=[5 + i, 9, 11])
        for i in range(4)
    ]
    events = list(engine.run(requests, concurrency=None))
    done = [event for event in events if isinstance(event, Completion)]
    assert [len(event.output_token_ids) for event in done] == [24] * 4
    parts = [part for event in events if isinstance(event, StepRecord) for part in event.requests]
    assert 10 < sum(part.num_accepted for part in parts) < 80
