"""The answer for a group of jobs: which job to use, which are as good, which are slower than no
drafts, which K beyond those tried is worth a run, and the next command."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import numpy as np

from hydraspec.metrics.draft_figures import draft_share
from hydraspec.metrics.draft_lengths import drafts_of
from hydraspec.metrics.paired import PairedRatio
from hydraspec.metrics.summary import Interval
from hydraspec.study.blocks import Kind
from hydraspec.study.pairs import ALL
from hydraspec.study.ranking import Group, JobFigures
from hydraspec.study.settings import config_dir, typed_settings
from hydraspec.study.texts import ci_words, percent, some_of

SMALLEST_EFFECT = 0.03  # share of the speed: jobs that differ by less are equally good
SETTING = "metrics.smallest_effect"
K = "method.num_speculative_tokens"
NO_MORE = 1_000_000  # prompts: a larger number needed is not reported


class Choice(TypedDict):
    """A job in the answer of compare.json."""

    method: str
    num_speculative_tokens: int | str
    speedup: Interval | None


class AnswerRecord(Choice):
    """The answer in compare.json; with method "none" the speedup is 1."""

    as_good: list[Choice]
    may_be_as_good: list[Choice]
    slower: list[Choice]
    smallest_effect: float
    num_more_needed: int | None
    predicted: dict[str, float] | None
    sentence: str
    next: str


@dataclass(slots=True, frozen=True)
class Predicted:
    """A K beyond those tried, and the speedup that is predicted for it."""

    num_drafts: int
    speedup: float


@dataclass(slots=True, frozen=True, kw_only=True)
class Decision:
    """The answer for a group, with the jobs and figures that it is based on.

    Attributes:
        best: the fastest job with drafts whose outputs are the target's.
        smallest: the smallest effect that matters, a share of the speed.
        is_worth_it: True or False where `best` is significantly faster or slower than no drafts;
            None where this cannot be told.
        as_good: jobs with drafts that are slower than `best` by at most `smallest`.
        maybe: other jobs that may be as good: the intervals of their speedups / that of `best`
            reach to 1 - `smallest`.
        slower: jobs with drafts that are significantly slower than no drafts.
        num_more: further prompts that would settle the answer; None for none, or above NO_MORE.
        edge: words that `best` has the largest or the smallest K tried; None if it has neither.
        predicted: the best K beyond that edge; None if no such K is worth trying.
    """

    best: JobFigures
    smallest: float
    is_worth_it: bool | None
    as_good: Sequence[JobFigures]
    maybe: Sequence[JobFigures]
    slower: Sequence[JobFigures]
    num_more: int | None
    edge: str | None
    predicted: Predicted | None

    @property
    def kind(self) -> Kind:
        """The answer as a kind of block: "good", "bad", or "" where it cannot be told."""
        return {True: "good", False: "bad", None: ""}[self.is_worth_it]  # type: ignore[return-value]

    @property
    def _share(self) -> str:
        return f"{100 * self.smallest:g} %"

    def sentences(self) -> Iterator[str]:
        """Yields the answer, its reason, what is not settled, and the next command."""
        best, speed = self.best, self.best.speedups[ALL]
        assert speed is not None
        figures = f"{speed['mean']:.2f}x{ci_words(speed['ci95'])}"
        within = f"within {self._share}"
        if self.is_worth_it:
            yield (
                f"Use {name(best, ' with ')}: {figures}. As good {within}: {_names(self.as_good)}. "
                f"Slower than none: {_names(self.slower)}."
            )
        elif self.is_worth_it is None:
            yield (
                f"It cannot be told whether drafts are worth it: {name(best, ' with ')} has "
                f"{figures}. Slower than none: {_names(self.slower)}."
            )
        else:
            yield f"Use no drafts: the fastest job, {name(best, ' with ')}, has {figures}."
        yield f"Why: {self._why()}."
        if self.maybe and self.is_worth_it:
            yield f"May be as good: {_names(self.maybe)}."
        if self.num_more:
            prompts = "prompt" if self.num_more == 1 else "prompts"
            yield f"About {self.num_more:,} more {prompts} would settle that."
        if (beyond := self._beyond()) is not None:
            yield beyond
        yield f"Next: {self.next_command()}"

    def _why(self) -> str:
        length, speed = self.best.lengths[ALL], self.best.speedups[ALL]
        share = draft_share(self.best.breakdown_ms)
        drafting = "" if share is None else f", {percent(share)} of it for drafting"
        if length is None or speed is None:
            return "no draft was verified"
        return (
            f"a verification yields {length['mean']:.2f} tokens and costs as much as "
            f"{length['mean'] / speed['mean']:.2f} steps without drafts{drafting}"
        )

    def _beyond(self) -> str | None:
        if self.edge is None:
            return None
        end = f"{self.edge} that was tried"
        if self.predicted is None:
            return f"{end}; no K beyond is predicted to gain {self._share} more."
        return (
            f"{end}: {self.predicted.speedup:.2f}x is predicted for K={self.predicted.num_drafts}."
        )

    def next_command(self) -> str:
        """The command of the sweep that settles the answer, or of the best job's run."""
        best, typed = self.best, typed_settings(self.best.job.folder)
        shared = [f"{key}={value}" for key, value in typed.items() if key not in ("method", K)]
        shared = [*config_dir(best.job.folder), *shared]
        method, drafts = best.job.summary["method"], drafts_of(best.job.summary)
        if self.predicted is not None:
            values = f"{drafts},{self.predicted.num_drafts}"
            words = ["-m", f"method=none,{method}", f"{K}={values}", *shared]
        elif self.num_more:
            rivals = [best, *self.maybe]
            methods = dict.fromkeys(["none", *(each.job.summary["method"] for each in rivals)])
            tried = sorted({str(drafts_of(each.job.summary)) for each in rivals})
            shared = [one for one in shared if not one.startswith("workload.limit=")]
            limit = f"workload.limit={best.job.summary['num_requests'] + self.num_more}"
            words = ["-m", f"method={','.join(methods)}", f"{K}={','.join(tried)}", *shared, limit]
        elif self.is_worth_it:
            shared = [one for one in shared if not one.startswith("workload.limit=")]
            words = [f"method={method}", f"{K}={drafts}", *shared]
        else:
            words = ["method=none", *shared]
        return " ".join(["python -m hydraspec", *map(shlex.quote, words)])

    def record(self) -> AnswerRecord:
        """The record of the answer for compare.json."""
        none: Choice = {
            "method": "none",
            "num_speculative_tokens": 0,
            "speedup": {"mean": 1.0, "ci95": None},
        }
        predicted = None
        if (beyond := self.predicted) is not None:
            predicted = {"num_speculative_tokens": beyond.num_drafts, "speedup": beyond.speedup}
        return {
            **(none if self.is_worth_it is False else _choice(self.best)),
            "as_good": [_choice(each) for each in self.as_good],
            "may_be_as_good": [_choice(each) for each in self.maybe],
            "slower": [_choice(each) for each in self.slower],
            "smallest_effect": self.smallest,
            "num_more_needed": self.num_more,
            "predicted": predicted,
            "sentence": " ".join(list(self.sentences())[:-1]),
            "next": self.next_command(),
        }


