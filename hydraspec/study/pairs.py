"""Paired figures of two jobs over the same requests: speed, acceptance and accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import Literal

import numpy as np

from hydraspec.metrics.files import Json
from hydraspec.metrics.paired import (
    LEVEL,
    NUM_ROUNDS,
    SPEEDUP,
    Array,
    PairedRatio,
    balanced,
    costed_ratio,
    holm,
    paired_ratio,
)
from hydraspec.metrics.statistics import sign_test
from hydraspec.metrics.step_costs import CostRatio
from hydraspec.study.job_costs import JobCosts
from hydraspec.study.jobs import Job
from hydraspec.study.runs import Key, Run, key_of

Says = Literal["better", "worse", "cannot_tell"]
RankedBy = Literal["speedup", "tokens_per_second"]
Measure = Literal[RankedBy, "acceptance_length", "accuracy"]
ALL = ""  # the scope of a figure over all requests; other scopes are categories
METHOD, BASELINE = slice(0, 2), slice(2, 4)  # columns of `Pairs`: tokens and milliseconds
ACCEPTANCE = slice(4, 6)  # columns: tokens of verifications (accepted and one more), verifications
CORRECT = 6  # column: 1, 0, or NaN where not scored
STEPS = slice(7, 9)  # columns: decode steps of the job and of its baseline; NaN in earlier versions
# Columns of each measure, and the signs of their exponents in the figure.
COLUMNS: dict[Measure, tuple[slice, tuple[int, ...]]] = {
    "tokens_per_second": (METHOD, (1, -1)),
    "speedup": (slice(METHOD.start, BASELINE.stop), SPEEDUP),
    "acceptance_length": (ACCEPTANCE, (1, -1)),
}
PER_SECOND = 1000.0  # tokens per millisecond → per second


@dataclass(slots=True, kw_only=True)
class Pairs:
    """Requests that two jobs finished, paired: R rows, with values [R, 9] in `job` and `reference`.

    The rows are `num_slots` slots, one after the other. A slot has one repeat of each request from
    both jobs, so that differences between repeats show; surplus repeats of one job are added up.
    """

    keys: list[Key]
    categories: list[str | None]
    job: Array
    reference: Array
    num_slots: int

    def of(self, scope: str) -> Pairs:
        """The pairs of one category, or all pairs for ALL."""
        if scope == ALL:
            return self
        chosen = [i for i, name in enumerate(self.categories) if name == scope]
        return replace(
            self,
            keys=[self.keys[i] for i in chosen],
            categories=[scope] * len(chosen),
            job=self.job[chosen],
            reference=self.reference[chosen],
        )

    def scopes(self) -> list[str]:
        """ALL, then the categories in order."""
        return [ALL, *dict.fromkeys(name for name in self.categories if name is not None)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A measure of two jobs over all requests or one category.

    Attributes:
        ratio: job / reference; for accuracy only the p-value and the number of requests are known.
        p_adjusted: p-value after Holm's correction over a family: this measure of all jobs over all
            requests, or of all jobs in all categories.
        level: the significance level that a single comparison of the family may have to reach.
    """

    measure: Measure
    scope: str
    ratio: PairedRatio
    job: float | None
    reference: float | None
    p_adjusted: float | None = None
    level: float = LEVEL

    @property
    def says(self) -> Says:
        """Verdict on the job against the reference at LEVEL: "better", "worse" or "cannot_tell"."""
        if self.p_adjusted is None or self.p_adjusted > LEVEL:
            return "cannot_tell"
        if self.job is None or self.reference is None:
            return "cannot_tell"
        return "better" if self.job > self.reference else "worse"


def paired(job: Job, reference: Job) -> Pairs:
    """The requests of two jobs, paired by id and prompt; a job may be paired with itself."""
    mine, theirs = _by_key(job), _by_key(reference)
    slots = {key: min(len(mine[key]), len(theirs[key])) for key in mine if key in theirs}
    num_slots = max(slots.values(), default=0)
    places = [(slot, key) for slot in range(num_slots) for key, n in slots.items() if slot < n]
    sides = [
        [
            _added_up([values for _, values in found[key]][slot :: slots[key]])
            for slot, key in places
        ]
        for found in (mine, theirs)
    ]
    a, b = (np.array(side).reshape(-1, STEPS.stop) for side in sides)
    return Pairs(
        keys=[key for _, key in places],
        categories=[mine[key][0][0] for _, key in places],
        job=a,
        reference=b,
        num_slots=max(1, num_slots),
    )


def _added_up(repeats: Sequence[Array]) -> Array:
    values: Array = np.sum(repeats, axis=0)
    values[CORRECT] = repeats[0][CORRECT]
    return values


def _by_key(job: Job) -> dict[Key, list[tuple[str | None, Array]]]:
    found: dict[Key, list[tuple[str | None, Array]]] = {}
    for run in job.runs:
        for row in run.rows:
            if (values := _values(run, row)) is not None:
                found.setdefault(key_of(row), []).append((row["category"], values))
    return found


