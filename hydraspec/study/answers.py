"""The question that runs answer, the answer for each group of jobs, and one table of all jobs."""

from __future__ import annotations

from collections.abc import Sequence

from hydraspec.metrics.draft_lengths import PER_STEP, drafts_name, drafts_of
from hydraspec.metrics.formats import shared_words
from hydraspec.metrics.media import PlainTable
from hydraspec.metrics.summary import Summary
from hydraspec.study.blocks import Kind, Verdict
from hydraspec.study.decision import decide
from hydraspec.study.families import fastest_figures
from hydraspec.study.groups import Runs
from hydraspec.study.pairs import ALL
from hydraspec.study.ranking import Group
from hydraspec.study.texts import load_words, some_of

# Key of a summary → its name in the question.
ASKED = {
    "method": "drafter",
    "num_speculative_tokens": "number of draft tokens",
    "engine": "engine",
    "parallelism": "split",
}
KINDS: dict[str, Kind] = {"worth_it": "good", "cannot_tell": "", "slower": "bad"}


def question(runs: Runs) -> str:
    """The question that the runs answer, worded by the settings in which they differ."""
    summaries = [run.summary for run in runs.runs]
    drafting = [run.summary for run in runs.runs if not run.is_plain]
    if len(summaries) == 1:
        (one,) = summaries
        if not drafting:
            return f"How fast is {one['target']} on workload {one['workload']} without drafts?"
        is_chosen = drafts_of(one) == PER_STEP
        drafts = drafts_name(one) if is_chosen else f"{drafts_of(one)} draft tokens"
        about = f"for {one['target']} on workload {one['workload']}"
        return f"Is {one['method']} with {drafts} worth it {about}?"
    named = [name for key, name in ASKED.items() if len(_values(key, drafting or summaries)) > 1]
    targets, workloads = _values("target", summaries), _values("workload", summaries)
    about = f"for {_listed(targets)} on workload {_listed(workloads)}"
    if not named and drafting and len(targets) > 1:
        return f"Is {_listed(_values('method', drafting))} worth it {about}?"
    return f"Which {_listed(named) if named else 'settings'} {about}?"


def facts(runs: Runs) -> str:
    """The number of runs, their load, and the engine, dtype, device and number formats that they
    share."""
    summaries = [run.summary for run in runs.runs]
    shared = [
        f"{name} {_values(key, summaries)[0]}"
        for key, name in (("engine", "engine"), ("dtype", "dtype"), ("device", "on"))
        if len(_values(key, summaries)) == 1
    ]
    count = "1 run" if len(summaries) == 1 else f"{len(summaries)} runs"
    loads = list(dict.fromkeys(load_words(summary) for summary in summaries))
    requests = _values("num_requests", summaries)
    load = f"{'/'.join(requests)} requests, {loads[0] if len(loads) == 1 else 'several loads'}"
    formats = shared_words([run.formats for run in runs.runs])
    return ", ".join([count, load, *shared, *([formats] if formats else [])])


def verdict(group: Group) -> Verdict:
    """Verdict on a group: its best job, that no job is worth it, or that this cannot be told."""
    about = group.title
    drafting = [one for one in group.jobs if not one.job.is_plain]
    if not drafting:
        return Verdict(kind="", about=about, sentence="All runs decode without drafts.")
    first = group.jobs[0].job
    assessment = first.summary["assessment"]
    if len(group.jobs) == len(first.runs) == 1 and assessment:
        sentence = f"{_capital(assessment['sentence'])}."
        return Verdict(kind=KINDS[assessment["says"]], about=about, sentence=sentence)
    sound = [one for one in drafting if one.job.lossless["verdict"] != "diverged"]
    lossy = [one.job.title for one in drafting if one not in sound]
    lost = ""
    if lossy:
        lost = (
            f" Outputs of {_listed(some_of(lossy), '; ')} differ from the target's: see Lossless."
        )
    if not sound:
        return Verdict(kind="bad", about=about, sentence=f"No job is usable.{lost}")
    decision = decide(group)
    if decision is None:
        sentence = f"The speedup is not known: no job has a baseline.{lost}"
        return Verdict(kind="", about=about, sentence=sentence)
    answer, *reasons, _ = decision.sentences()
    return Verdict(
        kind=decision.kind,
        about=about,
        sentence=f"{answer}{lost}",
        reasons=reasons,
        to_do=[decision.next_command()],
    )


def answers(runs: Runs) -> dict[str, object]:
    """Figures for a tracker, by key: the best job of each group and its speedup; for groups of
    several splits, engines or devices also the job with the most tokens per second."""
    found: dict[str, object] = {}
    for group in runs.groups:
        jobs = [one for one in group.jobs if not one.job.is_plain and one.speedup]
        sound = [one for one in jobs if one.job.lossless["verdict"] != "diverged"]
        if sound:
            best, title = max(sound, key=lambda one: one.speedup), group.title or "all"
            found |= {f"best/{title}/job": best.job.title, f"best/{title}/speedup": best.speedup}
    for family in runs.families:
        found |= fastest_figures(family)
    return found


def _listed(names: Sequence[str], separator: str = ", ") -> str:
    *others, last = names
    return f"{separator.join(others)} and {last}" if others else last


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _values(key: str, summaries: Sequence[Summary]) -> list[str]:
    """The distinct values of a key as text, over the summaries that have it."""
    found: list[object] = [summary.get(key) for summary in summaries if key in summary]
    if key == "num_speculative_tokens":
        found = [drafts_of(summary) for summary in summaries]
    return list(dict.fromkeys(map(str, found)))


# ---------------------------------------------------------------- for a tracker

COLUMNS = (
    *("job", "settings", "group", "method", "num_speculative_tokens"),
    *("speedup", "speedup_low", "speedup_high", "acceptance_length"),
    *("tokens_per_second_per_user", "output_tokens_per_second", "lossless", "rank"),
)


def job_table(runs: Runs) -> PlainTable:
    """Table of all jobs with COLUMNS, a row per job in the order of the report."""
    rows = []
    for group in runs.groups:
        for one in group.jobs:
            job, speed, length, speeds = one.job, one.speedups[ALL], one.lengths[ALL], one.speeds
            low, high = (speed and speed["ci95"]) or (None, None)
            rows.append(
                [
                    *(job.name, job.label, group.title),
                    *(job.summary["method"], str(drafts_of(job.summary))),
                    *(speed and speed["mean"], low, high, length and length["mean"]),
                    *(speeds.tokens_per_second_per_user, speeds.tokens_per_second),
                    *(job.lossless["verdict"], one.rank),
                ]
            )
    return PlainTable(columns=COLUMNS, rows=rows)
