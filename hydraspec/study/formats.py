"""One model in several number formats (metrics.compare_formats): speed, acceptance, memory, and the
agreement of its greedy outputs with those of the float target.

Each target has its own baseline, so that speeds of two targets are compared as measured: a job's
speed is its speedup times the mean baseline of its target over all jobs, and the spread of the same
baseline over jobs says how much the machine changed.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from statistics import fmean

from hydraspec.metrics.accuracy import accuracy_name
from hydraspec.metrics.draft_lengths import drafts_of
from hydraspec.metrics.files import Json
from hydraspec.metrics.formats import FLOAT
from hydraspec.study.blocks import Block, Line, Section, Table, Verdict
from hydraspec.study.charts import Bar, horizontal_bars
from hydraspec.study.decision import smallest_effect
from hydraspec.study.jobs import Job, by_key
from hydraspec.study.pairs import ALL
from hydraspec.study.ranking import Group, JobFigures
from hydraspec.study.runs import Key, key_of
from hydraspec.study.settings import config_dir, typed_settings
from hydraspec.study.texts import estimate, number, percent

KEY = "metrics.compare_formats"
MB = 1e6
NOTE = (
    "tok/s of all users: the speedup times the mean speed without drafts of the target, over all "
    "its jobs. Outputs: the share of greedy requests whose tokens equal those of {reference}, and "
    "the mean place, from 1, of the first token that differs in the others. Weights: bytes in "
    "memory, in MB."
)
HEADER = (
    *("target", "target format", "drafter", "drafter format", "tok/s", "speedup"),
    *("acceptance length", "target MB", "drafter MB", "outputs equal", "first difference"),
)


@dataclass(slots=True, frozen=True, kw_only=True)
class Agreement:
    """Greedy outputs beside the reference's: the requests of both, the share of equal outputs, and
    the mean place, from 1, of the first difference in the others; None if all are equal."""

    num_requests: int
    equal: float
    first_difference: float | None


@dataclass(slots=True, kw_only=True)
class InFormat:
    """A job with drafts of one of the targets.

    Attributes:
        drafter_format: None for a drafter without weights.
        tokens_per_second: of all users; see the module.
        plain_tokens_per_second: of the target without drafts, the mean over its jobs.
        agreement: None for sampled outputs.
    """

    of: JobFigures
    target_format: str
    drafter_format: str | None
    tokens_per_second: float
    plain_tokens_per_second: float
    agreement: Agreement | None

    @property
    def job(self) -> Job:
        """The job whose figures these are."""
        return self.of.job

    @property
    def target(self) -> str:
        """Name of the target."""
        return self.job.summary["target"]

    @property
    def title(self) -> str:
        """Target, drafter and K, such as "tiny_gemma4_fp8 with gemma4_mtp, K=3"."""
        return f"{self.target} with {self.drafter}"

    @property
    def drafter(self) -> str:
        """Drafter and K."""
        return f"{self.job.summary['method']}, K={drafts_of(self.job.summary)}"

    def megabytes(self, key: str) -> float:
        """Size of "weights" or "draft_weights" in memory."""
        return self.job.summary["memory_bytes"].get(key, 0) / MB


@dataclass(slots=True, kw_only=True)
class Formats:
    """The jobs of all formats under one load, fastest first; `reference` is the first one of a
    target in float, else the first; `spread` is the fastest / the slowest baseline of one target.
    """

    jobs: Sequence[InFormat]
    reference: InFormat
    spread: float
    title: str

    @property
    def best(self) -> InFormat:
        """The fastest job whose outputs are those of its own target."""
        sound = (one for one in self.jobs if one.job.lossless["verdict"] != "diverged")
        return next(sound, self.jobs[0])

    @property
    def rivals(self) -> list[InFormat]:
        """The fastest jobs of other targets that cannot be told from the best one: slower by less
        than the smallest effect that matters, or than the machine changed."""
        least = self.best.tokens_per_second / max(1 + smallest_effect(self.best.of), self.spread)
        fastest = {one.target: one for one in reversed(self.jobs)}
        others = (one for name, one in fastest.items() if name != self.best.target)
        return [one for one in others if one.tokens_per_second >= least]


def found_in(groups: Sequence[Group]) -> list[Formats]:
    """The comparisons of formats in groups of several targets: one for each load and setup in which
    runs ask for it and two targets have figures and differ in their number format."""
    asked = [group for group in groups if _asks(group)]
    loads = by_key(asked, [(group.load, group.setup) for group in asked])
    made = (_formats(members) for members in loads.values())
    return [one for one in made if one is not None]


def _asks(group: Group) -> bool:
    runs = [run for one in group.jobs for run in one.job.runs]
    return all(run.settings.get(KEY) is True and run.formats is not None for run in runs)


def _formats(groups: Sequence[Group]) -> Formats | None:
    members = [(group, one) for group in groups for one in group.jobs]
    drafting = [one for _, one in members if not one.job.is_plain and one.speedups[ALL]]
    targets = {_target_format(one) for one in drafting}
    if len({one.job.summary["target"] for one in drafting}) < 2 or len(targets) < 2:
        return None
    plain: dict[str, list[float]] = {}
    for _, one in members:
        if speed := one.own_baseline.tokens_per_second:
            plain.setdefault(one.job.summary["target"], []).append(speed)
    in_float = (one for one in drafting if _target_format(one) == FLOAT)
    reference = next(in_float, drafting[0])
    jobs = [_in_format(one, reference, plain) for one in drafting]
    jobs.sort(key=lambda one: -one.tokens_per_second)
    return Formats(
        jobs=jobs,
        reference=next(one for one in jobs if one.of is reference),
        spread=max(max(speeds) / min(speeds) for speeds in plain.values()),
        title=", ".join(part for part in (groups[0].load, groups[0].setup) if part),
    )


def _target_format(one: JobFigures) -> str:
    found = one.job.runs[0].formats
    return FLOAT if found is None else found.target


def _in_format(
    one: JobFigures, reference: JobFigures, plain: Mapping[str, Sequence[float]]
) -> InFormat:
    found, dtype = one.job.runs[0].formats, one.job.summary["dtype"]
    sides = (FLOAT, FLOAT) if found is None else (found.target, found.drafter or FLOAT)
    target, drafter = (dtype if side == FLOAT else side for side in sides)
    has_weights = one.job.summary["memory_bytes"].get("draft_weights") != 0
    without = fmean(plain.get(one.job.summary["target"], [0.0]))
    return InFormat(
        of=one,
        target_format=target,
        drafter_format=drafter if has_weights else None,
        tokens_per_second=one.speedup * without,
        plain_tokens_per_second=without,
        agreement=agreement(one.job, reference.job),
    )


def agreement(job: Job, reference: Job) -> Agreement | None:
    """Agreement of a job's outputs with those of a reference over the requests that both finished;
    None where outputs were sampled, or no request is in both."""
    if any(one.summary["temperature"] > 0 for one in (job, reference)):
        return None
    mine, theirs = _outputs(job), _outputs(reference)
    pairs = [(mine[key], theirs[key]) for key in mine if key in theirs]
    places = [
        1 + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
        for a, b in pairs
        if a != b
    ]
    if not pairs:
        return None
    return Agreement(
        num_requests=len(pairs),
        equal=1 - len(places) / len(pairs),
        first_difference=fmean(places) if places else None,
    )


def _outputs(job: Job) -> dict[Key, list[int]]:
    """The output tokens of the requests that the job's first run finished."""
    rows = job.runs[0].rows
    return {key_of(row): row["output_token_ids"] for row in rows if row["finish_reason"] != "error"}


