"""The summary of a run: the meter's metrics under the keys of metrics.summary.

The module defines no metric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from hydraspec.config.schema import RunConfig, Verification, WorkloadConfig
from hydraspec.engine.base import EngineInfo
from hydraspec.lab.formats import quantization
from hydraspec.lab.prediction import Expected
from hydraspec.lab.rounds import Measured, Measurement
from hydraspec.metrics import assessment
from hydraspec.metrics.accuracy import accuracy
from hydraspec.metrics.files import Json, plain
from hydraspec.metrics.grammars import Grammars
from hydraspec.metrics.latency import Limits, by_turn, goodput, latencies, percentiles
from hydraspec.metrics.meter import Meter, cost_ratio, finished_pairs, measured_speedup, speedup
from hydraspec.metrics.run_facts import RunFacts
from hydraspec.metrics.sinks import OF_BASELINE, request_row
from hydraspec.metrics.step_costs import CostRatio
from hydraspec.metrics.summary import (
    ALL_STEPS,
    PROFILE,
    SCHEMA_VERSION,
    Acceptance,
    Counts,
    Lossless,
    PrefixCache,
    Settings,
    Speed,
    Status,
    StepProfile,
    Summary,
)
from hydraspec.types import Completion, Request
from hydraspec.workloads.scoring import score_completion

NOTHING = Expected()  # no prediction


def build(
    config: RunConfig,
    measurement: Measurement,
    lossless: Lossless,
    *,
    status: Status,
    facts: RunFacts,
    expected: Expected = NOTHING,
) -> Summary:
    """The summary of a run, with an empty list of warnings; every number is finite or null."""
    requests, method, baseline = measurement.requests, measurement.method, measurement.baseline
    info, meter = method.engine.info, method.meter
    pairs = [] if baseline is None else finished_pairs(meter, baseline.meter)
    at_once = config.workload.concurrency or len(requests)
    costs = None if baseline is None else _costs(meter, baseline.meter, config.workload)
    gained = speedup(pairs, at_once=at_once, costs=costs)
    by_category = assessment.speedups_by_category(pairs, at_once=at_once, costs=costs)
    source = "step costs" if costs and costs.holds else "timings: drift"
    wanted = config.workload.goodput
    limits = Limits(ttft_ms=wanted.ttft_ms, inter_token_ms=wanted.inter_token_ms)
    summary = {
        "schema_version": SCHEMA_VERSION,
        "status": status,
        "engine": info.engine,
        "target": info.target,
        "target_checkpoint": config.target.checkpoint,
        "method": info.method,
        "drafter": config.method.checkpoint,
        "num_speculative_tokens": info.num_speculative_tokens,
        **_counts(meter),
        **_acceptance(meter),
        **_speed(method, requests, limits),
        "baseline": None
        if baseline is None
        else {**_speed(baseline, requests, limits), **_counts(baseline.meter)},
        "speedup": assessment.as_interval(gained),
        "speedup_measured": measured_speedup(pairs),
        "speedup_from": (source if costs else "timings: few steps") if pairs else None,
        "assessment": None
        if baseline is None
        else assessment.assess(
            gained,
            by_category,
            num_pairs=len(pairs),
            diverged=lossless["verdict"] == "diverged",
            synthetic=config.method.verification is Verification.synthetic,
        ),
        "prediction": expected.beside(assessment.as_interval(gained)),
        "by_category": assessment.by_category(meter, by_category, pairs),
        "acceptance_by_output_place": assessment.by_output_place(meter),
        "teacher_forced": method.teacher_forced,
        "lossless": lossless,
        "cudagraph": info.cudagraph,
        "warnings": [],
        **_settings(config, info, requests),
        "peak_kv_usage": meter.steps.peak_kv_usage,
        **facts,
    }
    return cast(Summary, plain(summary))


def request_rows(requests: Sequence[Request], measurement: Measurement) -> list[Json]:
    """The lines of requests.jsonl: completed requests in workload order."""
    rows = _rows(requests, measurement.method)
    others = {} if measurement.baseline is None else _rows(requests, measurement.baseline)
    for index in rows.keys() & others.keys():
        rows[index]["baseline"] = {key: others[index][key] for key in OF_BASELINE}
    return list(rows.values())


def _rows(requests: Sequence[Request], measured: Measured) -> dict[int, dict[str, Json]]:
    meter = measured.meter
    return {
        request.index: request_row(
            request,
            completion,
            meter.counters[request.index],
            score_completion(request, completion),
            num_positions=meter.num_speculative_tokens,
        )
        for request, completion in _completed(requests, measured)
    }


def _completed(requests: Sequence[Request], measured: Measured) -> list[tuple[Request, Completion]]:
    completions = measured.completions
    ended = sorted((r for r in requests if r.index in completions), key=lambda r: r.index)
    return [(request, completions[request.index]) for request in ended]


def _acceptance(meter: Meter) -> Acceptance:
    conditional = meter.conditional_acceptance_rate_per_position()
    length = meter.acceptance_length()
    return {
        "num_drafts": meter.num_drafts(),
        "num_draft_tokens": meter.num_draft_tokens(),
        "num_accepted_tokens": meter.num_accepted_tokens(),
        "num_jump_forward_tokens": meter.num_jump_forward_tokens(),
        "acceptance_length": {
            "mean": length.mean,
            "ci95": length.ci95,
            "mean_over_requests": meter.acceptance_length_over_requests(),
        },
        "acceptance_length_percentiles": percentiles(meter.acceptance_lengths()),
        "acceptance_rate": meter.acceptance_rate(),
        "acceptance_rate_per_position": meter.acceptance_rate_per_position(),
        "conditional_acceptance_rate_per_position": conditional,
        "acceptance_length_by_category": meter.acceptance_length_by_category(),
        "num_reached_per_position": meter.num_reached_per_position(),
        "num_drafts_by_category": meter.num_drafts_by_category(),
        "num_speculative_tokens_used": meter.steps.draft_lengths.used(meter.num_speculative_tokens),
        "draft_survival": meter.draft_survival(),
    }


def _speed(measured: Measured, requests: Sequence[Request], limits: Limits) -> Speed:
    """Speed and accuracy: the fields that a baseline has too. The times of phases come from a
    profile if no step has them.
    """
    meter, profile = measured.meter, measured.phase_ms
    breakdown: Mapping[str, float | None] = meter.steps.time_breakdown_ms()
    has_phases = any(value is not None for value in breakdown.values())
    if not has_phases and profile is not None:
        breakdown = profile
    done = _completed(requests, measured)
    throughput = meter.throughput()
    return {
        "output_tokens_per_second": throughput.mean,
        "output_tokens_per_second_ci95": throughput.ci95,
        "time_per_output_token_ms": meter.time_per_output_token_ms(),
        "time_to_first_token_ms": meter.time_to_first_token_ms(),
        "latency_ms": latencies(meter.completed),
        "by_turn": by_turn(list(meter.counters.values())),
        "goodput": goodput(meter.completed, limits, meter.steps.rounds_s),
        "time_breakdown_ms": breakdown,
        "time_breakdown_from": ALL_STEPS if has_phases else None if profile is None else PROFILE,
        "total_step_time_s": meter.steps.total_step_time_s(),
        "step_profile_ms": cast(StepProfile | None, plain(measured.step_profile)),
        "built_in_rounds": {"kernels": measured.built.kernels, "graphs": measured.built.graphs},
        "accuracy": accuracy([r for r, _ in done], [score_completion(r, c) for r, c in done]),
    }


def _costs(method: Meter, baseline: Meter, load: WorkloadConfig) -> CostRatio | None:
    places = load.concurrency if load.request_rate is None else None
    return cost_ratio(method, baseline, at_once=places)


def _counts(meter: Meter) -> Counts:
    return {
        "num_requests": len(meter.completed),
        "num_errors": sum(not counters.finished for counters in meter.completed),
        "num_output_tokens": meter.num_output_tokens(),
        "num_image_tokens": meter.num_image_tokens(),
        "num_steps": meter.steps.num_steps,
        "num_preemptions": meter.steps.num_preemptions,
        "prefix_cache": _prefix_cache(meter),
        "kv_peak_usage_per_group": meter.steps.kv_peak_usage_per_group,
    }


def _prefix_cache(meter: Meter) -> PrefixCache | None:
    hits = meter.prefix_hits
    if hits is None:
        return None
    return {
        "queried_tokens": hits.num_queried_tokens,
        "hit_tokens": hits.num_hit_tokens,
        "hit_rate": hits.hit_rate(),
        "eligible_hit_rate": hits.eligible_hit_rate(),
        "border_tokens": hits.num_border_tokens(),
        "recomputed_tokens": meter.num_recomputed_tokens(),
    }


def _settings(config: RunConfig, info: EngineInfo, requests: Sequence[Request]) -> Settings:
    """Settings that a reader needs to place the figures, without opening config.yaml."""
    return {
        "workload": config.workload.name,
        "num_requests_in_workload": len(requests),
        "concurrency": config.workload.concurrency,
        "request_rate": config.workload.request_rate,
        "burstiness": config.workload.burstiness,
        "temperature": config.sampling.temperature,
        "verification": config.method.verification.value,
        "draft_sampling": config.method.draft_sampling.value,
        "device": info.device,
        "dtype": info.dtype,
        "max_model_len": info.max_model_len,
        "async_scheduling": info.async_scheduling,
        "parallelism": {
            "tensor": config.parallelism.tensor,
            "pipeline": config.parallelism.pipeline,
            "data": config.parallelism.data,
            "num_devices": config.parallelism.num_ranks,
        },
        "devices": info.devices or [info.device],
        "seed": config.seed,
        "quantization": quantization(info),
        "grammars": cast(Grammars | None, plain(info.grammars)),
        "draft_spec": info.draft_spec,
    }