def _values(run: Run, row: Json) -> Array | None:
    """The values [9] of a request; None where job or baseline did not finish the request. A run
    without drafts is its own baseline."""
    baseline = row if run.summary["method"] == "none" else row["baseline"]
    if baseline is None or "error" in (row["finish_reason"], baseline["finish_reason"]):
        return None
    correct = float("nan") if row["correct"] is None else float(row["correct"])
    accepted = sum(row["accepted_per_position"])
    return np.array(
        [
            *(row["decode_tokens"], row["decode_ms"]),
            *(baseline["decode_tokens"], baseline["decode_ms"]),
            *(row["num_drafts"] + accepted, row["num_drafts"], correct),
            *(side.get("decode_steps", float("nan")) for side in (row, baseline)),
        ]
    )


def accuracy(rows: Array) -> float | None:
    """Share of scored requests in rows [R, 9] that are correct; None without scored requests."""
    scored = rows[~np.isnan(rows[:, CORRECT]), CORRECT]
    return float(scored.mean()) if scored.size else None


def own_figure(
    job: Job, pairs: Pairs, measure: Measure, scope: str, costs: JobCosts | None = None
) -> PairedRatio:
    """A measure of one job, other than accuracy, with its interval. `pairs` are of the job with
    itself; with `costs` a speedup is made from costs of steps instead of timings."""
    part, signs = COLUMNS[measure]
    chosen = pairs.of(scope)
    if measure == "speedup" and costs is not None:
        return _costed(chosen, [chosen.job], costs.ratio(job))
    found = _ratio(chosen, chosen.job[:, part], signs, measure, _at_once(job))
    return _per_second(found) if measure == "tokens_per_second" else found


def _per_second(found: PairedRatio) -> PairedRatio:
    ratio = None if found.ratio is None else PER_SECOND * found.ratio
    ci95 = found.ci95 and (PER_SECOND * found.ci95[0], PER_SECOND * found.ci95[1])
    return replace(found, ratio=ratio, ci95=ci95)


def figures(
    job: Job,
    reference: Job,
    *,
    with_tokens_per_second: bool = False,
    costs: JobCosts | None = None,
) -> list[Figure]:
    """Every measure that both jobs have, over all requests and by category, with p-values that are
    not corrected yet.

    Args:
        with_tokens_per_second: also give throughputs as measured, which change with the machine.
        costs: costs of the jobs' steps, from which speedups are made; None: from timings.
    """
    pairs, at_once = paired(job, reference), _at_once(job, reference)
    found = []
    for scope in pairs.scopes():
        chosen = pairs.of(scope)
        for measure, (part, signs) in COLUMNS.items():
            if measure == "tokens_per_second" and not with_tokens_per_second:
                continue
            unit = PER_SECOND if measure == "tokens_per_second" else 1.0
            a, b = chosen.job[:, part], chosen.reference[:, part]
            powers = (*signs, *(-sign for sign in signs))
            units = [unit, unit]
            if measure == "speedup" and costs is not None:
                ratio = _costed(chosen, [chosen.job, chosen.reference], costs.ratio(job, reference))
                units = [exp(costs.ratio(one).correction) for one in (job, reference)]
            else:
                both = np.concatenate([a, b], axis=1)
                ratio = _ratio(chosen, both, powers, measure, at_once)
            found.append(
                Figure(
                    measure=measure,
                    scope=scope,
                    ratio=ratio,
                    job=_rate(a, signs, units[0]),
                    reference=_rate(b, signs, units[1]),
                )
            )
        found.append(_accuracy_figure(scope, chosen.job, chosen.reference))
    return [figure for figure in found if figure.job is not None and figure.reference is not None]


def _ratio(
    pairs: Pairs, values: Array, signs: Sequence[int], measure: Measure, at_once: int
) -> PairedRatio:
    """The ratio of sums of `values` [R, C] with `signs` [C]. Its error is that over prompts, with
    repeats added up; for speed it is at least the error over all repeats in turn."""
    order = balanced(pairs.categories)
    keys, values = [pairs.keys[i] for i in order], values[order]
    places = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    by_prompt = np.zeros((len(places), len(signs)))
    np.add.at(by_prompt, [places[key] for key in keys], values)
    if measure == "acceptance_length":
        return paired_ratio(by_prompt.T, signs, at_once=None)
    found = paired_ratio(by_prompt.T, signs, at_once=at_once)
    rounds = NUM_ROUNDS * pairs.num_slots
    repeated = paired_ratio(values.T, signs, at_once=at_once, num_rounds=rounds)
    is_wider = (repeated.log_error or 0.0) > (found.log_error or 0.0)
    return replace(repeated, num_requests=found.num_requests) if is_wider else found