# ---------------------------------------------------------------- in words


def section(found: Formats) -> Section:
    """Section of a page: chart of tokens per second, and the table of all jobs."""
    return Section(title=found.title, blocks=[block(found)])


def block(found: Formats) -> Block:
    """Chart of tokens per second of each job, and a table of all figures."""
    best, correct = found.best, accuracy_name(one.job.summary["accuracy"] for one in found.jobs)
    bars = [
        Bar(
            label=f"{one.target}, {one.job.summary['method']}",
            value=one.tokens_per_second,
            text=number(one.tokens_per_second, 0),
            color="var(--good)" if one is best else "var(--method)",
        )
        for one in found.jobs
    ]
    lines = [
        Line(cells=_cells(one), link=one.job.folder, kind="good" if one is best else "")
        for one in found.jobs
    ]
    return Block(
        title="One model in several number formats",
        note=f"{NOTE.format(reference=found.reference.target)} {_machine(found)}",
        chart=horizontal_bars(bars, description="Tokens per second by target and drafter"),
        table=Table(header=[*HEADER, correct, "lossless"], lines=lines, num_left=4),
    )


def _cells(one: InFormat) -> list[str]:
    agreed = one.agreement
    scored = one.of.accuracy
    if scored is None and one.job.summary["accuracy"]:
        scored = one.job.summary["accuracy"]["exact_match"]
    return [
        *(one.target, one.target_format, one.drafter, one.drafter_format or "-"),
        *(number(one.tokens_per_second, 0), estimate(one.of.speedups[ALL], "x")),
        estimate(one.of.lengths[ALL]),
        *(number(one.megabytes(key)) for key in ("weights", "draft_weights")),
        percent(agreed.equal if agreed else None),
        number(agreed.first_difference if agreed else None, 1),
        number(scored, 3),
        one.job.lossless["verdict"].replace("_", " "),
    ]


