"""The summary of a run: the meter's metrics under the keys of metrics.summary.

Defines no metric itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import cast

from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Built, EngineInfo, StepProfile
from hydraspec.lab.rounds import Observed
from hydraspec.lab.scoring import accuracy, score_completion
from hydraspec.metrics import summary as summary_schema
from hydraspec.metrics.files import Json, plain
from hydraspec.metrics.lossless import Lossless
from hydraspec.metrics.meter import Meter, speedup
from hydraspec.metrics.sinks import Side, request_row
from hydraspec.metrics.summary import (
    ALL_STEPS,
    PROFILE,
    SCHEMA_VERSION,
    Acceptance,
    Baseline,
    Interval,
    RunFacts,
    Settings,
    Speed,
    Summary,
)
from hydraspec.types import Completion, Request

MAX_FAILURES = 3  # kinds of error that are spelt out


def build(
    *,
    config: RunConfig,
    info: EngineInfo,
    requests: Sequence[Request],
    meter: Meter,
    baseline: Meter | None,
    observed: Mapping[Side, Observed],
    lossless: Lossless,
    status: str,
    facts: RunFacts,
    warnings: Sequence[str],
) -> Summary:
    """The summary; every number is finite or null."""
    summary = {
        "schema_version": SCHEMA_VERSION,
        "status": status,
        "engine": info.engine,
        "target": info.target,
        "target_checkpoint": config.target.checkpoint,
        "method": info.method,
        "drafter": config.method.checkpoint,
        "num_speculative_tokens": info.num_speculative_tokens,
        "num_requests": len(meter.completed),
        "num_errors": _num_errors(meter),
        "num_output_tokens": meter.num_output_tokens(),
        **_acceptance(meter),
        **_speed(meter, requests, observed[Side.method]),
        "baseline": None
        if baseline is None
        else _baseline(baseline, requests, observed[Side.baseline]),
        "speedup": None if baseline is None else _speedup(meter, baseline),
        "lossless": lossless.to_json(),
        "cudagraph": info.cudagraph,
        "warnings": list(dict.fromkeys(warnings)),
        **_settings(config, info, requests),
        "num_steps": meter.num_steps,
        "num_preemptions": meter.num_preemptions,
        "peak_kv_usage": meter.peak_kv_usage,
        **facts,
    }
    return cast(Summary, plain(summary))


def failure_warnings(
    method: Mapping[int, Completion], baseline: Mapping[int, Completion]
) -> list[str]:
    """Why requests ended with an error: up to MAX_FAILURES kinds of each side, most frequent first.

    Texts that differ in numbers only are a kind, shown by its first. What failed with the method
    too is not said again for the baseline.
    """
    sides = {
        "": [c for c in method.values() if c.finish_reason == "error"],
        "baseline: ": [
            c
            for index, c in baseline.items()
            if c.finish_reason == "error"
            and (index not in method or method[index].finish_reason != "error")
        ],
    }
    warnings = []
    for side, failed in sides.items():
        kinds: dict[str, list[str]] = {}
        for completion in failed:
            text = completion.error or "no reason given"
            kinds.setdefault(re.sub(r"\d+", "0", text), []).append(text)
        for texts in sorted(kinds.values(), key=len, reverse=True)[:MAX_FAILURES]:
            requests = "1 request" if len(texts) == 1 else f"{len(texts)} requests"
            such_as = "such as " if len(set(texts)) > 1 else ""
            warnings.append(f"{side}{requests} ended with an error: {such_as}{texts[0]}")
        if (more := len(kinds) - MAX_FAILURES) > 0:
            word = "kind" if more == 1 else "kinds"
            warnings.append(f"{side}and {more} more {word} of error: see requests.jsonl")
    return warnings


def build_warnings(observed: Mapping[Side, Observed]) -> list[str]:
    """That figures hold time in which kernels were compiled or graphs captured, if they do."""
    built = sum((side.built for side in observed.values()), Built())
    if built == Built():
        return []
    return [
        f"{built.kernels} kernels were compiled and {built.graphs} graphs captured inside the "
        "measured rounds, which the speeds include: run again, since kernels are kept on the disk, "
        "and compare only runs without this warning"
    ]


def request_rows(requests: Sequence[Request], meter: Meter) -> list[Json]:
    """The lines of requests.jsonl: completed requests in workload order. Counts by position have
    a place for each of K, whatever was drafted.
    """
    by_index = {r.index: r for r in requests}
    rows = [
        request_row(request, counters, score_completion(request, counters.completion))
        for counters in meter.completed
        if counters.completion and (request := by_index[counters.index])
    ]
    for row in rows:
        for key in ("drafted_per_position", "accepted_per_position"):
            row[key] = row[key] + [0] * (meter.num_speculative_tokens - len(row[key]))
    return rows


def _acceptance(meter: Meter) -> Acceptance:
    conditional = meter.conditional_acceptance_rate_per_position()
    length = meter.acceptance_length()
    return {
        "num_drafts": meter.num_drafts(),
        "num_draft_tokens": meter.num_draft_tokens(),
        "num_accepted_tokens": meter.num_accepted_tokens(),
        "acceptance_length": {
            "mean": length.mean,
            "ci95": length.ci95,
            "mean_over_requests": meter.acceptance_length_over_requests(),
        },
        "acceptance_rate": meter.acceptance_rate(),
        "acceptance_rate_per_position": meter.acceptance_rate_per_position(),
        "conditional_acceptance_rate_per_position": conditional,
        "acceptance_length_by_category": meter.acceptance_length_by_category(),
        "num_reached_per_position": meter.num_reached_per_position(),
        "num_drafts_by_category": meter.num_drafts_by_category(),
    }


def _speed(meter: Meter, requests: Sequence[Request], observed: Observed) -> Speed:
    """Speed and accuracy: the fields that a baseline has too. A profile gives the phases' times
    where no step did.
    """
    profile = observed.phases
    breakdown: Mapping[str, float | None] = meter.time_breakdown_ms()
    measured = any(value is not None for value in breakdown.values())
    if not measured and profile is not None:
        breakdown = profile
    by_index = {r.index: r for r in requests}
    done = [(by_index[c.index], c.completion) for c in meter.completed if c.completion]
    throughput = meter.throughput()
    return {
        "output_tokens_per_second": throughput.mean,
        "output_tokens_per_second_ci95": throughput.ci95,
        "time_per_output_token_ms": meter.time_per_output_token_ms(),
        "time_to_first_token_ms": meter.time_to_first_token_ms(),
        "time_breakdown_ms": breakdown,
        "time_breakdown_from": ALL_STEPS if measured else None if profile is None else PROFILE,
        "total_step_time_s": meter.total_step_time_s(),
        "step_profile_ms": None if observed.step is None else _step_profile(observed.step),
        "built_in_rounds": {"kernels": observed.built.kernels, "graphs": observed.built.graphs},
        "accuracy": accuracy([r for r, _ in done], [score_completion(r, c) for r, c in done]),
    }


def _step_profile(found: StepProfile) -> summary_schema.StepProfile:
    return {
        "step_ms": found.step_ms,
        "device_ms": found.device_ms,
        "schedule_ms": found.schedule_ms,
        "launch_ms": found.launch_ms,
    }


def _baseline(meter: Meter, requests: Sequence[Request], observed: Observed) -> Baseline:
    return {
        **_speed(meter, requests, observed),
        "num_requests": len(meter.completed),
        "num_errors": _num_errors(meter),
        "num_output_tokens": meter.num_output_tokens(),
        "num_steps": meter.num_steps,
        "num_preemptions": meter.num_preemptions,
    }


def _speedup(meter: Meter, baseline: Meter) -> Interval | None:
    estimate = speedup(meter, baseline)
    return None if estimate.mean is None else {"mean": estimate.mean, "ci95": estimate.ci95}


def _settings(config: RunConfig, info: EngineInfo, requests: Sequence[Request]) -> Settings:
    """What a reader needs to place the figures, without opening config.yaml."""
    return {
        "workload": config.workload.name,
        "num_requests_in_workload": len(requests),
        "concurrency": config.workload.concurrency,
        "temperature": config.sampling.temperature,
        "verification": config.method.verification.value,
        "draft_sampling": config.method.draft_sampling.value,
        "device": info.device,
        "dtype": info.dtype,
        "async_scheduling": info.async_scheduling,
        "seed": config.seed,
        "draft_spec": info.draft_spec,
    }


def _num_errors(meter: Meter) -> int:
    return sum(not counters.finished for counters in meter.completed)
