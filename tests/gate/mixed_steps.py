"""A load by kinds of steps, and the trace of one step that mixes a prompt with decodes.

    python tests/gate/mixed_steps.py target=gemma4_e4b method=none cudagraph.max_mixed_rows=2048
    python tests/gate/mixed_steps.py target=gemma4_31b --trace mixed.json

Arguments are overrides of experiment=bench_gemma4 (random weights, synthetic acceptance). Printed:
what loading and each capture took; of the last of three passes over the load, per kind of step, how
many, their rows, milliseconds between results; tokens a second. Then of one step with 31 decodes
and a prompt of 340 tokens: rows, kernels, the device's busy time, gaps between kernels, the kernels
that take longest. `--trace` also writes the profile for a browser (chrome://tracing).
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.profiler import profile, supported_activities

from hydraspec import factory
from hydraspec.bench.load import requests_of
from hydraspec.bench.passes import make_requests
from hydraspec.cli.compose import plan
from hydraspec.config.schema import RunConfig
from hydraspec.engine.native import NativeEngine
from hydraspec.engine.run.device_runner import DeviceRunner
from hydraspec.engine.run.results import LaunchedStep
from hydraspec.types import Completion, StepPlan, StepRecord

PASSES = 3
PROMPT_TOKENS, LONG, SHORT = 340, 160, 24  # of the traced step; outputs of the others, of the first
GAP_US = 3.0  # between two kernels; less is the launch of the next one
TOP = 12


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", metavar="FILE", help="write the profile of the mixed step here")
    options, overrides = parser.parse_known_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    given = ["experiment=bench_gemma4", "bench=load", "engine.prefix_caching=false", *overrides]
    config = plan(given).jobs[0].config
    started = time.perf_counter()
    engine = factory.build_engine(config)
    assert isinstance(engine, NativeEngine)
    say(f"loaded in {time.perf_counter() - started:.1f} s; {engine.info.cudagraph}")
    _load(engine, config)
    _one_step(engine, config, options.trace)
    engine.close()


# ------------------------------------------------------------------------------------------- load


def _load(engine: NativeEngine, config: RunConfig) -> None:
    requests = requests_of(config, engine)
    kinds = _watched(engine)
    for number in range(1, PASSES + 1):
        kinds.clear()
        started, tokens, seconds = time.perf_counter(), 0, 0.0
        records: list[StepRecord] = []
        for event in engine.run(requests, concurrency=None):
            if isinstance(event, StepRecord):
                records.append(event)
            else:
                tokens += len(event.output_token_ids)
                seconds = time.perf_counter() - started
        say(f"pass {number}: {seconds:.2f} s, {tokens / seconds:.0f} tokens/s")
    spent: dict[str, list[float]] = defaultdict(list)
    rows: Counter[str] = Counter()
    for kind, record in zip(kinds, records, strict=False):
        spent[kind].append(record.total_ms)
        rows[kind] += sum(part.num_rows for part in record.requests)
    say(f"{'kind of step':32}{'steps':>7}{'rows':>9}{'ms in all':>11}{'median':>9}{'largest':>9}")
    for kind, times in sorted(spent.items()):
        figures = f"{sum(times):11.0f}{statistics.median(times):9.2f}{max(times):9.2f}"
        say(f"{kind:32}{len(times):7}{rows[kind]:9}{figures}")


def _watched(engine: NativeEngine) -> list[str]:
    """The kinds of the steps that are launched from now on, in order."""
    runner, kinds = engine.parts.runner, list[str]()
    launch, rows = runner.launch, engine.info.num_speculative_tokens + 1

    def noted(step: StepPlan) -> LaunchedStep:
        decodes = int((step.num_rows == rows).sum())
        kind = "decodes" if decodes == len(step.slots) else "mixed" if decodes else "prompts"
        parts = runner._split(step) if isinstance(runner, DeviceRunner) else [(step, None)]
        graphs = [
            "eager" if found is None else f"graph of {found.descriptor.num_rows}"
            for _, found in parts
        ]
        kinds.append(f"{kind}, {' + '.join(graphs)}")
        return launch(step)

    runner.launch = noted  # type: ignore[method-assign]
    return kinds


# -------------------------------------------------------------------------------------- one step


def _one_step(engine: NativeEngine, config: RunConfig, path: str | None) -> None:
    """The step after the first of max_num_seqs decodes has ended: one more prompt joins."""
    most = config.engine.max_num_seqs
    prompts = [[7 + (17 * i + j) % 5000 for j in range(PROMPT_TOKENS)] for i in range(most + 1)]
    requests = make_requests(config, prompts, [SHORT] + [LONG] * most)
    engine._num_ahead = 0  # the step alone, between two waits of the host
    for traced in (False, True):  # the first time untraced: kernels are loaded
        events = engine.run(requests, concurrency=None)
        try:
            for event in events:
                if isinstance(event, Completion):
                    break
            _wait()
            step = partial(next, _steps(events))
            if traced:
                _trace(step, path)
            else:
                step()
        finally:
            events.close()


def _steps(events: Iterator[StepRecord | Completion]) -> Iterator[StepRecord]:
    return (event for event in events if isinstance(event, StepRecord))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _trace(step: Callable[[], StepRecord], path: str | None) -> None:
    with profile(activities=list(supported_activities())) as profiled:
        record = step()
        _wait()
    rows = [part.num_rows for part in record.requests]
    say(f"\none mixed step: {sum(rows)} rows of {len(rows)} requests, the largest {max(rows)}")
    kernels = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiled.events() or []
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    if not kernels:
        say("the profile has no kernels")
        return
    busy, gaps, end = 0.0, list[float](), kernels[0][0]
    for first, last, _ in kernels:
        if first - end > GAP_US:
            gaps.append(first - end)
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    whole = end - kernels[0][0]
    say(
        f"{len(kernels)} kernels and copies in {whole / 1000:.2f} ms, busy {busy / 1000:.2f} ms; "
        f"{len(gaps)} gaps of over {GAP_US} us, {sum(gaps) / 1000:.2f} ms in all; "
        f"host {record.total_ms:.2f} ms from schedule to result"
    )
    spent: dict[str, list[float]] = defaultdict(list)
    for first, last, name in kernels:
        spent[name].append(last - first)
    for name, times in sorted(spent.items(), key=lambda item: -sum(item[1]))[:TOP]:
        say(f"{sum(times) / 1000:9.3f} ms {len(times):5} x {name[:90]}")
    if path is not None:
        profiled.export_chrome_trace(path)


if __name__ == "__main__":
    main()
