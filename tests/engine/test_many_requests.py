"""More requests than the cache holds, and more than memory should remember. Figures are logged:
`pytest -m slow tests/engine/test_many_requests.py -o log_cli=true -o log_cli_level=INFO`."""

from __future__ import annotations

import gc
import logging
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from graph_runs import PAIRS, graph_config, make_graph_engine
from records import request

from hydraspec.config.schema import Dtype
from hydraspec.engine.cache.kv_budget import bytes_of
from hydraspec.engine.native import NativeEngine
from hydraspec.types import Completion, Request

log = logging.getLogger(__name__)
BLOCK, K, SHARE = 8, 3, 0.05
MIB = 1 << 20


def requests(count: int, *, prompt: int, output: int) -> list[Request]:
    """With prompts of up to `prompt` random tokens and as many as `output` after them."""
    rng = random.Random(0)
    return [
        request(
            index,
            max_tokens=rng.randint(output // 4, output),
            ignore_eos=True,
            prompt_token_ids=[rng.randrange(3, 400) for _ in range(rng.randint(4, prompt))],
        )
        for index in range(count)
    ]


@dataclass
class Figures:
    """Of one run."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # other processes of the machine change it less
    num_steps: int = 0
    num_preempted: int = 0
    prefill_rows: int = 0
    cached_tokens: int = 0  # of prompts, when a request first ran
    longest_wait_s: float = 0.0  # for a first token
    most_overtaken: int = 0  # older requests that were unfinished when one ended

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))


def run(engine: NativeEngine, offered: list[Request]) -> Figures:
    found, start, cpu_start = Figures(), time.perf_counter(), time.process_time()
    for event in engine.run(offered, concurrency=None):
        if isinstance(event, Completion):
            assert event.error is None, event.error
            found.tokens[event.index] = event.output_token_ids
            found.cached_tokens += event.num_cached_tokens
            assert event.ttft_ms is not None
            found.longest_wait_s = max(found.longest_wait_s, event.ttft_ms / 1e3)
            older = sum(index not in found.tokens for index in range(event.index))
            found.most_overtaken = max(found.most_overtaken, older)
            continue
        found.num_steps += 1
        found.num_preempted += event.num_preempted
        found.prefill_rows += sum(part.num_rows for part in event.requests if part.is_prefill)
    found.seconds = time.perf_counter() - start
    found.cpu_seconds = time.process_time() - cpu_start
    return found


def compare(
    method: str, slots: int, offered: list[Request], pair: tuple[str, str | None] | None = None
) -> None:
    """All requests at once, with room for those that run, and with memory for SHARE of all, which
    the engine divides where groups differ."""
    config = graph_config(
        method,
        "none",
        pair=pair or ("tiny_qwen3", None if method == "none" else f"tiny_qwen3-{method}"),
        k=K,
        max_num_seqs=slots,
        max_num_batched_tokens=4 * slots,
        max_model_len=96,
        block_size=BLOCK,
    )
    engine = make_graph_engine(config, None)
    specs, target = engine.parts.runner.kv.specs, engine.parts.target
    ample = run(engine, offered)
    blocks = sum(
        -(-(len(r.prompt_token_ids or ()) + r.sampling.max_tokens) // BLOCK) for r in offered
    )
    num_bytes = bytes_of(specs, [int(SHARE * blocks)] * len(specs), target.dtype)
    config.engine.kv_cache.memory_gib = (num_bytes + 1) / (1 << 30)
    engine = make_graph_engine(config, None)
    if all(spec.window is None for spec in specs):
        assert engine.parts.runner.kv.num_blocks == [int(SHARE * blocks)] * len(specs)
    small = run(engine, offered)
    prompts = sum(len(r.prompt_token_ids or ()) for r in offered)
    recomputed = small.prefill_rows + small.cached_tokens - prompts
    assert ample.num_preempted == 0
    assert small.num_preempted > 0
    assert small.tokens == ample.tokens
    assert recomputed > 0
    assert small.most_overtaken < slots, "one that is admitted has all older ones beside it"
    log.info(
        "%s: %d requests, %d prompt and %d output tokens, %d slots; ample %.1f s (%.1f of the "
        "processor), %d steps; a cache of %d blocks, %.0f %% of all: %.1f s (%.1f), %d steps, "
        "%d preemptions, %d rows recomputed (%.1f %% of all that were needed), longest wait for a "
        "first token %.1f s, ended before %d older ones at most",
        *(
            method,
            len(offered),
            prompts,
            ample.output_tokens,
            slots,
            ample.seconds,
            ample.cpu_seconds,
        ),
        *(ample.num_steps, int(SHARE * blocks), 100 * SHARE, small.seconds, small.cpu_seconds),
        *(small.num_steps, small.num_preempted, recomputed),
        100 * recomputed / (prompts + small.output_tokens),
        *(small.longest_wait_s, small.most_overtaken),
    )


def test_requests_through_a_cache_that_holds_a_twentieth_of_them() -> None:
    compare("none", 8, requests(60, prompt=20, output=14))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", ["none", "eagle3"])
def test_two_thousand_requests_through_a_cache_that_holds_a_twentieth_of_them(method: str) -> None:
    """100 requests fit, and 256 may run."""
    compare(method, 256, requests(2000, prompt=40, output=32))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", ["none", "gemma4_mtp"])
def test_the_same_beside_sliding_layers(method: str) -> None:
    compare(method, 256, requests(500, prompt=40, output=32), PAIRS[method])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_is_flat_over_ten_thousand_requests() -> None:
    config = graph_config(
        *("none", "none"),
        pair=("tiny_qwen3", None),
        dtype=Dtype.float32,
        max_num_seqs=32,
        max_num_batched_tokens=512,
    )
    engine = make_graph_engine(config, None)
    offered = requests(10_000, prompt=12, output=4)
    sizes, num_ended = [], 0
    for event in engine.run(offered, concurrency=64):
        if not isinstance(event, Completion):
            continue
        num_ended += 1
        if num_ended % 1000 == 0:
            gc.collect()
            sizes.append((rss_bytes() / MIB, len(gc.get_objects())))
    log.info("after each 1,000 requests: MiB, objects %s", sizes)
    assert num_ended == 10_000
    after_two, last = sizes[1], sizes[-1]
    assert last[0] - after_two[0] < 4, "the host's memory grows"
    assert last[1] - after_two[1] < 2000, "objects of requests that have ended are kept"


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