def _machine(found: Formats) -> str:
    if found.spread <= 1 + smallest_effect(found.best.of):
        return "The same baseline was as fast in all jobs of a target."
    return (
        f"The same baseline differed by a factor of {found.spread:.2f} between jobs: speeds that "
        "differ by less may be the machine's."
    )


def verdict(found: Formats) -> Verdict:
    """The answer: the target and drafter to use, its gain over the reference's fastest job, what
    the format saves and what it changes, and the command of its run."""
    best, rivals = found.best, found.rivals
    same = [one for one in found.jobs if one.target == found.reference.target]
    gain = best.tokens_per_second / same[0].tokens_per_second
    beside = "" if best in same else f", {gain:.2f}x the fastest job of {same[0].target}"
    if rivals:
        names = ", ".join(one.title for one in rivals)
        first = f"It cannot be told which format is the fastest: {best.title} has"
        rest = f"; as good, as far as these runs tell: {names}"
    else:
        first, rest = f"Use {best.title}:", ""
    figures = f"{number(best.tokens_per_second, 0)} tokens/s{beside}"
    return Verdict(
        kind="" if rivals else "good",
        about=found.title,
        sentence=f"{first} {figures}{rest}.",
        reasons=[*_beside(found), _machine(found)],
        to_do=[command(best)],
    )


def _beside(found: Formats) -> list[str]:
    """Sentences on the fastest job of each other target than the reference's: speed, memory and
    outputs beside the reference's."""
    reference = found.reference
    fastest = {one.target: one for one in reversed(found.jobs)}
    speed = fastest[reference.target].tokens_per_second
    said = []
    for name, one in fastest.items():
        if name == reference.target:
            continue
        sizes = (number(each.megabytes("weights")) for each in (one, reference))
        said.append(
            f"{name} ({one.target_format}): {one.tokens_per_second / speed:.2f}x the speed of "
            f"{reference.target}, {' MB of weights beside '.join(sizes)}"
            f"{_agreed(one.agreement)}."
        )
    return said


def _agreed(found: Agreement | None) -> str:
    if found is None:
        return ""
    if found.first_difference is None:
        return f", all {found.num_requests} outputs equal"
    return (
        f", {percent(found.equal)} of {found.num_requests} outputs equal, the others up to token "
        f"{found.first_difference:.1f} on average"
    )


def command(one: InFormat) -> str:
    """The command of a single run of a job."""
    typed = dict(typed_settings(one.job.folder))
    if typed.pop("experiment", None):  # which is a sweep, and sets the type
        typed.setdefault("target.dtype", one.job.summary["dtype"])
    named = {"target": one.target, "method": one.job.summary["method"]}
    words = [f"{key}={value}" for key, value in {**named, **typed}.items()]
    return shlex.join(["python", "-m", "hydraspec", *config_dir(one.job.folder), *words])


def as_json(found: Formats) -> Json:
    """The comparison as compare.json has it."""
    answer = verdict(found)
    return {
        "reference": found.reference.job.name,
        "best": found.best.job.name,
        "as_good": [one.job.name for one in found.rivals],
        "baseline_spread": found.spread,
        "sentence": " ".join([answer.sentence, *answer.reasons]),
        "next": command(found.best),
        "jobs": [_job_json(one) for one in found.jobs],
    }


def _job_json(one: InFormat) -> Json:
    summary = one.job.summary
    return {
        "job": one.job.name,
        "target": one.target,
        "target_format": one.target_format,
        "method": summary["method"],
        "num_speculative_tokens": drafts_of(summary),
        "drafter_format": one.drafter_format,
        "tokens_per_second": one.tokens_per_second,
        "plain_tokens_per_second": one.plain_tokens_per_second,
        "speedup": one.of.speedups[ALL],
        "acceptance_length": one.of.lengths[ALL],
        "target_bytes": summary["memory_bytes"].get("weights"),
        "drafter_bytes": summary["memory_bytes"].get("draft_weights"),
        "agreement": None if one.agreement is None else asdict(one.agreement),
        "accuracy": summary["accuracy"],
    }
