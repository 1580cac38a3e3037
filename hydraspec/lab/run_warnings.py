"""The warnings of a finished run, with likely causes and what to try.

Defines no metric: reads the summary and the completions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hydraspec.config.schema import RunConfig, Verification, Weights
from hydraspec.config.workloads import is_random
from hydraspec.engine.base import Built, EngineInfo
from hydraspec.lab.rounds import Measurement
from hydraspec.lab.scoring import score_completion
from hydraspec.metrics.accuracy import NAMES
from hydraspec.metrics.paired import sign_test
from hydraspec.metrics.summary import Lossless, Summary
from hydraspec.report.figures import interval
from hydraspec.types import Completion, Request

LOW_LENGTH = 1.3  # tokens per verification; a drafter that fits its target has more
HARDLY_EVER = 0.05  # of first drafts; a drafter that fits its target has most of them accepted
ENOUGH_DRAFTS = 50  # for a rate that low to be no accident
DOCTOR = (
    "whether the drafter is read as it was trained shows: python -m hydraspec.doctor with the "
    "target and method of this run"
)
MAX_FAILURES = 3  # kinds of error that are spelt out
SIGNIFICANCE = 0.01  # of the sign test on answers


def warnings_of(config: RunConfig, summary: Summary, measurement: Measurement) -> list[str]:
    """Every warning that follows from what a run did, in the order in which they are shown."""
    method, baseline = measurement.method, measurement.baseline
    others = {} if baseline is None else baseline.completions
    return [
        *build_warnings(method.built + (Built() if baseline is None else baseline.built)),
        *failure_warnings(method.completions, others),
        *verdict_warnings(summary["lossless"], method.engine.info),
        *accuracy_warnings(measurement.requests, method.completions, others),
        *figure_warnings(config, summary),
    ]


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


def build_warnings(built: Built) -> list[str]:
    """A warning if speeds include time in which kernels were compiled or graphs captured."""
    if built == Built():
        return []
    return [
        f"{built.kernels} kernels were compiled and {built.graphs} graphs captured inside the "
        "measured rounds, which the speeds include: run again, since kernels are kept on the disk, "
        "and compare only runs without this warning"
    ]


def verdict_warnings(lossless: Lossless, info: EngineInfo) -> list[str]:
    """Warnings beside the verdict: requests that only one side lost, logits that are not finite,
    and ties where outputs are expected to be identical."""
    found = []
    sides = f"method={info.method}", "the baseline"
    for count, failed, finished in (
        (lossless["num_failed_with_method_only"], *sides),
        (lossless["num_failed_with_baseline_only"], *reversed(sides)),
    ):
        if count:
            requests = "1 request" if count == 1 else f"{count} requests"
            found.append(f"{requests} ended with an error in {failed} but not in {finished}")
    if (broken := lossless["not_finite_in"]) is not None:
        found.append(
            f"the target's logits in request {broken!r} are NaN or infinite: its "
            "tokens, and all figures of this run, mean nothing; the weights are broken, or "
            f"{info.dtype} overflows: try another target.dtype"
        )
    if lossless["verdict"] == "numerical" and info.greedy_is_exact:
        found.append(
            f"outputs differ within rounding, but {info.dtype} runs of engine={info.engine} are "
            "expected to be identical: please report this run"
        )
    return found


def figure_warnings(config: RunConfig, summary: Summary) -> list[str]:
    """Warnings for a run with drafts: random text, drafts that are hardly ever accepted, no
    speedup."""
    if not summary["num_drafts"]:
        return []
    found = []
    is_real = config.method.verification is not Verification.synthetic
    is_random_text = is_random(config.workload)
    hardly = is_real and _is_hardly_accepted(summary)
    if is_real and is_random_text:
        found.append(
            f"workload={config.workload.name} has prompts of random tokens, so acceptance and "
            "speedup say nothing about real text; to try: workload=jsonl with prompts of your own, "
            "or, for speed at a known acceptance, method.verification=synthetic"
        )
    if hardly:
        rate, length = summary["acceptance_rate_per_position"][0], summary["acceptance_length"]
        found.append(
            f"drafts of method={summary['method']} are hardly ever accepted: {rate:.1%} of first "
            f"drafts, acceptance length {length['mean']:.2f} of at most "
            f"{summary['num_speculative_tokens'] + 1}; {_why_hardly(config, is_random_text)}"
        )
    speedup = summary["speedup"]
    if speedup and speedup["mean"] < 1:
        is_certain = speedup["ci95"] is not None and speedup["ci95"][1] < 1
        verb = "is" if is_certain else "may be"
        found.append(
            f"method={summary['method']} {verb} slower than method=none here: speedup "
            f"{interval(speedup, 'x')}; {_why_slower(summary, hardly=hardly)}"
        )
    trained = is_real and config.method.needs_checkpoint and not is_random_text
    if trained and Weights.random not in (config.target.weights, config.method.weights):
        found = _with_the_doctor(found, summary)
    return found


def _with_the_doctor(found: list[str], summary: Summary) -> list[str]:
    """The warnings, the last with where to look for a fault of the drafter if acceptance or speedup
    suggest one."""
    length, speedup = summary["acceptance_length"]["mean"], summary["speedup"]
    is_low = length is not None and length < LOW_LENGTH and summary["num_drafts"] >= ENOUGH_DRAFTS
    is_slower = speedup and speedup["ci95"] and speedup["ci95"][1] < 1
    if not is_low and not is_slower:
        return found
    *others, last = found or [f"acceptance length {length:.2f} is low"]
    return [*others, f"{last}; {DOCTOR}"]


def _is_hardly_accepted(summary: Summary) -> bool:
    rate = summary["acceptance_rate_per_position"][0]
    return summary["num_drafts"] >= ENOUGH_DRAFTS and rate is not None and rate < HARDLY_EVER


def _why_hardly(config: RunConfig, is_random_text: bool) -> str:
    for group, weights in (("target", config.target.weights), ("method", config.method.weights)):
        if weights is Weights.random:
            return (
                f"likely cause: {group}.weights=random, which no drafter was trained for; to try: "
                "trained checkpoints, or method.verification=synthetic for speed"
            )
    if is_random_text:
        name = config.workload.name
        return f"likely cause: workload={name} of random tokens; to try: prompts of real text"
    if not config.method.needs_checkpoint:
        return (
            f"likely cause: method={config.method.name} has no weights: drafts "
            "depend on the text alone; to try: a method with a drafter"
        )
    return (
        "likely cause: the drafter was trained for another target, its files lack tensors or its "
        "config.json says something else than it was trained with (see the warnings that name the "
        "drafter), or its logits are NaN; to try: the drafter made for this target as "
        "method.checkpoint, or target.dtype=float32"
    )


def _why_slower(summary: Summary, *, hardly: bool) -> str:
    if hardly:
        return "likely cause: drafts that are hardly ever accepted, as said above"
    fewer = "to try: a lower method.num_speculative_tokens or workload.concurrency"
    if summary["device"] == "cpu":
        return (
            "likely cause: on a CPU the rows that verify drafts cost as much as any others; "
            f"{fewer}, or a GPU"
        )
    return (
        "likely cause: drafting and verifying cost more than the accepted drafts save, because the "
        f"target is small, many requests share a step, or acceptance is low; {fewer}"
    )


def accuracy_warnings(
    requests: Sequence[Request],
    method: Mapping[int, Completion],
    baseline: Mapping[int, Completion],
) -> list[str]:
    """A warning where the answers of method and baseline differ beyond noise.

    Exact two-sided sign test over the requests that both sides finished and that have an answer, of
    which one side only is right (McNemar's test, exact), at SIGNIFICANCE.
    """
    scored = 0
    only_method = only_baseline = 0
    for request in requests:
        if request.index not in method or request.index not in baseline:
            continue
        ours = score_completion(request, method[request.index])
        theirs = score_completion(request, baseline[request.index])
        if ours is None or theirs is None:
            continue
        scored += 1
        only_method += ours and not theirs
        only_baseline += theirs and not ours
    p = sign_test(only_method, only_baseline)
    if p >= SIGNIFICANCE:
        return []
    name = NAMES[requests[0].scoring]
    better, worse = "the method", "the baseline"
    if only_method < only_baseline:
        better, worse = worse, better
    return [
        f"{name.upper()} DIFFERS: of {scored} answers {max(only_method, only_baseline)} are right "
        f"with {better} only and {min(only_method, only_baseline)} with {worse} only (sign test, "
        f"p = {p:.1g}); drafts must not change answers: one side computes something else, so do "
        "not trust this run's speedup; please report it with this folder"
    ]
