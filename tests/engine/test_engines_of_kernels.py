"""Whole engines whose Triton kernels run, on a CPU: what a launch of a kernel asks of its tensors,
and its reference does not, every caller has to give; on one device, and on each of several."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import thread_ranks
import thread_stages
from fuzz_stages import RANDOM_PAIRS, Pair, stage
from interpreted import launched_kernels, run_as_on_devices
from side_by_side import assert_same_run, run_alone
from staged import assert_same_everywhere, config_of, run_over
from step_ahead import Watch

from hydraspec.config.schema import Dtype, KVDtype, RunConfig
from hydraspec.engine.native import NativeEngine
from hydraspec.parallel.layout import Layout
from hydraspec.types import Request, SamplingParams

EVERY_STEP = {"_prepare_rows", "_commit_tokens"}
QUICK = Pair("random sliding", "gemma4_mtp", "assistant")
OF_RANKS = (
    QUICK,
    Pair("random eagle3 on qwen3", "eagle3", "drafter"),
    Pair("random peagle on gemma4", "peagle", "drafter"),
    Pair("random dflash on qwen3", "dflash", "drafter"),
    Pair("random mimo", "mtp"),
)
# An overflow is an infinity on devices, and a warning of the interpreter's numpy.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TP2_PP2 = Layout(tensor=2, pipeline=2)


def name(pair: Pair) -> str:
    return f"{pair.stage}-{pair.method}".replace(" ", "_")


def small_config(pair: Pair, num_seqs: int) -> RunConfig:
    """The longest prompts are read in two chunks."""
    return config_of(pair, Dtype.float32, max_num_seqs=num_seqs, max_num_batched_tokens=8)


def few_requests(pair: Pair, count: int, most: int) -> list[Request]:
    """Greedy and sampled ones; the last takes the slot of one that has ended."""
    prompts = stage(pair.stage, Dtype.float32).prompts
    samplings = [
        SamplingParams(max_tokens=most - number % 3, ignore_eos=True, seed=number)
        for number in range(count)
    ]
    samplings[1] = replace(samplings[1], temperature=0.9, top_k=6, top_p=0.8, min_p=0.01)
    return [
        Request(index=i, id=str(i), sampling=sampling, prompt_token_ids=list(prompts[i % 4][:9]))
        for i, sampling in enumerate(samplings)
    ]


def run_kernels(
    config: RunConfig, layout: Layout, requests: list[Request], patch: pytest.MonkeyPatch
) -> tuple[Watch, set[str]]:
    """What every rank saw of a run with kernels, and the names of these."""
    with patch.context() as interpreting:
        run_as_on_devices(interpreting)
        kernels = launched_kernels(interpreting)
        return assert_same_everywhere(run_over(layout, config, requests)), kernels


def check(
    pair: Pair,
    layout: Layout,
    mode: str,
    patch: pytest.MonkeyPatch,
    most: int = 6,
    kv: KVDtype = KVDtype.auto,
) -> None:
    num_seqs = 2 * layout.pipeline  # two a step: one alone is contiguous, whatever its strides
    config, requests = small_config(pair, num_seqs), few_requests(pair, num_seqs + 1, most)
    config.engine.kv_cache.dtype = kv
    wanted = run_alone(NativeEngine(copy.deepcopy(config)), requests)
    config.cudagraph.name, config.cudagraph.capture_sizes = mode, [1, 2]
    config.engine.async_scheduling = True
    found, kernels = run_kernels(config, layout, requests, patch)
    assert_same_run(found, wanted)
    assert kernels >= EVERY_STEP
    assert "_store_drafts" in kernels


@pytest.mark.slow
def test_stages_of_kernels_choose_the_tokens_of_references(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(QUICK, Layout(pipeline=2), "none", monkeypatch, most=3)


@pytest.mark.slow
@pytest.mark.parametrize("pair", OF_RANKS[:2], ids=name)
def test_kernels_over_an_fp8_cache_choose_the_tokens_of_references(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(pair, Layout(), "full", monkeypatch, most=3, kv=KVDtype.fp8)


@pytest.mark.slow
@pytest.mark.parametrize("pair", RANDOM_PAIRS, ids=name)
def test_engines_of_kernels_choose_the_tokens_of_references(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(pair, Layout(), "none", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("pair", OF_RANKS, ids=name)
def test_ranks_of_kernels_choose_the_tokens_of_references(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (thread_ranks, thread_stages):
        monkeypatch.setattr(module, "WAIT_S", 900.0)  # each waits for the interpreter of the others
    check(pair, TP2_PP2, "full", monkeypatch, most=3)