def decide(group: Group) -> Decision | None:
    """The decision for a group of jobs: which to use, which are as good, and which are slower than
    no drafts; made once for a group. None where jobs are not ranked by speedup, or where no job
    with drafts has a known speedup and lossless outputs."""
    group.decision = group.decision or _decided(group)
    return group.decision


def _decided(group: Group) -> Decision | None:
    drafting = [
        each
        for each in group.jobs
        if not each.job.is_plain and each.speedup and each.job.lossless["verdict"] != "diverged"
    ]
    if not drafting or group.by != "speedup":
        return None
    best = max(drafting, key=lambda each: each.speedup)
    smallest = smallest_effect(best) if group.smallest_effect is None else group.smallest_effect
    low, high = (best.speedups[ALL] or {"ci95": None})["ci95"] or (0.0, float("inf"))
    worth = True if low > 1 else False if high < 1 else None
    others = [each for each in drafting if each is not best]
    as_good = [each for each in others if each.speedup >= (1 - smallest) * best.speedup]
    ratios = [(each, to_best(each, best, group)) for each in others if each not in as_good]
    maybe = [each for each, found in ratios if found is not None and _reaches(found, 1 - smallest)]
    needed = [
        found.num_more_needed() or 0
        for each, found in ratios
        if found is not None and each in maybe
    ]
    if worth is None and best.gain is not None:
        needed = [best.gain.num_more_needed() or 0]
    more = max(needed, default=0)
    edge, predicted = beyond_the_edge(best, drafting, smallest) if worth else (None, None)
    return Decision(
        best=best,
        smallest=smallest,
        is_worth_it=worth,
        as_good=as_good,
        maybe=maybe,
        slower=[each for each in drafting if _is_slower(each)],
        num_more=more if 0 < more <= NO_MORE else None,
        edge=edge,
        predicted=predicted,
    )


