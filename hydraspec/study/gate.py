"""Comparison of runs with a stored baseline, to find what is worse: acceptance by position and
category, speed, accuracy, lossless verdict and errors, with one false-alarm rate over all figures
and all comparisons with that baseline (ADR 37).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import log, sqrt

import numpy as np

from hydraspec.metrics.accuracy import accuracy_name
from hydraspec.metrics.draft_lengths import drafts_name, drafts_of
from hydraspec.metrics.files import Json
from hydraspec.metrics.paired import (
    LEVEL,
    Array,
    PairedRatio,
    holm,
    paired_ratio,
    sign_flip_test,
)
from hydraspec.metrics.splits import split_words
from hydraspec.metrics.statistics import normal_tail, ratio, student_tail
from hydraspec.study import outputs
from hydraspec.study.jobs import Job, check_alike, known_to_all, labels_of
from hydraspec.study.pairs import ALL, Figure, figures, paired
from hydraspec.study.runs import Key, Run, key_of, refuse

LOOKS = 10  # comparisons with one baseline, which share LEVEL
ACCEPTANCE_MARGIN = 0.01  # of a rate: a loss at position i alone may move the rate at i+1 so far
SPEED_MARGIN = 0.05  # share of the speedup that noise of whole runs may take
RUN_NOISE = 0.1  # standard deviation of a run's log speedup, unless repeats show less
SAME_MACHINE = ("device", "cpu", "gpus", "num_threads")  # equal where speedups are compared
USUAL = ("", "single", "standard")  # splits and verifications that labels leave out
JOB_KEYS = ("target", "engine", "method", "num_speculative_tokens", "parallelism", "verification")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A figure of a job compared with the baseline's.

    Attributes:
        what: "acceptance", "speedup", or the name of accuracy ("exact match").
        scope: a category, or ALL.
        position: position of the draft token, from 1; None for other figures than acceptance.
        was, now: the figure in the baseline and in the job.
        ratio: now / was, with its interval; for accuracy only its p-value is known.
        p: one-sided p-value of "no worse", margins granted; None where nothing can be told.
        p_adjusted: `p` after Holm's correction over all figures of the comparison.
    """

    what: str
    scope: str
    position: int | None
    was: float
    now: float
    ratio: PairedRatio
    p: float | None
    p_adjusted: float | None = None

    def is_worse(self, level: float) -> bool:
        """Returns whether the figure is significantly lower than the baseline's."""
        return self.p_adjusted is not None and self.p_adjusted <= level

    @property
    def name(self) -> str:
        """Name of the figure, such as "acceptance at position 2 in math"."""
        position = "" if self.position is None else f" at position {self.position}"
        return f"{self.what}{position}{f' in {self.scope}' if self.scope != ALL else ''}"


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Result of comparing a job with the baseline's: `broken` has sentences on what is worse for
    certain, `notes` what is not compared or differs, `level` the significance level of checks."""

    job: Job
    checks: list[Check]
    broken: list[str]
    notes: list[str] = field(default_factory=list)
    level: float = LEVEL / LOOKS

    @property
    def worse(self) -> list[Check]:
        """The figures that are significantly worse."""
        return [check for check in self.checks if check.is_worse(self.level)]

    @property
    def failed(self) -> bool:
        """Returns whether the job is worse than the baseline in any respect."""
        return bool(self.broken or self.worse)


def compare(
    baseline: Sequence[tuple[Job, Json]],
    jobs: Sequence[tuple[Job, Json]],
    *,
    looks: int = LOOKS,
    acceptance_margin: float = ACCEPTANCE_MARGIN,
    speed_margin: float = SPEED_MARGIN,
) -> list[Outcome]:
    """Compare each job with the baseline's job of the same settings; both sides are pairs of a job
    and its environment. `looks` comparisons with one baseline share LEVEL; the margins are losses
    that count as no worse: of a rate, and as a share of the speedup.

    Raises:
        ConfigurationError: only one side has a job, or a job cannot be compared.
    """
    made = []
    for (job, machine), (reference, its_machine) in matched(jobs, baseline):
        check_alike([reference, job])
        notes = [*_other_settings(reference, job), *_other_versions(its_machine, machine)]
        differing = [key for key in SAME_MACHINE if its_machine.get(key) != machine.get(key)]
        for key in differing[:1]:
            was, now = its_machine.get(key), machine.get(key)
            notes.append(f"speed is not compared: {key} was {was}, is {now}")
        if not (differing or job.is_plain):
            notes.append("speedups are compared as timed: a stored baseline has no step costs")
        checks = [*_acceptance(job, reference, acceptance_margin)]
        checks += _others(job, reference, speed_margin, with_speed=not differing)
        notes += outputs.untold(job)
        broken = [*outputs.broken(job, reference)]
        made.append(Outcome(job=job, checks=checks, broken=broken, notes=notes))
    adjusted = iter(holm([check.p for outcome in made for check in outcome.checks]))
    for outcome in made:
        outcome.checks = [replace(check, p_adjusted=next(adjusted)) for check in outcome.checks]
        outcome.level = LEVEL / looks
    return made


# ---------------------------------------------------------------- jobs of both sides


Sided = tuple[Job, Json]


def matched(jobs: Sequence[Sided], baseline: Sequence[Sided]) -> list[tuple[Sided, Sided]]:
    """Pairs (job, baseline's job) with equal JOB_KEYS, or where several jobs share these, with
    equal settings. Sets the labels of all jobs.

    Raises:
        ConfigurationError: only one side has a job, or a side has it twice.
    """
    every = [job for job, _ in (*jobs, *baseline)]
    known = known_to_all([job.runs[0].identity() for job in every])
    long_key = partial(_long_key, [key for key in known if key != "commit"])
    for key in (_short_key, long_key):
        mine, theirs = ({key(side[0]): side for side in sides} for sides in (jobs, baseline))
        if len(mine) == len(jobs) and len(theirs) == len(baseline):
            break
    else:
        raise refuse(
            jobs[0][0].runs[0].folder,
            "two jobs have the same settings",
            allowed="a job once, with any number of its repeats",
            remedy="give the folders of one commit only",
        )
    named = labels(every) if key is long_key else [_name(job) for job in every]
    for job, label in zip(every, named, strict=True):
        job.label = label
    for here, there, side, remedy in (
        (mine, theirs, "the baseline has", "leave the run out, or write a baseline with it"),
        (theirs, mine, "the folders have", "run it too, or write a baseline without it"),
    ):
        for name, (job, _) in here.items():
            if name not in there:
                raise refuse(
                    job.runs[0].folder,
                    f"{side} no job {job.label}",
                    allowed="the same jobs on both sides: "
                    + "; ".join(sorted(each.label for each, _ in there.values())),
                    remedy=remedy,
                )
    return [(mine[name], theirs[name]) for name in mine]


def labels(jobs: Sequence[Job]) -> list[str]:
    """Names of jobs, such as "tiny_gemma4, gemma4_mtp, K=3, native"; jobs of equal names get the
    settings that tell them apart, such as "max_num_seqs=8", at the end."""
    return labels_of([_name(job) for job in jobs], [job.runs[0] for job in jobs])


def _name(job: Job) -> str:
    """Name of a job, such as "tiny_gemma4, gemma4_mtp, K=3, native", with the split of several
    ranks ("tp2") and a verification other than the standard one ("block") at the end."""
    summary = job.summary
    names = [summary["target"], summary["method"], drafts_name(summary), summary["engine"]]
    others = (split_words(summary.get("parallelism")), str(summary.get("verification") or ""))
    return ", ".join([*names, *(name for name in others if name not in USUAL)])


def _short_key(job: Job) -> str:
    return str([drafts_of(job.summary), *(job.summary.get(key) for key in JOB_KEYS)])


def _long_key(keys: Sequence[str], job: Job) -> str:
    settings = job.runs[0].identity()
    return str([str(settings[key]) for key in keys])


def _other_settings(reference: Job, job: Job) -> Iterator[str]:
    """Yields notes on settings that differ, for keys that both jobs have."""
    a, b = reference.runs[0].identity(), job.runs[0].identity()
    for key in a:
        if key in b and key != "commit" and a[key] != b[key]:
            yield f"other setting: {key} was {a[key]}, is {b[key]}"


def _other_versions(was: Json, now: Json) -> Iterator[str]:
    a, b = was.get("versions") or {}, now.get("versions") or {}
    for name in a:
        if a[name] != b.get(name):
            yield f"other version: {name} was {a[name]}, is {b.get(name)}"


# ---------------------------------------------------------------- figures


def _acceptance(job: Job, reference: Job, margin: float) -> Iterator[Check]:
    """Yields checks of acceptance by position and scope. Rates are conditional on the draft before
    being accepted, so that a loss shows at its position and not at later ones."""
    mine, theirs = _counts(job), _counts(reference)
    common = [key for key in mine if key in theirs]
    categories = [mine[key][0] for key in common]
    both = np.array([(mine[key][1], theirs[key][1]) for key in common])  # [R, 2, K, 2]
    names = list(dict.fromkeys(name for name in categories if name is not None))
    for scope in names if len(names) == 1 and None not in categories else [ALL, *names]:
        chosen = [i for i, name in enumerate(categories) if scope in (ALL, name)]
        for i in range(both.shape[2]):
            if (check := _rate_check(both[chosen, :, i], scope, i + 1, margin)) is not None:
                yield check


def _counts(job: Job) -> dict[Key, tuple[str | None, Array]]:
    """Category and counts [K, 2] of each prompt, over the runs that finished it: how often each
    position was accepted and reached."""
    found: dict[Key, tuple[str | None, Array]] = {}
    for run in job.runs:
        for row in run.rows:
            if row["finish_reason"] == "error":
                continue
            counts = np.array([row["accepted_per_position"], row["reached_per_position"]], float).T
            before = found.get(key_of(row))
            total = counts if before is None else before[1] + counts
            found[key_of(row)] = (row["category"], total)
    return found


def _rate_check(counts: Array, scope: str, position: int, margin: float) -> Check | None:
    """Check of the acceptance rate at a position, None where a side never reached it. `counts`
    [R, 2, 2] has the job and the baseline, and of each accepted and reached.

    Rates are compared within each request (the ratio of Mantel and Haenszel, 1959). So a position
    that requests with high rates reach less often shows no loss.
    """
    (accepted, reached), (accepted_before, reached_before) = counts.transpose(1, 2, 0)
    was = ratio(accepted_before.sum(), reached_before.sum())
    now = ratio(accepted.sum(), reached.sum())
    if was is None or now is None:
        return None
    weights = np.maximum(reached + reached_before, 1)
    columns = np.stack([accepted * reached_before, accepted_before * reached]) / weights
    found = paired_ratio(columns, (1, -1), at_once=None)
    changes = columns[0] - columns[1]  # [R]
    granted = margin * reached * reached_before / weights
    p = sign_flip_test(changes + granted) if changes.any() else None
    return Check(
        what="acceptance",
        scope=scope,
        position=position,
        was=was,
        now=now,
        ratio=found,
        p=p,
    )


def _others(job: Job, reference: Job, speed_margin: float, *, with_speed: bool) -> Iterator[Check]:
    """Yields checks of the speedup over all requests, and of accuracy over all and by category."""
    granted = {(f.measure, f.scope): f for f in figures(job, _slowed(reference, 1 - speed_margin))}
    several = len(paired(job, reference).scopes()) > 2
    for figure in figures(job, reference):
        is_speed = figure.measure == "speedup"
        if figure.measure == "acceptance_length" or figure.job is None or figure.reference is None:
            continue
        if is_speed and (figure.scope != ALL or not with_speed or job.is_plain):
            continue
        if figure.scope != ALL and not several:
            continue
        told = granted[figure.measure, figure.scope].ratio if is_speed else figure.ratio
        p = _of_accuracy(figure)
        if is_speed and (within := _one_sided(told)) is not None:
            p = max(within, _between_runs(job, reference, speed_margin))
        yield Check(
            what="speedup" if is_speed else accuracy_name([reference.summary["accuracy"]]),
            scope=figure.scope,
            position=None,
            was=figure.reference,
            now=figure.job,
            ratio=figure.ratio,
            p=p,
        )


def _slowed(job: Job, share: float) -> Job:
    """A copy of the job with `share` of its speed."""
    runs = []
    for run in job.runs:
        rows = [{**row, "decode_ms": row["decode_ms"] / share} for row in run.rows]
        runs.append(replace(run, rows=rows))
    return replace(job, runs=runs)


def _of_accuracy(figure: Figure) -> float | None:
    """One-sided p-value of the sign test; None where the accuracies are equal or not known."""
    if figure.ratio.p is None or figure.job == figure.reference:
        return None
    half = figure.ratio.p / 2
    return half if (figure.job or 0) < (figure.reference or 0) else 1 - half


def _between_runs(job: Job, reference: Job, margin: float) -> float:
    """One-sided p-value of a speedup that is no lower than the margin allows, by the noise of whole
    runs, RUN_NOISE; with repeats twice the lower of this p and that of Student's t over repeats."""
    sides = [np.array([_log_speedup(run) for run in each.runs]) for each in (job, reference)]
    loss = float(sides[1].mean() - sides[0].mean()) + log(1 - margin)
    if loss <= 0:
        return 1.0
    width = sqrt(sum(1 / len(side) for side in sides))
    p = normal_tail(loss / (RUN_NOISE * width))
    if (freedom := sum(len(side) - 1 for side in sides)) == 0:
        return p
    spread = sqrt(sum(((side - side.mean()) ** 2).sum() for side in sides) / freedom)
    t = loss / (spread * width) if spread else float("inf")
    return min(1.0, 2 * min(p, student_tail(t, freedom)))


def _log_speedup(run: Run) -> float:
    """Logarithm of a run's speedup over the requests that both sides finished; 0 without any."""
    rows = [row for row in run.rows if row["finish_reason"] != "error" and row["baseline"]]
    rows = [row for row in rows if row["baseline"]["finish_reason"] != "error"]
    sums = [
        sum(side[key] for side in sides)
        for sides in (rows, [row["baseline"] for row in rows])
        for key in ("decode_tokens", "decode_ms")
    ]
    return log(sums[0] * sums[3] / (sums[1] * sums[2])) if min(sums) > 0 else 0.0


def _one_sided(found: PairedRatio) -> float | None:
    """One-sided p-value of a ratio of 1 or more; None where it is not known."""
    if found.ratio is None or found.p is None:
        return None
    return found.p / 2 if found.ratio < 1 else 1 - found.p / 2
