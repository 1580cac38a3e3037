"""Jobs: pooled runs of the same settings; their labels, the jobs that share a baseline, and the
check that jobs may be compared.

Jobs of one setup (split, device, engine and its settings) and load decode without drafts at the
same speed. Speedups, each over the job's own baseline, say which job is faster only among jobs of
one setup; jobs of several setups are compared by their tokens per second.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hydraspec.errors import ConfigurationError
from hydraspec.metrics.draft_lengths import drafts_of
from hydraspec.metrics.splits import split_words
from hydraspec.metrics.summary import Lossless, Summary
from hydraspec.study.runs import (
    POOLED,
    Key,
    Run,
    check_baseline,
    key_of,
    ran_without_graphs,
    refuse,
    short_names,
)

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
# Settings that a label gives as one word, such as "tp2".
SPLIT = tuple(f"parallelism.{key}" for key in ("name", "tensor", "pipeline", "data"))
MAX_TOLD = 2  # settings in a label; further ones only where they tell jobs apart
WORST_FIRST = ("diverged", "not_checked", "numerical", "identical")
SETUP = ("parallelism", "engine", "device", "dtype")  # keys of summary.json
LOAD = ("concurrency", "request_rate", "burstiness")  # keys of summary.json
GROUPS = ("engine", "parallelism", "cudagraph")  # config groups that set the speed of any method
# Keys of these groups that do not count: summaries have them, or speed does not depend on them.
LEFT_OUT = {
    *("engine.name", "engine.device", *SPLIT, "parallelism.timeout_s"),
    *("engine.vllm.master_addr", "engine.vllm.master_port", "engine.vllm.node_rank"),
}


@dataclass(slots=True, kw_only=True)
class Job:
    """Pooled runs of the same settings; `label` has the settings that tell the job from others."""

    name: str
    label: str
    runs: list[Run]

    @property
    def title(self) -> str:
        """Label and name, such as "eagle3, K=5 (job 3)"."""
        return self.name if self.label == self.name else f"{self.label} (job {self.name})"

    @property
    def drafter(self) -> str:
        """The label without its part for K ("K=3"); the whole label if that leaves nothing."""
        kept = [part for part in self.label.split(", ") if not part.startswith("K=")]
        return ", ".join(kept) or self.label

    @property
    def summary(self) -> Summary:
        """The summary of the first run."""
        return self.runs[0].summary

    @property
    def folder(self) -> Path:
        """The folder of the first run."""
        return self.runs[0].folder

    @property
    def is_plain(self) -> bool:
        """Returns whether the job decodes without drafts."""
        return self.runs[0].is_plain

    @property
    def lossless(self) -> Lossless:
        """The lossless verdict of the run with the worst one."""
        found = [run.summary["lossless"] for run in self.runs]
        return min(found, key=lambda lossless: WORST_FIRST.index(lossless["verdict"]))

    @property
    def num_devices(self) -> int:
        """Number of devices of a run, one per rank; 1 for summaries that do not say."""
        parallelism = self.summary.get("parallelism")
        return parallelism["num_devices"] if parallelism else 1


def pool(runs: Sequence[Run], *, apart: bool = False, by_commit: bool = True) -> list[Job]:
    """The jobs of runs: runs whose settings differ only in POOLED, or not at all, are one job.

    Args:
        apart: make each run a job where there would be only one job.
        by_commit: whether runs of several commits are several jobs.
    """
    idle = _idle_groups(runs)
    settings = [_without(idle, run.identity()) for run in runs]
    if not by_commit:
        settings = [each | {"commit": None} for each in settings]
    groups = list(by_key(runs, [str(sorted(each.items())) for each in settings]).values())
    if apart and len(groups) < 2:
        groups = [[run] for run in runs]
    firsts = [group[0] for group in groups]
    names = short_names([run.folder for run in firsts])
    labels = labels_of([_method(run) for run in firsts], firsts)
    return [
        Job(name=name, label=label, runs=group)
        for name, label, group in zip(names, labels, groups, strict=True)
    ]


def _idle_groups(runs: Sequence[Run]) -> set[str]:
    """The config groups whose choice made no difference: "cudagraph" if no run used graphs, as on
    a CPU."""
    return {"cudagraph"} if all(ran_without_graphs(run.summary) for run in runs) else set()


def _without(groups: Set[str], settings: Mapping[str, object]) -> dict[str, object]:
    return {k: v for k, v in settings.items() if k.partition(".")[0] not in groups}


def by_key(items: Iterable[T], keys: Iterable[K]) -> dict[K, list[T]]:
    """Items by key, in the order in which the keys are first seen."""
    groups: dict[K, list[T]] = {}
    for item, key in zip(items, keys, strict=True):
        groups.setdefault(key, []).append(item)
    return groups


def known_to_all(found: Sequence[Mapping[str, object]]) -> list[str]:
    """The keys that all mappings have; the other keys exist in some versions only."""
    return [key for key in found[0] if all(key in each for each in found)] if found else []


def differing_keys(found: Sequence[Mapping[str, object]]) -> list[str]:
    """The keys whose values, as text, are not equal in all mappings."""
    keys = dict.fromkeys(key for each in found for key in each)
    return [key for key in keys if len({str(each.get(key)) for each in found}) > 1]


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """The keys for `Run.setting` in which runs differ, without those of POOLED; the keys of a split
    count as one key, "parallelism"."""
    settings = (key for run in runs for key in run.settings)
    keys = dict.fromkeys("parallelism" if key in SPLIT else key for key in settings)
    asked = [key for key in keys if key.partition(".")[0] not in POOLED]
    return differing_keys([{key: run.setting(key) for key in asked} for run in runs])


def labels_of(names: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Labels of runs: their names, and the settings in which runs of the same name differ, as in
    "gemma4_mtp, K=3, tp2, check=True"."""
    found = list(zip(names, runs, strict=True))
    keys = {
        name: _telling([run for its, run in found if its == name]) for name in dict.fromkeys(names)
    }
    return [", ".join([name, *_told(run, keys[name])]) for name, run in found]


