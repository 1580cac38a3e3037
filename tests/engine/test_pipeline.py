"""Pipeline stages as threads: tokens, drafts and accepted counts are those of one process."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from fuzz_stages import PAIRS, QUANTISED_PAIRS, ZOO_PAIRS, Pair
from graph_runs import attention_as_on_devices, cache_gib
from recorded_graphs import RecordedOps
from side_by_side import assert_same_run, run_alone
from staged import assert_same_everywhere, config_of, mixed_requests, run_over
from step_ahead import Watch, outputs
from thread_ranks import as_ranks
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hydraspec.config.schema import Dtype, RunConfig
from hydraspec.engine.native import NativeEngine
from hydraspec.engine.run import loading, step_graphs
from hydraspec.engine.schedule import prompt_rows
from hydraspec.graphs import modes
from hydraspec.parallel.layout import Layout
from hydraspec.parallel.ranks import Ranks
from hydraspec.types import CheckpointError, ConfigurationError, Request

PP2 = Layout(pipeline=2)
TP2_PP2 = Layout(tensor=2, pipeline=2)
E_WITH_ASSISTANT = Pair("tiny_gemma4_e", "gemma4_mtp", "zoo:tiny_gemma4_e-assistant")
GEMMA_WITH_EAGLE3 = Pair("tiny_gemma4", "eagle3", "zoo:tiny_gemma4-eagle3")
QUICK = (
    Pair("tiny_gemma4", "none"),
    E_WITH_ASSISTANT,
    Pair("tiny_qwen3", "peagle", "zoo:tiny_qwen3-peagle"),
    Pair("tiny_deepseek", "mtp"),
    Pair("tiny_qwen3", "dflash", "zoo:tiny_qwen3-dflash"),
)


@cache
def run_of_one(pair: Pair) -> Watch:
    """What one process gives for the pair's usual configuration and requests."""
    return run_alone(NativeEngine(config_of(pair)), mixed_requests(pair))


def compare(
    layout: Layout, config: RunConfig, requests: list[Request], alone: Watch | None = None
) -> Watch:
    alone = alone or run_alone(NativeEngine(copy.deepcopy(config)), requests)
    found = assert_same_everywhere(run_over(layout, config, requests))
    assert_same_run(found, alone)
    return found


def name(pair: Pair) -> str:
    return f"{pair.stage}-{pair.method}".replace(" ", "_")


@pytest.mark.parametrize("pair", QUICK, ids=name)
def test_two_stages_decode_as_one_process(pair: Pair) -> None:
    found = compare(PP2, config_of(pair), mixed_requests(pair), run_of_one(pair))
    parts = [part for record in found.records for part in record.requests]
    if pair.method != "none":
        drafted = [part for part in parts if part.draft_token_ids]
        assert sum(part.num_accepted for part in drafted) > 0
        assert any(part.num_accepted < len(part.draft_token_ids) for part in drafted)
    assert any(part.is_prefill and not part.output_token_ids for part in parts), "no chunks"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [Dtype.float64, Dtype.float32])
