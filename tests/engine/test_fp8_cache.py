"""Keys and values in e4m3: greedy output does not depend on how steps are cut, and scales are the
same in every engine and on every rank."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepseek_oracle import deepseek_config
from fuzz_stages import RANDOM_GEMMAS, Pair, stage
from safetensors.torch import save_file
from scenarios import (
    KNOWN_TOKENS,
    Outcome,
    World,
    draw_scenario,
    oracle_for,
    random_prompt,
    run_scenario,
    seeded,
    uncached_continuations,
)
from side_by_side import assert_same_run, run_alone
from staged import assert_same_everywhere, config_of, run_over
from thread_ranks import as_ranks
from tiny_targets import (
    assistant_config,
    gemma4_config,
    load,
    run_config,
    write_folder,
)

from hydraspec.config.schema import Dtype, KVDtype, RunConfig
from hydraspec.engine.native import NativeEngine
from hydraspec.engine.run.kv_scales import calibrated, power_of_two_scales, scale_kv
from hydraspec.engine.run.loading import load as load_engine
from hydraspec.engine.run.loading import load_baseline
from hydraspec.errors import CheckpointError, ConfigurationError
from hydraspec.models import TargetModel, load_target
from hydraspec.models.checkpoint.kv_scales import of_heads, read_kv_scales, stored_kv_scales
from hydraspec.models.checkpoint.reader import open_checkpoint
from hydraspec.models.parts import Share
from hydraspec.models.stages import Stage
from hydraspec.parallel.control import ALONE
from hydraspec.parallel.layout import Layout
from hydraspec.parallel.ranks import Ranks
from hydraspec.speculators.gemma4 import Gemma4Speculator
from hydraspec.types import Completion, Request, SamplingParams

E4M3 = torch.float8_e4m3fn
SHARED = RANDOM_GEMMAS["sharing"] | {"num_key_value_heads": 2, "num_global_key_value_heads": 1}


def fp8(config: RunConfig) -> RunConfig:
    config.engine.kv_cache.dtype = KVDtype.fp8
    return config


def scaled(folder: Path, dtype: torch.dtype = torch.float64) -> TargetModel:
    target = load(folder, dtype, weights="random", seed=7)
    scale_kv(target, fp8(run_config(folder)), None, ALONE)
    return target


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """In float64, where no order of summation makes an e4m3 number its neighbour."""
    folder = tmp_path_factory.mktemp("world")
    write_folder(folder, gemma4_config(**SHARED, tie_word_embeddings=False))
    found = World(folder=str(folder), target=scaled(folder))
    rng = seeded(11)
    prompts = [random_prompt(rng, length, 64) for length in (1, 4, 9, 17, 33)]
    found.continuations = uncached_continuations(found.target, prompts, KNOWN_TOKENS)
    return found


def test_chunks_preemption_and_accepted_drafts_change_no_token(world: World) -> None:
    """Catches a step that reads its own keys unrounded: their bits would depend on its cut."""
    outcome = Outcome()
    for number in range(12):
        scenario = draw_scenario(world, np.random.default_rng([5, number]), k=1 + number % 8)
        run_scenario(scenario, world.target, oracle_for(world, scenario), outcome)
    assert outcome.num_preempted > 0
    assert len({accepted for _, accepted in outcome.accepted}) > 4


def test_the_plain_cache_says_other_tokens(world: World) -> None:
    """Else the tests of this file would pass with a cache that rounds nothing."""
    plain = load(world.folder, torch.float64, weights="random", seed=7)
    prompts = list(world.continuations)
    others = uncached_continuations(plain, prompts, 16)
    assert any(others[prompt] != world.continuations[prompt][:16] for prompt in prompts)


def test_an_assistant_reads_with_the_sources_scales(world: World, tmp_path: Path) -> None:
    """A drafter with wrong scales would be lossless too, so that its first drafts are compared with
    those over a plain cache that holds the same rounded keys and values."""
    drafter = write_folder(tmp_path / "assistant", assistant_config(gemma4_config(**SHARED)))
    outcome = Outcome()
    for number in range(3):
        scenario = draw_scenario(world, np.random.default_rng([3, number]), k=2 + number)
        scenario.config.method.checkpoint = str(drafter)
        speculator = Gemma4Speculator(scenario.config)
        speculator.load(world.target)
        run_scenario(scenario, world.target, speculator, outcome)
    found = {}
    for is_rounded in (True, False):
        plain = load(world.folder, torch.float64, weights="random", seed=7)
        target = world.target if is_rounded else plain
        speculator.load(target)
        specs, (rows, tables) = target.kv_groups(4), (40, torch.arange(1, 9)[None])
        caches: list[Any] = [None] * target.num_layers
        draw = torch.Generator().manual_seed(5)
        for spec in specs:
            for layer in spec.layers:
                numbers = torch.randn(rows, *spec.shape.page_row, generator=draw).to(E4M3)
                scales = world.target.kv_scales[layer][:, :, None]
                caches[layer] = numbers if is_rounded else numbers.double() * scales
        speculator.bind_kv_caches(specs, caches)
        at = torch.tensor([20])
        context = speculator.head.begin(at, at + 1, [tables] * len(specs), 21, caches)
        hidden = torch.ones(1, target.hidden_size, dtype=torch.float64)
        found[is_rounded] = speculator.head.step(context, torch.tensor([9]), hidden)[0]
    torch.testing.assert_close(found[True], found[False])


def outputs(engine: NativeEngine, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """Output of each prompt, two at a time, and how many prompt tokens were found in the cache."""
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    requests = [
        Request(index=i, id=str(i), sampling=sampling, prompt_token_ids=list(prompt))
        for i, prompt in enumerate(prompts)
    ]
    done = {e.index: e for e in engine.run(requests, concurrency=2) if isinstance(e, Completion)}
    assert all(each.error is None for each in done.values())
    num_cached = sum(each.num_cached_tokens or 0 for each in done.values())
    return [done[i].output_token_ids for i in range(len(prompts))], num_cached


def test_engine_baseline_and_prefix_hits_agree(world: World, tmp_path: Path) -> None:
    """From the configuration on: scales, the cache, prefixes that earlier requests have left."""
    drafter = write_folder(tmp_path / "assistant", assistant_config(gemma4_config(**SHARED)))
    config = run_config(world.folder, method="gemma4_mtp", drafter=drafter, seed=7)
    config.engine.max_num_batched_tokens = 24
    parts = load_engine(fp8(config))
    scales = parts.target.kv_scales
    assert scales.keys() == world.target.kv_scales.keys()
    assert all(torch.equal(scale, world.target.kv_scales[i]) for i, scale in scales.items())
    engine, baseline = NativeEngine(config, parts), NativeEngine(config, load_baseline(parts))
    prompts = [list(prompt) for prompt in world.continuations] * 2
    expected = [world.continuations[tuple(prompt)][:12] for prompt in prompts]
    found, num_cached = outputs(engine, prompts)
    assert found == expected
    assert num_cached > 0
    assert outputs(baseline, prompts)[0] == expected
    assert {cache.dtype for cache in parts.runner.kv.caches if cache is not None} == {E4M3}
    assert parts.info.quantization == {"kv_cache": "fp8 KV cache"}
    assert any("engine.kv_cache.dtype=fp8" in note for note in parts.info.warnings)


def test_the_plain_cache_beside_it_rounds_nothing(world: World) -> None:
    """Catches a scale left on a layer, and a layer of the first engine that loses its own."""
    prompts = [list(prompt) for prompt in world.continuations]
    unrounded = load(world.folder, torch.float64, weights="random", seed=7)
    wanted = uncached_continuations(unrounded, world.continuations, 12)
    engine = NativeEngine(fp8(run_config(world.folder, seed=7)))
    plain = engine.plain_cache()
    assert plain is not None
    assert outputs(plain, prompts)[0] == [wanted[tuple(prompt)] for prompt in prompts]
    assert plain.plain_cache() is None
    plain.close()
    expected = [world.continuations[tuple(prompt)][:12] for prompt in prompts]
    assert outputs(engine, prompts)[0] == expected != list(wanted.values())


@pytest.mark.parametrize(
    "layout", [Layout(tensor=2), Layout(tensor=4), Layout(pipeline=2)], ids=["tp2", "tp4", "pp2"]
)
def test_ranks_have_the_scales_of_one_rank(tmp_path: Path, layout: Layout) -> None:
    """tp4: pairs of ranks hold the same KV head, four the same global one."""
    changes = {} if layout.pipeline > 1 else SHARED
    write_folder(tmp_path, gemma4_config(**changes))
    whole = scaled(tmp_path).kv_scales
    config = fp8(run_config(tmp_path))

    def work(ranks: Ranks) -> Any:
        target: Any = load_target(
            str(tmp_path),
            weights="random",
            dtype=torch.float64,
            device=torch.device("cpu"),
            seed=7,
            max_model_len=None,
            group=ranks.group,
            stage=Stage(index=ranks.at.stage, count=layout.pipeline),
        )
        scale_kv(target, config, ranks.link, ranks.control)
        return {i: (scale, target.layers[i].attention.kv) for i, scale in target.kv_scales.items()}

    seen = set()
    for found in as_ranks(layout, work):
        for i, (scale, heads) in found.items():
            assert torch.equal(scale, whole[i][:, heads.first : heads.first + heads.count]), i
            seen.add(i)
    assert seen == whole.keys()


@pytest.mark.parametrize(
    "pair",
    [
        Pair("random sliding", "gemma4_mtp", "assistant"),
        pytest.param(
            Pair("random eagle3 on qwen3", "eagle3", "drafter"), marks=pytest.mark.slow, id="eagle3"
        ),
    ],
    ids=["gemma4_mtp", None],
)
def test_ranks_and_stages_choose_the_tokens_of_one_rank(pair: Pair) -> None:
    config = fp8(config_of(pair, Dtype.float64, max_num_seqs=4, max_num_batched_tokens=24))
    prompts = stage(pair.stage, Dtype.float64).prompts
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    requests = [
        Request(index=i, id=str(i), sampling=sampling, prompt_token_ids=list(prompt[:30]))
        for i, prompt in enumerate(prompts[:5])
    ]
    wanted = run_alone(NativeEngine(copy.deepcopy(config)), requests)
    found = assert_same_everywhere(run_over(Layout(tensor=2, pipeline=2), config, requests))
    assert_same_run(found, wanted)


def test_scales_are_powers_of_two_with_headroom() -> None:
    top = torch.tensor([112.0, 112.01, 0.0, torch.nan, 1.0, 1e-30])
    expected = [1.0, 2.0, 1.0, 1.0, 2.0**-6, 2.0**-60]
    assert power_of_two_scales(top).tolist() == expected


def test_calibration_is_repeatable_and_reads_the_plain_cache(world: World) -> None:
    plain: Any = load(world.folder, torch.float64, weights="random", seed=7)
    first, again = (calibrated(plain, 64, None, ALONE) for _ in range(2))
    assert plain.kv_scales == {}
    assert all(torch.equal(scale, again[i]) for i, scale in first.items())


SCHEME = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}


def with_scales(folder: Path, scheme: dict[str, Any], scales: dict[str, torch.Tensor]) -> Any:
    write_folder(folder, {"quantization_config": {"kv_cache_scheme": scheme}})
    save_file(scales, folder / "model.safetensors")
    return open_checkpoint(str(folder))


def test_scales_of_a_checkpoint_are_read(tmp_path: Path) -> None:
    stored = {
        "model.layers.0.self_attn.k_scale": torch.tensor([0.5], dtype=torch.bfloat16),
        "model.layers.0.self_attn.v_scale": torch.tensor(0.25),
        "model.layers.1.self_attn.attn.k_scale": torch.tensor([[[1.0]], [[2.0]]]),
        "model.layers.1.self_attn.v_proj.output_scale": torch.tensor([3.0]),
    }
    model: Any = type("Model", (), {"canonical_name": staticmethod(lambda name: name)})
    found = read_kv_scales(with_scales(tmp_path, SCHEME, stored), model)
    assert of_heads(found[0], Share(2, 0, 2), "here", 0).tolist() == [[0.5, 0.5], [0.25, 0.25]]
    assert of_heads(found[1], Share(2, 1, 1), "here", 1).tolist() == [[2.0], [3.0]]
    with pytest.raises(CheckpointError, match=r"layer 1 has 2 scales .* 3 KV heads"):
        of_heads(found[1], Share(3, 0, 3), "here", 1)
    other = with_scales(tmp_path / "int8", SCHEME | {"type": "int"}, stored)
    assert read_kv_scales(other, model) == {}
    stored.pop("model.layers.0.self_attn.v_scale")
    with pytest.raises(CheckpointError, match="layer 0 has scales of k alone"):
        read_kv_scales(with_scales(tmp_path / "half", SCHEME, stored), model)
    stored["model.layers.0.self_attn.v_scale"] = torch.tensor(0.0)
    with pytest.raises(CheckpointError, match=r"v_scale is \[0.0\]; expected numbers above 0"):
        read_kv_scales(with_scales(tmp_path / "zero", SCHEME, stored), model)


def test_scales_are_of_every_layer_with_a_cache_or_of_none(world: World, tmp_path: Path) -> None:
    """Catches scales that are dropped for those of the prompt, and stages of which some refuse."""
    target: Any = copy.copy(world.target)
    owners = [i for i in range(target.num_layers) if target.kv_source(i) == i]
    assert 1 < len(owners) < target.num_layers

    def read(*layers: int) -> dict[int, torch.Tensor]:
        scales = {
            f"model.layers.{i}.self_attn.{part}_scale": torch.tensor(1.0 + i)
            for i in layers
            for part in "kv"
        }
        folder = tmp_path / "-".join(map(str, layers))
        return stored_kv_scales(with_scales(folder, SCHEME, scales), target)

    whole = read(*owners)
    assert {i: scale[0, 0].item() for i, scale in whole.items()} == {i: 1.0 + i for i in owners}
    assert read(target.num_layers - 1) == {}, "a layer that shares another's cache"
    for held in (range(target.num_layers), [owners[0]]):
        target.held = held
        says = rf"1 of {len(owners)} layers .* no scales .*layer {owners[-1]} is the first"
        with pytest.raises(CheckpointError, match=says):
            read(*owners[:-1])


def test_a_latent_cache_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, {"model_type": "deepseek_v3"} | deepseek_config())
    with pytest.raises(ConfigurationError, match="dtype=fp8 is not available with target=test"):
        scaled(tmp_path)
