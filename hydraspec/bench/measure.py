"""Measures a part: one engine with one method, which is loaded once for every row."""

from __future__ import annotations

import gc
import logging
import subprocess
import time
from collections.abc import Sequence

import torch

from hydraspec import factory
from hydraspec.bench.choices import BENCHMARKS
from hydraspec.bench.passes import Passes, make_requests, random_prompts
from hydraspec.config.benches import check_room
from hydraspec.config.drafts import is_per_step
from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Engine
from hydraspec.lab import environment
from hydraspec.metrics.files import Json
from hydraspec.types import Request

log = logging.getLogger(__name__)

INTERRUPTED = "interrupted"  # status of a part that is not whole
CLOCK_FIELDS = (
    *("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem"),
    *("power.draw", "power.limit", "temperature.gpu", "memory.used", "memory.total"),
)


def measure(config: RunConfig) -> Json:
    """Load the engine that `config` names, measure every row of the benchmark and return the part.

    first_step_s is the time to the first token of a fresh process: loading, warm-up, capture and
    that token, without imports of torch. After an interrupt the part has the rows that were
    finished, and status "interrupted".

    Raises:
        ConfigurationError: requests are longer than the target takes.
        KeyboardInterrupt: an interrupt came before any row was finished.
    """
    benchmark = BENCHMARKS[config.bench.name]
    started = time.perf_counter()
    engine = factory.build_engine(config)
    try:
        load_s = time.perf_counter() - started
        factory.log_notes(engine)
        check_room(config, engine.info.max_model_len)
        prompts = random_prompts(config, engine.info.vocab_size, 1)
        Passes(engine, make_requests(config, prompts, [1])).run()
        first_step_s = time.perf_counter() - started
        log.info("loaded in %.1f s, first token after %.1f s", load_s, first_step_s)
        gc.collect()
        gc.freeze()
        part = _part(config, engine, load_s=load_s, first_step_s=first_step_s)
        try:
            for row in benchmark.rows(config, engine):
                part["rows"].append(row)
            part |= benchmark.figures(config, engine, part["rows"])
            part["gpu_clocks"] = _clocks_under_load(
                engine, benchmark.heavy_requests(config, engine)
            )
        except KeyboardInterrupt:
            num_done, num_wanted = len(part["rows"]), benchmark.num_rows(config)
            if not num_done:
                raise
            part["status"] = INTERRUPTED
            part["reason"] = f"after {num_done} of {num_wanted} {benchmark.units}"
        # Known only at the end: the peak over all rows, and memory and warnings of later captures.
        factory.log_notes(engine)
        costs = engine.info.costs
        part |= {
            "costs": None if costs is None else costs.as_json(),
            "memory_bytes": engine.info.memory_bytes,
            "peak_memory_bytes": _peak_memory_bytes(),
            "warnings": [*config.warnings, *engine.info.warnings],
        }
        return part
    finally:
        gc.unfreeze()
        engine.close()


def _part(config: RunConfig, engine: Engine, *, load_s: float, first_step_s: float) -> Json:
    """The part before its first row, with every key."""
    info = engine.info
    return {
        "engine": info.engine,
        "method": info.method,
        "num_speculative_tokens": info.num_speculative_tokens,
        "chooses_drafts": is_per_step(config) and info.num_speculative_tokens > 0,
        "status": "ok",
        "load_s": load_s,
        "first_step_s": first_step_s,
        "costs": None,
        "memory_bytes": {},
        "peak_memory_bytes": {},
        "cudagraph": info.cudagraph,
        "warnings": [],
        "environment": environment.describe(info),
        "gpu_clocks": None,
        "rows": [],
    }


def _peak_memory_bytes() -> dict[str, int]:
    """The most that torch has held on the device in this process; empty without a device."""
    if not torch.cuda.is_available():
        return {}
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def _clocks_under_load(engine: Engine, requests: Sequence[Request]) -> list[dict[str, str]] | None:
    """Values of nvidia-smi for each device while these requests decode; None if the tool fails."""
    query = ["nvidia-smi", f"--query-gpu={','.join(CLOCK_FIELDS)}", "--format=csv,noheader"]
    try:
        asked = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return None
    Passes(engine, requests).run()
    said = asked.communicate(timeout=60)[0].decode(errors="replace")
    if asked.returncode != 0:
        return None
    values = [[value.strip() for value in line.split(",")] for line in said.splitlines()]
    return [dict(zip(CLOCK_FIELDS, row, strict=False)) for row in values]