def _telling(runs: Sequence[Run]) -> list[str]:
    """Keys of the first MAX_TOLD settings in which runs differ, and of further settings that tell
    apart runs with equal values of these. Keys that some runs lack are left out."""
    keys: list[str] = []
    for key in differing_settings(runs):
        if key != "parallelism" and not all(key in run.settings for run in runs):
            continue
        more = [*keys, key]
        if len(keys) < MAX_TOLD or _num_told(runs, more) > _num_told(runs, keys):
            keys = more
    return keys


def _num_told(runs: Sequence[Run], keys: Sequence[str]) -> int:
    return len({tuple(_told(run, keys)) for run in runs})


def _told(run: Run, keys: Sequence[str]) -> list[str]:
    """Settings of a run as text, such as "max_num_seqs=7", "engine=vllm" or "tp2"."""
    names = [key.removesuffix(".name").rpartition(".")[2] for key in keys]
    return [
        str(run.setting(key)) if key == "parallelism" else f"{name}={run.setting(key)}"
        for key, name in zip(keys, names, strict=True)
    ]


def _method(run: Run) -> str:
    """Method and K of a run, such as "gemma4_mtp, K=3"."""
    drafts = drafts_of(run.summary)
    return ", ".join([run.summary["method"], *([f"K={drafts}"] if drafts else [])])


# ---------------------------------------------------------------- setups


def baseline_keys(runs: Sequence[Run], *, load: bool = True) -> list[str]:
    """A key for each run; keys are equal where setup and load are equal.

    Settings that only some versions know, and so only some runs have, do not count.

    Args:
        load: whether the load counts.
    """
    idle = _idle_groups(runs)
    found = [_without(idle, _settings(run, load=load)) for run in runs]
    common = known_to_all(found)
    return [str([each[key] for key in common]) for each in found]


