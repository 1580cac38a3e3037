"""The figures of one engine and one method: time per output token, prefill and first step.

An engine is loaded once and decodes every batch size.
"""

from __future__ import annotations

import gc
import logging
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch

from hydraspec import factory
from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Engine
from hydraspec.lab import environment
from hydraspec.lab.workloads import default_sampling, request_seed
from hydraspec.metrics.files import Json
from hydraspec.types import Request, StepRecord

log = logging.getLogger(__name__)

INTERRUPTED = "interrupted"  # status of a part that is not whole
WARM_UP_TOKENS = 16
CLOCK_TOKENS = 64
STREAM = 0x62656E63  # of the prompts' random numbers
CLOCK_FIELDS = (
    *("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem"),
    *("power.draw", "power.limit", "temperature.gpu", "memory.used", "memory.total"),
)


@dataclass(slots=True, kw_only=True)
class Timing:
    """One pass of a batch through an engine."""

    seconds: float
    num_drafts: int
    num_accepted: int


def measure(config: RunConfig) -> Json:
    """Load the engine that `config` names and time every batch size of config.bench.

    Per batch: one warm-up, then config.bench.repeats times the whole output and one token alone.
    first_step_s is what a user waits for the first token of a fresh process: loading, warm-up,
    capture and that token; imports of torch are not in it. After an interrupt the part has the
    batch sizes that were finished, and status "interrupted".

    Raises:
        KeyboardInterrupt: before any batch size was finished.
    """
    started = time.perf_counter()
    engine = factory.build_engine(config)
    try:
        load_s = time.perf_counter() - started
        decode(engine, requests_of(config, engine, 1, 1), 1)
        first_step_s = time.perf_counter() - started
        log.info("loaded in %.1f s, first token after %.1f s", load_s, first_step_s)
        gc.collect()
        gc.freeze()
        part = _part(engine, load_s=load_s, first_step_s=first_step_s)
        try:
            for batch in config.bench.batches:
                part["rows"].append(_time_batch(config, engine, batch))
            part["gpu_clocks"] = _clocks_under_load(config, engine)
        except KeyboardInterrupt:
            num_done, num_wanted = len(part["rows"]), len(config.bench.batches)
            if not num_done:
                raise
            part["status"] = INTERRUPTED
            part["reason"] = f"after {num_done} of {num_wanted} batch sizes"
        # Known at the end: the largest batch's peak, and what later captures took or could not.
        part |= {
            "memory_bytes": engine.info.memory_bytes,
            "peak_memory_bytes": _peak_memory_bytes(),
            "warnings": [*config.warnings, *engine.info.warnings],
        }
        return part
    finally:
        gc.unfreeze()
        engine.close()


def _part(engine: Engine, *, load_s: float, first_step_s: float) -> Json:
    """What is known before the first batch; the other keys have their place."""
    info = engine.info
    return {
        "engine": info.engine,
        "method": info.method,
        "num_speculative_tokens": info.num_speculative_tokens,
        "status": "ok",
        "load_s": load_s,
        "first_step_s": first_step_s,
        "memory_bytes": {},
        "peak_memory_bytes": {},
        "cudagraph": info.cudagraph,
        "warnings": [],
        "environment": environment.describe(info),
        "gpu_clocks": None,
        "rows": [],
    }


def _time_batch(config: RunConfig, engine: Engine, batch: int) -> Json:
    bench = config.bench
    whole = requests_of(config, engine, batch, bench.output_tokens)
    first = requests_of(config, engine, batch, 1)
    decode(engine, requests_of(config, engine, batch, WARM_UP_TOKENS), WARM_UP_TOKENS)
    decode(engine, first, 1)
    long, short = [], []
    for _ in range(bench.repeats):
        long.append(decode(engine, whole, bench.output_tokens))
        short.append(decode(engine, first, 1))
    whole_s = median(timing.seconds for timing in long)
    prefill_s = median(timing.seconds for timing in short)
    num_drafts = sum(timing.num_drafts for timing in long)
    accepted = sum(timing.num_accepted for timing in long)
    decode_s = max(whole_s - prefill_s, 1e-9)  # noise may hide a tiny model's few tokens
    row: Json = {
        "batch": batch,
        "tpot_ms": decode_s / (bench.output_tokens - 1) * 1e3,
        "prefill_s": prefill_s,
        "output_tokens_per_second": batch * (bench.output_tokens - 1) / decode_s,
        "acceptance_length": 1 + accepted / num_drafts if num_drafts else None,
        "whole_s": [timing.seconds for timing in long],
        "one_token_s": [timing.seconds for timing in short],
    }
    log.info("batch %d: %.3f ms per token, prefill %.3f s", batch, row["tpot_ms"], prefill_s)
    return row


def requests_of(config: RunConfig, engine: Engine, batch: int, num_tokens: int) -> list[Request]:
    """`batch` prompts of random tokens, the same for every engine; each decodes num_tokens."""
    rng = np.random.default_rng([config.seed, STREAM, batch])
    sampling = replace(
        default_sampling(config.sampling, seed=0),
        max_tokens=num_tokens,
        ignore_eos=True,
        stop=(),
        stop_token_ids=(),
    )
    ids = rng.integers(0, engine.info.vocab_size, (batch, config.bench.prompt_tokens))
    return [
        Request(
            index=i,
            id=str(i),
            sampling=replace(sampling, seed=request_seed(config.seed, i)),
            prompt_token_ids=prompt,
        )
        for i, prompt in enumerate(ids.tolist())
    ]


def decode(engine: Engine, requests: Sequence[Request], num_tokens: int) -> Timing:
    """Time a batch from its offer to its last token; a step that an engine has launched ahead, and
    nobody needs any more, is not waited for.

    Raises:
        RuntimeError: a request ended otherwise than after `num_tokens`.
    """
    num_drafts = num_accepted = num_done = 0
    seconds, started = 0.0, time.perf_counter()
    for event in engine.run(requests, concurrency=None):
        if isinstance(event, StepRecord):
            for step in event.requests:
                num_drafts += bool(step.draft_token_ids)
                num_accepted += step.num_accepted
        elif len(event.output_token_ids) == num_tokens:
            num_done += 1
            seconds = time.perf_counter() - started
        else:
            raise RuntimeError(
                f"request {event.index} ended with {event.finish_reason!r} after "
                f"{len(event.output_token_ids)} of {num_tokens} tokens: {event.error}"
            )
    if num_done != len(requests):
        raise RuntimeError(f"{num_done} of {len(requests)} requests ended")
    return Timing(seconds=seconds, num_drafts=num_drafts, num_accepted=num_accepted)


def _peak_memory_bytes() -> dict[str, int]:
    """The most that torch has held on the device in this process; empty without one."""
    if not torch.cuda.is_available():
        return {}
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def _clocks_under_load(config: RunConfig, engine: Engine) -> list[dict[str, str]] | None:
    """What nvidia-smi says of each device while the largest batch decodes once more, untimed."""
    query = ["nvidia-smi", f"--query-gpu={','.join(CLOCK_FIELDS)}", "--format=csv,noheader"]
    try:
        asked = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return None
    num_tokens = min(CLOCK_TOKENS, config.bench.output_tokens)
    decode(engine, requests_of(config, engine, config.bench.batches[-1], num_tokens), num_tokens)
    said = asked.communicate(timeout=60)[0].decode(errors="replace")
    if asked.returncode != 0:
        return None
    values = [[value.strip() for value in line.split(",")] for line in said.splitlines()]
    return [dict(zip(CLOCK_FIELDS, row, strict=False)) for row in values]
