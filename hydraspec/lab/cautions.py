"""What the figures of a finished run warn of, each with its likely cause and what to try. Reads the
summary and defines no metric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb

from hydraspec.config.schema import RunConfig, Verification, Weights
from hydraspec.lab.scoring import score_completion
from hydraspec.metrics.files import Json
from hydraspec.report.figures import interval
from hydraspec.types import Completion, Request

HARDLY_EVER = 0.05  # of first drafts; a drafter that fits its target has most of them accepted
ENOUGH_DRAFTS = 50  # for a rate that low to be no accident
SIGNIFICANCE = 0.01  # of the sign test on answers


def cautions(config: RunConfig, summary: Json) -> list[str]:
    """Warnings for a run with drafts: random text, drafts that are hardly ever accepted, no
    speedup."""
    if not summary["num_drafts"]:
        return []
    found = []
    is_real = config.method.verification is not Verification.synthetic
    is_random_text = config.workload.name == "random"
    hardly = is_real and _is_hardly_accepted(summary)
    if is_real and is_random_text:
        found.append(
            "workload=random has prompts of random tokens, so acceptance and speedup say nothing "
            "about real text; to try: workload=jsonl with prompts of your own, or, for speed at a "
            "known acceptance, method.verification=synthetic"
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
    return found


def _is_hardly_accepted(summary: Json) -> bool:
    enough = summary["num_drafts"] >= ENOUGH_DRAFTS
    return bool(enough and summary["acceptance_rate_per_position"][0] < HARDLY_EVER)


def _why_hardly(config: RunConfig, is_random_text: bool) -> str:
    for group, weights in (("target", config.target.weights), ("method", config.method.weights)):
        if weights is Weights.random:
            return (
                f"likely cause: {group}.weights=random, which no drafter was trained for; to try: "
                "trained checkpoints, or method.verification=synthetic for speed"
            )
    if is_random_text:
        return "likely cause: workload=random; to try: prompts of real text"
    return (
        "likely cause: the drafter was trained for another target, its files lack tensors or its "
        "config.json says something else than it was trained with (see the warnings that name the "
        "drafter), or its logits are NaN; to try: the drafter made for this target as "
        "method.checkpoint, or target.dtype=float32"
    )


def _why_slower(summary: Json, *, hardly: bool) -> str:
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


def accuracy_caution(
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
    better, worse = "the method", "the baseline"
    if only_method < only_baseline:
        better, worse = worse, better
    return [
        f"EXACT MATCH DIFFERS: of {scored} answers {max(only_method, only_baseline)} are right "
        f"with {better} only and {min(only_method, only_baseline)} with {worse} only (sign test, "
        f"p = {p:.1g}); drafts must not change answers: one side computes something else, so do "
        "not trust this run's speedup; please report it with this folder"
    ]


def sign_test(a: int, b: int) -> float:
    """Probability of a split of a + b fair coins at least as uneven as a to b."""
    n = a + b
    tail: int = sum(comb(n, i) for i in range(min(a, b) + 1))
    return float(min(1, 2 * tail / 2**n))
