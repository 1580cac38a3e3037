"""Fuzzed configurations on a device, held against the CPU's run of the same."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from fuzz_cases import Case, Choices, draw
from fuzz_engines import build, check_steps, near_tie, run_together
from side_by_side import assert_same_run, run_alone
from step_ahead import Watch

from hydraspec.engine.native import NativeEngine

# A tie of one device is within 8 eps max|logit|. Two devices add in other orders through up to 18
# layers, so the margin that either sees is off by a few more of these.
TIE = 32

Build = Callable[[Case], NativeEngine]


@dataclass
class Across:
    """What was compared, and what was not equal for a reason."""

    num_cases: int = 0
    num_requests: int = 0
    num_accepted: int = 0
    ties: list[str] = field(default_factory=list)  # greedy tokens at a near tie of the target
    listed: list[str] = field(default_factory=list)  # sampled tokens and drafts that differ


def run_across(numbers: Iterable[int], choices: Choices, build_there: Build) -> Across:
    """Cases on a device and on the CPU; prints what is listed."""
    across = Across()
    for number in numbers:
        case = draw(number, choices)
        try:
            compare(case, build_there, across)
        except Exception as error:
            error.add_note(str(case))
            raise
        gc.collect()
        torch.cuda.empty_cache()  # nothing on a CPU
    for line in across.ties + across.listed:
        print(line)  # noqa: T201
    return across


def compare(case: Case, build_there: Build, across: Across) -> None:
    cases = [case] if case.other is None else [case, case.other]
    engines = [build(replace(one, runner="plain")) for one in cases]
    wanted = run_together(cases, engines)
    there = [build_there(one) for one in cases]
    found = run_together(cases, there)
    across.num_cases += 1
    for one, engine, seen, known in zip(cases, engines, found, wanted, strict=True):
        check_steps(one, seen)
        compare_runs(one, engine, seen, known, across)
    if case.company != "baseline":
        return
    origin, here = there[0], engines[0].baseline()
    baseline = origin.baseline()
    known = run_alone(here, case.requests, case.concurrency)
    compare_runs(case, here, run_alone(baseline, case.requests, case.concurrency), known, across)
    assert_same_run(run_alone(origin, case.requests, case.concurrency), found[0])


def compare_runs(
    case: Case, engine: NativeEngine, found: Watch, wanted: Watch, across: Across
) -> None:
    """`engine` is the CPU's, which is asked for margins."""
    assert found.completions.keys() == wanted.completions.keys()
    across.num_requests += len(found.completions)
    across.num_accepted += sum(p.num_accepted for r in found.records for p in r.requests)
    num_unlike = 0
    for request in case.requests:
        got, known = found.completions[request.index], wanted.completions[request.index]
        where = f"case {case.number} ({case.pair.stage}, {case.config.method.name})"
        where += f", request {request.index}"
        assert got.error == known.error, where
        if got.output_token_ids != known.output_token_ids:
            num_unlike += 1
            if request.sampling.temperature > 0.0:
                across.listed.append(f"{where}: sampled tokens differ")
                continue
            tie = near_tie(engine, request, got.output_token_ids, known.output_token_ids, TIE)
            across.ties.append(f"{where}: {tie}")
            continue
        assert got.finish_reason == known.finish_reason, where
        steps = found.decodes.get(request.index), wanted.decodes.get(request.index)
        # A request that took another way changes when the others are preempted.
        if steps[0] != steps[1] and not (num_unlike and case.room is not None):
            num_unlike += 1
            across.listed.append(f"{where}: drafts differ")