def smallest_effect(each: JobFigures) -> float:
    """The smallest effect that matters, a share of the speed, as the job's first run has it."""
    found = each.job.runs[0].settings.get(SETTING)
    return float(found) if isinstance(found, int | float) else SMALLEST_EFFECT


def _is_slower(each: JobFigures) -> bool:
    speed = each.speedups[ALL]
    return bool(speed and speed["ci95"] and speed["ci95"][1] < 1)


def to_best(each: JobFigures, best: JobFigures, group: Group) -> PairedRatio | None:
    """Speedup of `each` / speedup of `best`; None where these two were not compared."""
    if group.reference is best:
        figure = each.against("speedup")
        return figure.ratio if figure else None
    figure = best.against("speedup")
    if group.reference is not each or figure is None or not figure.ratio.ratio:
        return None
    low, high = figure.ratio.ci95 or (0.0, 0.0)
    ci95 = (1 / high, 1 / low) if low > 0 else None
    return replace(figure.ratio, ratio=1 / figure.ratio.ratio, ci95=ci95)


def _reaches(found: PairedRatio, least: float) -> bool:
    return found.ci95 is not None and found.ci95[1] >= least


def beyond_the_edge(
    best: JobFigures, jobs: Sequence[JobFigures], smallest: float
) -> tuple[str | None, Predicted | None]:
    """Words on the best job's K if this is the largest or the smallest K tried ("K=5 is the
    largest"), else None; and the K beyond with the highest predicted speedup, None if that gains
    less than `smallest`.

    The prediction lets a step's cost grow with K at the fitted rate of the K tried, and lets each
    further position be accepted, given the one before, at the rate of the last position measured.
    """
    family = {
        k: each
        for each in jobs
        if each.job.summary["method"] == best.job.summary["method"]
        and isinstance(k := drafts_of(each.job.summary), int)
        and each.lengths[ALL]
    }
    k = drafts_of(best.job.summary)
    if not isinstance(k, int) or k not in family or len(family) < 2:
        return None, None
    if k == max(family):
        edge, beyond = f"K={k} is the largest", range(k + 1, 2 * k + 3)
    elif k == min(family) > 1:
        edge, beyond = f"K={k} is the smallest", range(1, k)
    else:
        return None, None
    costs = {at: _length(each) / each.speedup for at, each in family.items()}
    slope = max(0.0, float(np.polyfit(list(costs), list(costs.values()), 1)[0]))
    accepted = [rate or 0.0 for rate in best.by_position]
    last = accepted[-1] / accepted[-2] if len(accepted) > 1 and accepted[-2] else accepted[-1]
    while len(accepted) < beyond[-1]:
        accepted.append(accepted[-1] * last)
    found = [
        Predicted(at, (1 + sum(accepted[:at])) / max(costs[k] + slope * (at - k), 1e-9))
        for at in beyond
    ]
    top = max(found, key=lambda one: one.speedup)
    return edge, top if top.speedup > (1 + smallest) * best.speedup else None


def _length(each: JobFigures) -> float:
    length = each.lengths[ALL]
    return length["mean"] if length else 1.0


def name(each: JobFigures, between: str = " ") -> str:
    """Name of a job, such as "gemma4_mtp with K=5": its label with `between` before K."""
    return each.job.label.replace(", K=", f"{between}K=", 1)


def _names(jobs: Sequence[JobFigures]) -> str:
    return ", ".join(some_of([name(each) for each in jobs])) or "nothing"


def _choice(each: JobFigures) -> Choice:
    return {
        "method": each.job.summary["method"],
        "num_speculative_tokens": drafts_of(each.job.summary),
        "speedup": each.speedups[ALL],
    }