def setup_titles(firsts: Sequence[Run]) -> list[str]:
    """Titles with the settings that tell the setups of runs apart, such as "tp2, engine vllm"."""
    found = [_settings(run, load=False) for run in firsts]
    keys = [key for key in differing_keys(found) if key in SETUP]
    setups = [str([each.get(key) for key in SETUP]) for each in found]
    alike = by_key(found, setups)
    return [
        ", ".join(_part(key, each.get(key)) for key in [*keys, *differing_keys(alike[setup])])
        for each, setup in zip(found, setups, strict=True)
    ]


def _settings(run: Run, *, load: bool) -> dict[str, object]:
    summary: Mapping[str, object] = run.summary
    recorded = (*SETUP, *LOAD) if load else SETUP
    found = {key: summary[key] for key in recorded if key in summary}
    if run.formats is not None:  # a step's cost is that of one format
        found["target format"] = run.formats.target
    for key, value in run.settings.items():
        if key.partition(".")[0] in GROUPS and key not in LEFT_OUT:
            found[key] = value
    return found


def _part(key: str, value: object) -> str:
    if key == "parallelism":
        return split_words(value) or "one device"
    group, _, name = key.rpartition(".")
    return f"{group if name == 'name' else name} {'-' if value is None else value}"


# ---------------------------------------------------------------- what may be compared


def check_alike(jobs: Sequence[Job]) -> None:
    """Refuse jobs that differ in target, sampling or prompts, and runs without a baseline.

    Raises:
        ConfigurationError: the message names the run or runs, and the difference.
    """
    runs = [(job, run) for job in jobs for run in job.runs]
    if len(runs) < 2:
        raise refuse(
            runs[0][1].folder if runs else "compare",
            "is one run: there is nothing to compare it with",
            allowed="two or more runs, or a sweep of two or more jobs",
            remedy="add the folder of another run over the same prompts",
        )
    for _, run in runs:
        check_baseline(run)
        if not run.has_finished:
            raise refuse(
                run.folder,
                "no request finished",
                allowed="runs with finished requests",
                remedy="see its summary.json and requests.jsonl",
            )
    first = runs[0][1]
    for _, run in runs[1:]:
        for what, ours, theirs in _conditions(first, run):
            if ours != theirs:
                raise _unlike(first, run, f"other {what}: {ours} and {theirs}")
    keys = [{key for run in job.runs for key in _keys(run)} for job in jobs]
    for job, found in zip(jobs[1:], keys[1:], strict=True):
        if (differing := found ^ keys[0]) and _all_ended([*jobs[0].runs, *job.runs]):
            one = min(differing)
            side = first if one in keys[0] else job.runs[0]
            problem = f"other prompts: request {one[0]!r} as it is in {side.name} is in it alone"
            raise _unlike(first, job.runs[0], problem)
        if not found & keys[0]:
            raise _unlike(first, job.runs[0], "other prompts: no request of both finished")


def _unlike(first: Run, other: Run, difference: str) -> ConfigurationError:
    return refuse(
        f"{first.folder} and {other.folder}",
        f"cannot be compared: {difference}",
        allowed="runs of the same target and sampling over the same prompts",
        remedy="compare runs that differ in method, engine or devices",
    )


def _conditions(a: Run, b: Run) -> Iterator[tuple[str, object, object]]:
    for key in ("target", "target_checkpoint"):
        yield "target", a.summary.get(key), b.summary.get(key)
    if a.formats is not None and b.formats is not None:
        yield "number format of the target", a.formats.target, b.formats.target
    keys = dict.fromkeys([*a.settings, *b.settings])
    for key in keys:
        if key.startswith("sampling.") and key != "sampling.name":
            ours, theirs = (f"{key}={run.settings.get(key)}" for run in (a, b))
            yield "sampling", ours, theirs


def _keys(run: Run) -> set[Key]:
    return {key_of(row) for row in run.rows if row["finish_reason"] != "error"}


def _all_ended(runs: Sequence[Run]) -> bool:
    """Returns whether each run ended all its requests without an error."""
    return all(
        run.summary["num_requests"] == run.summary["num_requests_in_workload"]
        and run.summary["num_errors"] == 0
        for run in runs
    )
