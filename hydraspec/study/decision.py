"""The answer for a group of jobs: which job to use, which are as good, which are slower than no
drafts, which K beyond those tried is worth a run, and the next command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

from hydraspec.metrics.draft_figures import draft_share
from hydraspec.metrics.draft_lengths import drafts_of
from hydraspec.metrics.paired import PairedRatio
from hydraspec.metrics.summary import Interval
from hydraspec.study.beyond import Beyond, Predicted, beyond_the_edge
from hydraspec.study.blocks import Kind
from hydraspec.study.next_command import (
    more_prompts,
    plain_command,
    prompts_left,
    run_command,
    sweep_command,
)
from hydraspec.study.pairs import ALL
from hydraspec.study.ranking import Group, JobFigures, worth_asking
from hydraspec.study.texts import ci_words, percent, some_of

SMALLEST_EFFECT = 0.03  # share of the speed: jobs that differ by less are equally good
SETTING = "metrics.smallest_effect"


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


@dataclass(slots=True, frozen=True, kw_only=True)
class Decision:
    """The answer for a group, with the jobs and figures that it is based on.

    Attributes:
        best: the fastest job with drafts whose outputs are the target's.
        smallest: the smallest effect that matters, a share of the speed.
        is_worth_it: True or False where `best` is significantly faster or slower than no drafts;
            None where this cannot be told.
        as_good: jobs with drafts that are slower than `best` by at most `smallest`.
        maybe: other jobs that may be as good: those that the ranking cannot tell from `best`.
        hopeless: those of `maybe` that no number of prompts worth asking for tells from `best`.
        slower: jobs with drafts that are significantly slower than no drafts.
        num_more: further prompts that would settle the answer, as the table of jobs has them; None
            where none would, or more than are worth asking for.
        beyond: what lies beyond the K that were tried; None unless `best` is at their edge.
    """

    best: JobFigures
    smallest: float
    is_worth_it: bool | None
    as_good: Sequence[JobFigures]
    maybe: Sequence[JobFigures]
    hopeless: Sequence[JobFigures]
    slower: Sequence[JobFigures]
    num_more: int | None
    beyond: Beyond | None

    @property
    def kind(self) -> Kind:
        """The answer as a kind of block: "good", "bad", or "" where it cannot be told."""
        return {True: "good", False: "bad", None: ""}[self.is_worth_it]  # type: ignore[return-value]

    @property
    def share(self) -> str:
        """The smallest effect as text, such as "3 %"."""
        return f"{100 * self.smallest:g} %"

    def sentences(self) -> Iterator[str]:
        """Yields the answer, its reason, what is not settled, and the next command."""
        best, speed = self.best, self.best.speedups[ALL]
        assert speed is not None
        figures = f"{speed['mean']:.2f}x{ci_words(speed['ci95'])}"
        within = f"within {self.share}"
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
            yield self._settled()
        if self.beyond is not None:
            yield self.beyond.sentence(self.share)
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

    @property
    def predicted(self) -> Predicted | None:
        """The best K beyond those that were tried; None if none is worth trying."""
        return self.beyond.predicted if self.beyond else None

    def _settled(self) -> str:
        """Sentence on the prompts that would settle the answer, and on how many there are."""
        assert self.num_more
        prompts = "prompt" if self.num_more == 1 else "prompts"
        is_partial = self.hopeless and self.is_worth_it
        what = f"all but {_names(self.hopeless)}" if is_partial else "that"
        left = prompts_left(self.best.job)
        lacks = left is not None and left < self.num_more
        end = f"; the workload has {left:,} more" if left else "; the workload has no more"
        return f"About {self.num_more:,} more {prompts} would settle {what}{end * lacks}."

    def next_command(self) -> str:
        """The command of the sweep that settles the answer, or of the best job's run."""
        best, more = self.best.job, None
        if self.num_more:
            more = more_prompts(best, self.num_more)
        if self.predicted or more:
            rivals = [each.job for each in self.maybe] if more else []
            beyond = self.predicted.num_drafts if self.predicted else None
            return sweep_command(best, rivals, beyond=beyond, more=more)
        has_more = self.num_more or (self.is_worth_it is None and prompts_left(best))
        return run_command(best) if self.is_worth_it or has_more else plain_command(best)

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
    as_good = [each for each in others if _share_of(each, best, group) >= 1 - smallest]
    maybe = [each for each in others if each not in as_good and not _is_told(each, best, group)]
    needed = {each.job.name: group.num_more(_row(each, best, group)) for each in maybe}
    numbers = [needed[each.job.name] for each in maybe]
    if worth is None:
        numbers = [worth_asking(best.gain)]
    elif not worth:
        numbers = []
    return Decision(
        best=best,
        smallest=smallest,
        is_worth_it=worth,
        as_good=as_good,
        maybe=maybe,
        hopeless=[each for each in maybe if not needed[each.job.name]],
        slower=[each for each in drafting if _is_slower(each)],
        num_more=max(filter(None, numbers), default=None),
        beyond=beyond_the_edge(best, drafting, smallest) if worth else None,
    )


def _row(each: JobFigures, best: JobFigures, group: Group) -> JobFigures | None:
    """The job whose row of the ranking compares `each` with `best`; None where none does."""
    return each if group.reference is best else best if group.reference is each else None


def _is_told(each: JobFigures, best: JobFigures, group: Group) -> bool:
    """Returns whether the ranking tells the two jobs apart, or does not compare them."""
    row = _row(each, best, group)
    return row is None or group.says(row) != "cannot_tell"


def _share_of(each: JobFigures, best: JobFigures, group: Group) -> float:
    """Speedup of `each` / speedup of `best`, paired where the ranking compares them."""
    found = to_best(each, best, group)
    return each.speedup / best.speedup if found is None or found.ratio is None else found.ratio


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
