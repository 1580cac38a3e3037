"""A whole step under FakeTensorMode, which has no data to read: any `.item()`, mask index or data-
dependent shape raises.

The source-level half of this rule is in tests/test_house_rules.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from deepseek_oracle import deepseek_config
from grids import every_third, in_turn
from mtp_folders import qwen_config
from scenarios import make_engine
from tiny_targets import assistant_config, gemma4_config, load, run_config, write_folder
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from hydraspec.config.schema import DraftSampling, RunConfig, Verification
from hydraspec.engine.schedule.sequence import Sequence
from hydraspec.speculators.registry import build_speculator
from hydraspec.types import Request, SamplingParams

FLAVOURS = {
    "dense": ({}, {}),
    "per_layer_inputs_and_centroids": (
        {
            "attention_k_eq_v": False,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
        },
        {"use_ordered_embeddings": True},
    ),
    "experts": (
        {
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
        {},
    ),
}


TEMPERATURES = (0.0, 0.8)  # greedy, stochastic


def add(engine, index: int, length: int, temperature: float) -> Sequence:  # type: ignore[no-untyped-def]
    sampling = SamplingParams(
        temperature=temperature,
        top_k=5,
        top_p=0.9,
        min_p=0.01,
        seed=index,
        presence_penalty=0.5,
        bad_words=((3, 4),),
        logprobs=2,
    )
    request = Request(index=index, id=str(index), sampling=sampling)
    sequence = Sequence(request=request, token_ids=[3] * length, num_prompt=length)
    engine.parts.scheduler.add(sequence)
    return sequence


def faked(record, mode: FakeTensorMode):  # type: ignore[no-untyped-def]
    """The record with tensors without data, in records inside it too."""
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            values[name] = faked(value, mode)
        elif value is not None:
            values[name] = mode.from_tensor(value)
    return type(record)(**values)


def make_fake(engine, mode: FakeTensorMode) -> None:  # type: ignore[no-untyped-def]
    """Replace the request state and the caches by tensors without data."""
    runner = engine.parts.runner
    runner.state = faked(runner.state, mode)
    caches = runner.kv.caches
    caches[:] = [None if cache is None else mode.from_tensor(cache) for cache in caches]


def step_and_pretend(engine) -> list[tuple[int, int]]:  # type: ignore[no-untyped-def]
    """Run the next step on fake tensors, then let the host think every draft was rejected."""
    scheduled, plan = engine._schedule()
    runner = engine.parts.runner
    with unset_fake_temporarily():  # a plan is host numbers, which are written into real memory
        inputs = runner.place(plan)
    step = runner.run(inputs)
    target_step, verdict = step.target_step, step.verdict
    k = engine.info.num_speculative_tokens
    assert isinstance(verdict.tokens, FakeTensor)
    assert isinstance(target_step.logits, FakeTensor)
    assert verdict.tokens.shape == (len(scheduled), k + 1)
    assert target_step.hidden_states.shape[0] == int(plan.num_rows.sum())
    shape = [(item.num_rows, item.num_drafts) for item in scheduled]
    for item in scheduled:
        if item.samples:
            item.sequence.token_ids.append(3)
            item.sequence.num_computed += item.num_rows - item.num_drafts
            item.sequence.decoding = True
        else:
            item.sequence.num_computed += item.num_rows
    return shape


def four_fake_steps(
    settings: RunConfig, dtype: torch.dtype, temperature: float
) -> list[list[tuple[int, int]]]:
    """(rows, drafts) of each request in four steps: a long and a short prompt, then decoding."""
    target = load(settings.target.checkpoint, dtype, weights="random")
    speculator = build_speculator(settings)
    speculator.load(target)
    engine = make_engine(settings, target, speculator)
    # Weights stay real and turn fake where they meet the step's tensors: state and caches are fake.
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        make_fake(engine, mode)
        add(engine, 0, 15, temperature)
        add(engine, 1, 3, temperature)
        return [step_and_pretend(engine) for _ in range(4)]


@pytest.mark.parametrize(
    ("flavour", "temperature", "verification"),
    every_third(FLAVOURS, TEMPERATURES, Verification),
)
def test_a_step_reads_nothing_from_the_device(
    tmp_path: Path, flavour: str, temperature: float, verification: Verification
) -> None:
    """Prefill in chunks, mixed steps and pure decodes, with every verifier and drafts of both
    kinds."""
    target_fields, assistant_fields = FLAVOURS[flavour]
    config = gemma4_config(**target_fields)
    folder = write_folder(tmp_path / "target", config)
    drafter = write_folder(tmp_path / "assistant", assistant_config(config, **assistant_fields))
    settings = run_config(
        folder,
        method="gemma4_mtp",
        drafter=drafter,
        max_num_batched_tokens=12,
        verification=verification,
        synthetic_acceptance_length=2.5 if verification is Verification.synthetic else None,
        draft_sampling=DraftSampling.probabilistic if temperature else DraftSampling.greedy,
    )
    dtype = torch.bfloat16 if temperature else torch.float32
    shapes = four_fake_steps(settings, dtype, temperature)
    assert shapes[0] == [(12, 0)]  # a chunk that does not sample
    assert shapes[1] == [(3, 0), (3, 0)]
    assert shapes[2] == [(4, 3), (4, 3)]


@pytest.mark.parametrize(
    ("num_mtp", "model_type", "temperature"),
    every_third([1, 3], ["deepseek_v3", "mimo"], TEMPERATURES),
)
def test_a_step_with_mtp_layers_reads_nothing_from_the_device(
    tmp_path: Path, model_type: str, temperature: float, num_mtp: int
) -> None:
    """A latent cache, grouped routing, blanked first rows, layers taking turns."""
    config = deepseek_config() if model_type == "deepseek_v3" else qwen_config()
    raw = {"model_type": model_type, "num_nextn_predict_layers": num_mtp} | config
    folder = write_folder(tmp_path, raw)
    settings = run_config(
        folder,
        method="mtp",
        max_num_batched_tokens=12,
        draft_sampling=DraftSampling.probabilistic if temperature else DraftSampling.greedy,
    )
    shapes = four_fake_steps(
        settings, torch.bfloat16 if num_mtp == 1 else torch.float32, temperature
    )
    assert shapes[2] == [(4, 3), (4, 3)]


@pytest.mark.parametrize(
    ("method", "temperature"), in_turn(["eagle3", "peagle", "eagle"], [0.8, 0.0])
)
def test_a_step_with_an_eagle_head_reads_nothing_from_the_device(
    tmp_path: Path, method: str, temperature: float
) -> None:
    """A draft cache, a narrower draft vocabulary, mask rows; two kinds of draft layer."""
    folder = write_folder(tmp_path / "target", qwen_config() | {"model_type": "qwen3"})
    layer = {
        **qwen_config(),
        "model_type": "llama" if method == "eagle" else "qwen3",
        "num_hidden_layers": 2,
        "use_sliding_window": True,
        "sliding_window": 4,
    }
    if method == "eagle":
        drafter = layer | {"architectures": ["EagleLlamaForCausalLM"]}
    else:
        layer["layer_types"] = ["sliding_attention", "full_attention"]
        drafter = {
            "speculators_model_type": method,
            "transformer_layer_config": layer,
            "draft_vocab_size": layer["vocab_size"] // 2,
            "eagle_aux_hidden_state_layer_ids": [0, 1],
            "norm_before_residual": True,
            "mask_token_id": 3,
        }
    settings = run_config(
        folder,
        method=method,
        drafter=write_folder(tmp_path / "drafter", drafter),
        max_num_batched_tokens=12,
        draft_sampling=DraftSampling.probabilistic if temperature else DraftSampling.greedy,
    )
    shapes = four_fake_steps(settings, torch.bfloat16, temperature)
    assert shapes[2] == [(4, 3), (4, 3)]


def test_the_trap_works() -> None:
    """FakeTensorMode does raise on a read; without this the test above proves nothing."""
    with FakeTensorMode(), pytest.raises(Exception, match=r"item|_local_scalar_dense|data"):
        torch.ones(3).sum().item()
