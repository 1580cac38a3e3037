"""The warnings of a finished run, with likely causes and what to try.

The module defines no metric: it reads the summary and the completions.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from hydraspec.config.choices import SEARCH_PATH, choices_of, packaged_drafters
from hydraspec.config.schema import RunConfig, TargetConfig, Verification, Weights
from hydraspec.config.workloads import is_random
from hydraspec.engine.base import Built, EngineInfo
from hydraspec.lab.rounds import Measurement
from hydraspec.metrics.accuracy import NAMES
from hydraspec.metrics.draft_lengths import PER_STEP, drafts_of
from hydraspec.metrics.lossless import rounds_inputs
from hydraspec.metrics.statistics import sign_test
from hydraspec.metrics.summary import Lossless, Summary
from hydraspec.study.settings import CONFIG_DIR
from hydraspec.study.texts import interval
from hydraspec.types import Completion, Request
from hydraspec.workloads.generated import REAL_TEXT, random_text_warning
from hydraspec.workloads.scoring import score_completion

LOW_LENGTH = 1.3  # tokens per verification; a drafter that fits its target has more
IDLE = 0.1  # drafts a step on average, where the engine chooses K
HARDLY_EVER = 0.05  # rate of first drafts; a drafter that fits its target has most accepted
ENOUGH_DRAFTS = 50  # for a rate that low to be no accident
DOCTOR = "whether the drafter is read as it was trained shows: "
MAX_FAILURES = 3  # kinds of error that are spelt out
SIGNIFICANCE = 0.01  # of the sign test on answers
DOCTOR_COMMAND = "python -m hydraspec.doctor"
# Groups whose typed keys the doctor's command repeats, without OF_RUNS, which only a run needs.
DOCTORS_GROUPS = ("target", "method", "workload", "engine", "sampling", "seed")
OF_RUNS = {
    *("method.max_speculative_tokens", "method.costs", "method.draft_sampling"),
    *("method.verification", "method.synthetic_acceptance_length", "method.synthetic_trace"),
    *("method.synthetic_category", "method.synthetic_undraftable"),
    *("workload.concurrency", "workload.request_rate", "workload.burstiness", "workload.limit"),
}


def warnings_of(
    config: RunConfig, summary: Summary, measurement: Measurement, typed: Sequence[str]
) -> list[str]:
    """Every warning that follows from what a run did, in the order in which they are shown.

    Args:
        typed: the run's overrides.
    """
    method, baseline = measurement.method, measurement.baseline
    others = {} if baseline is None else baseline.completions
    costs = method.engine.info.costs
    return [
        *build_warnings(method.built + (Built() if baseline is None else baseline.built)),
        *failure_warnings(method.completions, others),
        *verdict_warnings(summary["lossless"], method.engine.info),
        *accuracy_warnings(measurement.requests, method.completions, others),
        *figure_warnings(config, summary, rates=costs.rates if costs else (), typed=typed),
    ]


def failure_warnings(
    method: Mapping[int, Completion], baseline: Mapping[int, Completion]
) -> list[str]:
    """Warnings of requests that ended with an error: for each side up to MAX_FAILURES kinds of
    error, most frequent first.

    Texts that differ in numbers only are of one kind, whose first text is shown. The baseline's
    failures exclude requests that failed with the method too.
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
    and differences within rounding where outputs are expected to be identical."""
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
    is_exact = info.greedy_is_exact and not rounds_inputs(info.quantization, info.dtype)
    if lossless["verdict"] == "numerical" and is_exact:
        found.append(
            f"outputs differ within rounding, but {info.dtype} runs of engine={info.engine} are "
            "expected to be identical: please report this run"
        )
    return found


@dataclass(slots=True, frozen=True, kw_only=True)
class _Acceptance:
    """Acceptance of drafts; None where too few were verified to say.

    Attributes:
        first_rate: accepted / verified first drafts.
        length: tokens per verification.
        where: text that names the steps of these figures; empty for all steps of the run.
    """

    first_rate: float | None = None
    length: float | None = None
    where: str = ""

    @property
    def is_hardly_ever(self) -> bool:
        """Returns whether almost no draft was accepted."""
        return self.first_rate is not None and self.first_rate < HARDLY_EVER

    @classmethod
    def of(cls, summary: Summary, rates: Sequence[float]) -> _Acceptance:
        """Acceptance in the run, or, if it has too few drafts, in the steps whose costs were
        measured, from `rates`: the share of draft i that was accepted after i accepted drafts."""
        if summary["num_drafts"] >= ENOUGH_DRAFTS:
            rate, length = summary["acceptance_rate_per_position"][0], summary["acceptance_length"]
            return cls(first_rate=rate, length=length["mean"])
        if not rates:
            return cls()
        where = " in the steps whose costs were measured"
        return cls(first_rate=rates[0], length=1 + sum(accumulate(rates, mul)), where=where)


def figure_warnings(
    config: RunConfig,
    summary: Summary,
    *,
    rates: Sequence[float] = (),
    typed: Sequence[str] = (),
) -> list[str]:
    """Warnings for a run with drafts: random text, drafts that are hardly ever accepted, no
    speedup.

    Args:
        rates: acceptance in the steps whose costs were measured; see `_Acceptance.of`.
        typed: the run's overrides.
    """
    if not summary["num_drafts"] and not summary.get("num_speculative_tokens_used"):
        return []
    found = []
    is_real = config.method.verification is not Verification.synthetic
    is_random_text = is_random(config.workload)
    accepted = _Acceptance.of(summary, rates)
    hardly = is_real and accepted.is_hardly_ever
    if is_real and is_random_text:
        remedy = f"{REAL_TEXT}, or, for speed at a known acceptance, method.verification=synthetic"
        found.append(random_text_warning(f"workload={config.workload.name}", remedy))
    if hardly:
        found.append(
            f"drafts of method={summary['method']} are hardly ever accepted: "
            f"{accepted.first_rate:.1%} of first drafts, acceptance length {accepted.length:.2f} "
            f"of at most {summary['num_speculative_tokens'] + 1}{accepted.where}"
            f"{_idle_words(summary, ', and ')}; {_why_hardly(config, is_random_text)}"
        )
    speedup = summary["speedup"]
    if summary.get("speedup_from") == "timings: drift":
        found.append(
            "the machine changed while this run was measured in a way that does not cancel between "
            "method and baseline: the speedup is that of the timings alone; to try: a machine that "
            "does nothing else"
        )
    if speedup and speedup["mean"] < 1:
        is_certain = speedup["ci95"] is not None and speedup["ci95"][1] < 1
        verb = "is" if is_certain else "may be"
        found.append(
            f"method={summary['method']} {verb} slower than method=none here: speedup "
            f"{interval(speedup, 'x')}; {_why_slower(summary, hardly=hardly)}"
        )
    trained = is_real and config.method.needs_checkpoint and not is_random_text
    trained &= Weights.random not in (config.target.weights, config.method.weights)
    if trained and (reason := _why_doctor(summary, accepted)):
        *others, last = found or [reason]
        found = [*others, f"{last}; {DOCTOR}{doctor_command(config, typed)}"]
    return found


def _why_doctor(summary: Summary, accepted: _Acceptance) -> str:
    """The symptom of a faulty drafter, as text; empty if acceptance and speedup show none."""
    length, speedup = accepted.length, summary["speedup"]
    if length is None:
        idle = _idle_words(summary)
    else:
        idle = f"acceptance length {length:.2f}{accepted.where} is low" * (length < LOW_LENGTH)
    is_slower = speedup and speedup["ci95"] and speedup["ci95"][1] < 1
    return idle or ("slower than without drafts" if is_slower else "")


def _idle_words(summary: Summary, before: str = "") -> str:
    """Text with the share of steps in which the engine chose K=0; empty if it drafted, or if K is
    fixed."""
    used = summary.get("num_speculative_tokens_used")
    if not used or used["mean"] >= IDLE:
        return ""
    share = used["histogram"][0] / sum(used["histogram"])
    return f"{before}the engine chose K=0 in {share:.0%} of steps"


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
    key = "num_speculative_tokens"
    if drafts_of(summary) == PER_STEP:
        key = "max_speculative_tokens"
        if idle := _idle_words(summary):
            return (
                f"likely cause: drafts save less than they cost here, so {idle}, where a drafter "
                "with a cache of its own still brings that up to date; to try: a lower "
                "workload.concurrency, or method=none"
            )
    fewer = f"to try: a lower method.{key} or workload.concurrency"
    if summary["device"] == "cpu":
        return (
            "likely cause: on a CPU the rows that verify drafts cost as much as any others; "
            f"{fewer}, or a GPU"
        )
    return (
        "likely cause: drafting and verifying cost more than the accepted drafts save, because the "
        f"target is small, many requests share a step, or acceptance is low; {fewer}"
    )


def doctor_command(config: RunConfig, typed: Sequence[str]) -> str:
    """The doctor's command for a run: --config-dir, the target, the method, its checkpoint if it is
    not the target's own, and typed keys of prompts, conventions and the device.

    Args:
        config: the run's configuration, resolved.
        typed: the run's overrides.
    """
    given = {line.lstrip("+").partition("=")[0]: line for line in typed}
    keys = {key: CONFIG_DIR.sub(r"--config-dir=\1", given[key]) for key in {SEARCH_PATH} & {*given}}
    keys |= {**_target(config.target, given), "method": f"method={config.method.name}"}
    drafter, named = config.method.checkpoint, packaged_drafters(config.target.name)
    own = (None, config.target.checkpoint, named.get(config.method.name))
    if "method.checkpoint" in given or drafter not in own:
        keys["method.checkpoint"] = given.get("method.checkpoint", f"method.checkpoint={drafter}")
    for key, line in given.items():
        is_asked = key.partition(".")[0] in DOCTORS_GROUPS and key not in OF_RUNS
        if is_asked and not key.startswith("workload.goodput") and not line.endswith("=auto"):
            keys.setdefault(key, line)
    return " ".join([DOCTOR_COMMAND, *map(_quoted, keys.values())])


def _quoted(text: str) -> str:
    """The text quoted for a shell, in double quotes if it has single quotes and nothing that a
    shell expands."""
    return shlex.quote(text) if "'" not in text or set(text) & set('"$`\\!') else f'"{text}"'


def _target(target: TargetConfig, given: dict[str, str]) -> dict[str, str]:
    """Overrides, by key, that select the run's target: its choice, or its checkpoint."""
    if target.name in choices_of("target"):
        return {"target": f"target={target.name}"}
    if "target.checkpoint" in given:
        return {key: given[key] for key in ("target", "target.checkpoint") if key in given}
    return {
        "target": "target=custom",
        "target.checkpoint": f"target.checkpoint={target.checkpoint}",
    }


def accuracy_warnings(
    requests: Sequence[Request],
    method: Mapping[int, Completion],
    baseline: Mapping[int, Completion],
) -> list[str]:
    """A warning if the answers of method and baseline differ beyond noise.

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