def _costed(pairs: Pairs, sides: Sequence[Array], costs: CostRatio) -> PairedRatio:
    """The speedup of the first of `sides` [R, 9], or its ratio to the speedup of the second: tokens
    per step by prompt, repeats of each added up, times the ratio of step costs."""
    signs = (*SPEEDUP, *(-sign for sign in SPEEDUP))[: 4 * len(sides)]
    category = dict(zip(pairs.keys, pairs.categories, strict=True))
    places = {key: i for i, key in enumerate(category)}
    timed, counted = np.zeros(len(signs)), np.zeros((len(places), len(signs)))
    rows = [places[key] for key in pairs.keys]
    for number, side in enumerate(sides):
        own = slice(4 * number, 4 * number + 4)
        timed[own] = side[:, : BASELINE.stop].sum(axis=0)
        columns = np.stack([side[:, 0], side[:, STEPS.start], side[:, 2], side[:, -1]], axis=1)
        np.add.at(counted[:, own], rows, columns)
    measured = float(np.prod(timed ** np.array(signs, float))) if (timed > 0).all() else None
    strata = list(category.values())
    return costed_ratio(counted.T, signs, measured=measured, costs=costs, strata=strata)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFigures:
    """A request in two jobs; a figure is None where a job lacks it for this request."""

    id: str
    category: str | None
    speedup_ratio: float | None  # job / reference
    acceptance_length: float | None
    reference_acceptance_length: float | None


def slowest_requests(job: Job, reference: Job, *, count: int) -> list[RequestFigures]:
    """The `count` requests with the lowest ratio of the job's speedup to the reference's, lowest
    first."""
    pairs = paired(job, reference)
    part, signs = COLUMNS["speedup"]
    lengths, rate = COLUMNS["acceptance_length"]
    found: dict[Key, RequestFigures] = {}
    for key, category, a, b in zip(
        pairs.keys, pairs.categories, pairs.job, pairs.reference, strict=True
    ):
        mine, theirs = _rate(a[None, part], signs), _rate(b[None, part], signs)
        ratio = mine / theirs if mine and theirs else None
        made = RequestFigures(
            id=key[0],
            category=category,
            speedup_ratio=ratio,
            acceptance_length=_rate(a[None, lengths], rate),
            reference_acceptance_length=_rate(b[None, lengths], rate),
        )
        found.setdefault(key, made)
    known = [each for each in found.values() if each.speedup_ratio is not None]
    return sorted(known, key=lambda each: each.speedup_ratio or 0.0)[:count]


def _rate(rows: Array, signs: Sequence[int], unit: float = 1.0) -> float | None:
    sums = rows.sum(axis=0)
    return unit * float(np.prod(sums ** np.array(signs, float))) if (sums > 0).all() else None


def _accuracy_figure(scope: str, a: Array, b: Array) -> Figure:
    """Figure of accuracy, by the exact sign test over requests in which only one job is right."""
    scored = ~np.isnan(a[:, CORRECT]) & ~np.isnan(b[:, CORRECT])
    a, b = a[scored], b[scored]
    only_job = int(((a[:, CORRECT] == 1) & (b[:, CORRECT] == 0)).sum())
    only_reference = int(((a[:, CORRECT] == 0) & (b[:, CORRECT] == 1)).sum())
    p = sign_test(only_job, only_reference) if len(a) else None
    ratio = PairedRatio(ratio=None, ci95=None, p=p, log_error=None, num_requests=len(a))
    return Figure(
        measure="accuracy", scope=scope, ratio=ratio, job=accuracy(a), reference=accuracy(b)
    )


def _at_once(*jobs: Job) -> int:
    """Number of requests that share steps: the concurrency, or all requests without a limit."""
    sizes = [job.summary["concurrency"] or job.summary["num_requests"] for job in jobs]
    return max(1, *sizes)


def corrected(
    pairs: Mapping[str, Sequence[Figure]], *, num_pairs: int | None = None
) -> dict[str, list[Figure]]:
    """The figures of several jobs with Holm's correction: over all jobs for each measure, and over
    all jobs and categories.

    Args:
        num_pairs: number of possible comparisons of jobs, if more than those in `pairs`.
    """
    out: dict[str, list[Figure]] = {name: [] for name in pairs}
    families: dict[tuple[str, bool], list[tuple[str, Figure]]] = {}
    for name, found in pairs.items():
        for figure in found:
            family = families.setdefault((figure.measure, figure.scope == ALL), [])
            family.append((name, figure))
    for (_, is_overall), members in families.items():
        num_tests = num_pairs if is_overall else None
        adjusted = holm([figure.ratio.p for _, figure in members], num_tests=num_tests)
        level = LEVEL / max(num_tests or 0, len(members))
        for (name, figure), p in zip(members, adjusted, strict=True):
            out[name].append(replace(figure, p_adjusted=p, level=level))
    return out