@pytest.mark.parametrize("pair", PAIRS + QUANTISED_PAIRS, ids=name)
def test_every_target_with_every_drafter_in_two_stages(pair: Pair, dtype: Dtype) -> None:
    if pair.stage == "random sharing":  # its four layers share KV over every border
        with pytest.raises(ConfigurationError, match=r"parallelism\.pipeline=2 does not go"):
            run_over(PP2, config_of(pair, dtype), [])
        return
    compare(PP2, config_of(pair, dtype), mixed_requests(pair, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("pair", ZOO_PAIRS + QUANTISED_PAIRS, ids=name)
def test_four_stages_decode_as_one_process(pair: Pair) -> None:
    compare(Layout(pipeline=4), config_of(pair), mixed_requests(pair))


def test_tensor_parallel_ranks_in_each_of_two_stages() -> None:
    pair = E_WITH_ASSISTANT
    compare(TP2_PP2, config_of(pair), mixed_requests(pair), run_of_one(pair))


@pytest.mark.slow
@pytest.mark.parametrize("pair", ZOO_PAIRS + QUANTISED_PAIRS, ids=name)
def test_every_pair_in_two_stages_of_two_ranks(pair: Pair) -> None:
    compare(TP2_PP2, config_of(pair), mixed_requests(pair))


@pytest.mark.parametrize("border", [2, 5, 8])
def test_aux_states_before_at_and_after_the_border(border: int) -> None:
    """The drafter reads the states after 2, 8 and 13 layers."""
    config = config_of(GEMMA_WITH_EAGLE3, max_num_batched_tokens=64)
    config.parallelism.pipeline_layers = [border, 16 - border]
    requests = mixed_requests(GEMMA_WITH_EAGLE3)[:2]
    alone = run_alone(NativeEngine(config_of(GEMMA_WITH_EAGLE3)), requests)
    sent: list[tuple[int, int]] = []

    def work(ranks: Ranks) -> Watch:
        seen = run_alone(NativeEngine(copy.deepcopy(config)), requests)
        if ranks.rank == 0:
            num_rows = sum(part.num_rows for record in seen.records for part in record.requests)
            sent.append((ranks.link.num_sent_bytes, num_rows))  # type: ignore[union-attr]
        return seen

    found = assert_same_everywhere(as_ranks(PP2, work))
    assert_same_run(found, alone)
    num_bytes, num_rows = sent[0]
    tensors = 1 + sum(i < border for i in (2, 8, 13))  # the stream, which is the state at a border
    width = NativeEngine(config_of(GEMMA_WITH_EAGLE3)).parts.target.hidden_size
    assert num_bytes == num_rows * tensors * width * 8


def test_a_border_inside_layers_that_share_kv_is_refused_with_the_legal_splits() -> None:
    """Layers 10 to 13 read KV of layers 8 and 9."""
    config = config_of(E_WITH_ASSISTANT)
    config.parallelism.pipeline_layers = [11, 3]
    with pytest.raises(ConfigurationError) as refused:
        run_over(PP2, config, [])
    assert "parallelism.pipeline_layers=[11, 3]" in str(refused.value)
    assert "end after 1 to 8 layers" in str(refused.value)


def test_one_stage_has_all_layers() -> None:
    config = config_of(E_WITH_ASSISTANT)
    config.parallelism.pipeline_layers = [14]
    NativeEngine(config)
    config.parallelism.pipeline_layers = [6]
    with pytest.raises(ConfigurationError, match=r"pipeline_layers=\[6\] .*14 layers"):
        NativeEngine(config)


def test_every_stage_refuses_the_drafter_that_the_last_one_refuses() -> None:
    config = config_of(E_WITH_ASSISTANT)
    config.method.checkpoint = "zoo:tiny_gemma4-assistant"

    def work(ranks: Ranks) -> str:
        with pytest.raises(CheckpointError, match="was not made for this target") as refused:
            NativeEngine(copy.deepcopy(config))
        return str(refused.value)

    first, last = as_ranks(PP2, work)
    assert first == last


@cache
def run_in_large_steps() -> Watch:
    """Two stages whose steps could hold every prompt."""
    pair = QUICK[0]
    return compare(PP2, config_of(pair, max_num_batched_tokens=256), mixed_requests(pair))


def test_requests_are_spread_over_the_steps_in_flight() -> None:
    """Seven requests, of which four run: two in each of the two steps in flight."""
    found = run_in_large_steps()
    sizes = Counter(len(record.requests) for record in found.records)
    assert max(sizes) == 2
    assert sizes[2] > sizes[1]
    for before, after in zip(found.records, found.records[1:], strict=False):
        together = {part.index for part in before.requests} & {p.index for p in after.requests}
        assert not together or len(before.requests) == 1 or len(after.requests) == 1


def test_prompts_are_read_in_chunks_enough_for_all_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps that could hold every prompt are cut, so that both stages work; the answers stay."""
    pair = QUICK[0]
    config = config_of(pair, max_num_batched_tokens=256)

    def num_rows(found: Watch) -> list[int]:
        chunks = [sum(p.num_rows for p in r.requests if p.is_prefill) for r in found.records]
        return [rows for rows in chunks if rows]

    whole = num_rows(run_in_large_steps())
    monkeypatch.setattr(prompt_rows, "LEAST_CHUNK", 8)
    cut = num_rows(compare(PP2, config, mixed_requests(pair)))
    assert sum(cut) == sum(whole)
    assert len(cut) >= 8 > len(whole)
    assert max(cut) < max(whole)


def test_one_request_alone_runs_step_by_step() -> None:
    pair = QUICK[1]
    found = compare(PP2, config_of(pair), mixed_requests(pair)[:1])
    assert len(found.completions) == 1


def ahead(pair: Pair) -> RunConfig:
    config = config_of(pair)
    config.engine.async_scheduling = True
    return config


def test_steps_are_launched_before_the_results_that_they_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests end while their next step is in flight, and others take their slots."""
    most: list[int] = []
    original = NativeEngine._flight

    def flight(self: NativeEngine, *args: Any) -> Any:
        found = original(self, *args)
        if self._num_stages > 1:
            most.append(1 + len(self._in_flight))
        return found

    monkeypatch.setattr(NativeEngine, "_flight", flight)
    pair = QUICK[2]
    found = compare(PP2, ahead(pair), mixed_requests(pair), run_of_one(pair))
    assert max(most) == 3, "one more than stages"
    assert max(len(record.requests) for record in found.records) == 2  # of 4 over two steps


@pytest.mark.slow
@pytest.mark.parametrize("layout", [PP2, Layout(pipeline=4), TP2_PP2], ids=["pp2", "pp4", "tp2pp2"])
@pytest.mark.parametrize("pair", ZOO_PAIRS, ids=name)
def test_every_pair_with_steps_launched_ahead(pair: Pair, layout: Layout) -> None:
    compare(layout, ahead(pair), mixed_requests(pair))


@pytest.mark.slow
def test_groups_with_other_block_sizes() -> None:
    """The first stage has the drafter's block tables without its cache."""
    pair = QUICK[1]
    config = config_of(pair)
    names = [spec.name for spec in NativeEngine(copy.deepcopy(config)).parts.runner.kv.specs]
    config.engine.kv_cache.block_sizes = dict(zip(names, (16, 4, 32), strict=False))
    found = compare(PP2, config, mixed_requests(pair))
    assert len(found.completions) == len(mixed_requests(pair))


@pytest.mark.parametrize("make", [config_of, pytest.param(ahead, marks=pytest.mark.slow)])
def test_a_full_cache_preempts_alike_on_every_stage(make: Callable[[Pair], RunConfig]) -> None:
    pair = QUICK[1]
    requests = mixed_requests(pair)
    config = make(pair)
    config.engine.kv_cache.memory_gib = cache_gib(config) * 0.2
    found = assert_same_everywhere(run_over(PP2, config, requests))
    assert sum(record.num_preempted for record in found.records) > 0
    greedy = [r.index for r in requests if r.sampling.temperature == 0.0]
    ample = outputs(run_of_one(pair))
    assert {i: outputs(found)[i] for i in greedy} == {i: ample[i] for i in greedy}


def test_a_baseline_and_logits_of_a_pipeline() -> None:
    pair = E_WITH_ASSISTANT
    requests = mixed_requests(pair)[:3]
    config = config_of(pair)
    alone = NativeEngine(copy.deepcopy(config))
    wanted = run_alone(alone.baseline(), requests), alone.next_token_logits([5, 6, 7, 8, 9])

    def work(ranks: Ranks) -> object:
        engine = NativeEngine(copy.deepcopy(config))
        first = run_alone(engine, requests)
        seen = run_alone(engine.baseline(), requests)
        assert outputs(run_alone(engine, requests)) == outputs(first)
        return seen, engine.next_token_logits([5, 6, 7, 8, 9]), engine.info

    for seen, logits, info in as_ranks(PP2, work):  # type: ignore[misc]
        assert outputs(seen) == outputs(wanted[0])
        assert abs(logits - wanted[1]).max() < 1e-12
        assert info.draft_spec is not None
        assert info.draft_spec["method"] == "gemma4_mtp"


def test_a_closed_run_leaves_nothing_in_flight() -> None:
    pair = QUICK[2]
    requests = mixed_requests(pair)

    def work(ranks: Ranks) -> Watch:
        engine = NativeEngine(config_of(pair))
        events = engine.run(copy.deepcopy(requests), concurrency=None)
        for _ in range(3):
            next(events)
        assert engine._in_flight
        events.close()
        assert not engine._in_flight
        return run_alone(engine, requests)

    assert_same_run(assert_same_everywhere(as_ranks(PP2, work)), run_of_one(pair))


def test_a_stage_holds_the_cache_of_its_layers() -> None:
    config = config_of(E_WITH_ASSISTANT)
    whole = NativeEngine(copy.deepcopy(config)).parts.runner.kv

    def work(ranks: Ranks) -> tuple[list[int], int, list[int]]:
        kv = NativeEngine(copy.deepcopy(config)).parts.runner.kv
        owners = [i for i, cache in enumerate(kv.caches) if cache is not None]
        return owners, kv.num_bytes, kv.num_blocks

    first, last = as_ranks(PP2, work)
    assert first[2] == last[2] == whole.num_blocks
    assert first[1] + last[1] == whole.num_bytes
    assert first[0] + last[0] == [i for i, cache in enumerate(whole.caches) if cache is not None]


class IndexedByTensors(TorchFunctionMode):
    """A list as an index is copied to the device, and the host waits for all that is before it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(part, list) for part in parts), "a list is an index"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("mode", "has_large", "make", "num_stages"),
    [
        ("none", False, config_of, 2),
        ("full", False, ahead, 2),
        pytest.param("none", False, ahead, 2, marks=pytest.mark.slow),
        pytest.param("full", False, config_of, 2, marks=pytest.mark.slow),
        pytest.param("full", True, config_of, 2, marks=pytest.mark.slow),
        pytest.param("full", False, ahead, 4, marks=pytest.mark.slow),
    ],
)
def test_stages_on_a_device_hand_over_what_graphs_compute(
    mode: str,
    has_large: bool,
    make: Callable[[Pair], RunConfig],
    num_stages: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a device's runner, and recorded operations in place of CUDA's graphs. (A process records
    one piecewise graph at a time, which threads would mix up.)"""
    attention_as_on_devices(monkeypatch)
    pair = E_WITH_ASSISTANT
    requests = mixed_requests(pair)
    config = make(pair)
    config.engine.max_num_batched_tokens = 40
    if has_large:  # the last stage leaves out rows in its graphs, the first has no layer that could
        for module in (modes, step_graphs):
            monkeypatch.setattr(module, "PROMPT_ROWS", (8,))
        monkeypatch.setattr(modes, "LARGE_ROWS", (32, 40))
    alone = run_alone(NativeEngine(copy.deepcopy(config)), requests)
    config.cudagraph.name, config.cudagraph.capture_sizes = mode, [1, 2]
    assemble = loading.assemble
    monkeypatch.setattr(
        loading, "assemble", lambda *args, **given: assemble(*args, backend=RecordedOps(), **given)
    )

    def work(ranks: Ranks) -> Watch:
        engine = NativeEngine(copy.deepcopy(config))
        assert (engine.parts.runner.graphs is None) == (mode == "none")
        with IndexedByTensors():
            return run_alone(engine, requests)

    found = as_ranks(Layout(pipeline=num_stages), work)
    assert_same_run(assert_same_everywhere(found), alone)
