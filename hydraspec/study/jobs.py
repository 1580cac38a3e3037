"""Jobs: runs of the same settings, pooled; what tells jobs apart, which of them share a baseline,
and which may be compared.

Jobs of one setup (split, device, engine and its settings) and load decode without drafts at the
same speed. Speedups, each over its own baseline, say which job is faster only among jobs of one
setup; others are compared by their tokens per second.
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
# Settings that one word of a split says: "tp2".
SPLIT = tuple(f"parallelism.{key}" for key in ("name", "tensor", "pipeline", "data"))
MAX_TOLD = 2  # settings in a label; further ones only where they tell jobs apart
WORST_FIRST = ("diverged", "not_checked", "numerical", "identical")
SETUP = ("parallelism", "engine", "device", "dtype")  # keys of summary.json
LOAD = ("concurrency", "request_rate", "burstiness")  # keys of summary.json
GROUPS = ("engine", "parallelism", "cudagraph")  # config groups that set the speed of any method
# Of these groups: what a summary says better, and what no speed depends on.
LEFT_OUT = {
    *("engine.name", "engine.device", *SPLIT, "parallelism.timeout_s"),
    *("engine.vllm.master_addr", "engine.vllm.master_port", "engine.vllm.node_rank"),
}


@dataclass(slots=True, kw_only=True)
class Job:
    """Runs of the same settings, pooled; `label` has the settings that tell it from other jobs."""

    name: str
    label: str
    runs: list[Run]

    @property
    def title(self) -> str:
        """Label and name: "eagle3, K=5 (job 3)"."""
        return self.name if self.label == self.name else f"{self.label} (job {self.name})"

    @property
    def drafter(self) -> str:
        """The label without its number of drafts, "K=3"."""
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
        """The worst verdict of its runs."""
        found = [run.summary["lossless"] for run in self.runs]
        return min(found, key=lambda lossless: WORST_FIRST.index(lossless["verdict"]))

    @property
    def num_devices(self) -> int:
        """The ranks of a run, each with its device; 1 in summaries that do not say."""
        parallelism = self.summary.get("parallelism")
        return parallelism["num_devices"] if parallelism else 1


def pool(runs: Sequence[Run], *, apart: bool = False, by_commit: bool = True) -> list[Job]:
    """Runs that differ in seed or tracker only, or in nothing, as one job.

    Args:
        apart: each run is a job where there would be one job only.
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
    """The config groups whose choice made no difference: graphs, where none ran in any of the runs,
    as on a CPU."""
    return {"cudagraph"} if all(ran_without_graphs(run.summary) for run in runs) else set()


def _without(groups: Set[str], settings: Mapping[str, object]) -> dict[str, object]:
    return {k: v for k, v in settings.items() if k.partition(".")[0] not in groups}


def by_key(items: Iterable[T], keys: Iterable[K]) -> dict[K, list[T]]:
    """Items of equal keys together, in the order in which keys are first seen."""
    groups: dict[K, list[T]] = {}
    for item, key in zip(items, keys, strict=True):
        groups.setdefault(key, []).append(item)
    return groups


def known_to_all(found: Sequence[Mapping[str, object]]) -> list[str]:
    """The keys that every one of several settings has: others are of some versions alone."""
    return [key for key in found[0] if all(key in each for each in found)] if found else []


def differing_keys(found: Sequence[Mapping[str, object]]) -> list[str]:
    """The keys whose values, as text, are not the same in all of several settings."""
    keys = dict.fromkeys(key for each in found for key in each)
    return [key for key in keys if len({str(each.get(key)) for each in found}) > 1]


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """The keys for `Run.setting` in which runs differ, apart from those that repeats may differ in;
    those of a split are one."""
    settings = (key for run in runs for key in run.settings)
    keys = dict.fromkeys("parallelism" if key in SPLIT else key for key in settings)
    asked = [key for key in keys if key.partition(".")[0] not in POOLED]
    return differing_keys([{key: run.setting(key) for key in asked} for run in runs])


def labels_of(names: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Names of runs, with settings in which runs of the same name differ: "…, tp2, check=True"."""
    found = list(zip(names, runs, strict=True))
    keys = {
        name: _telling([run for its, run in found if its == name]) for name in dict.fromkeys(names)
    }
    return [", ".join([name, *_told(run, keys[name])]) for name, run in found]


def _telling(runs: Sequence[Run]) -> list[str]:
    """The first MAX_TOLD settings in which runs differ, and others that tell runs apart for which
    these are equal. A key that only one version knows is none."""
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
    """ "max_num_seqs=7", "engine=vllm", "tp2"."""
    names = [key.removesuffix(".name").rpartition(".")[2] for key in keys]
    return [
        str(run.setting(key)) if key == "parallelism" else f"{name}={run.setting(key)}"
        for key, name in zip(keys, names, strict=True)
    ]


def _method(run: Run) -> str:
    """ "gemma4_mtp, K=3"."""
    drafts = drafts_of(run.summary)
    return ", ".join([run.summary["method"], *([f"K={drafts}"] if drafts else [])])


# ---------------------------------------------------------------- setups


def baseline_keys(runs: Sequence[Run], *, load: bool = True) -> list[str]:
    """A key for each run: equal where setup and load are.

    A setting that only some versions know, and so only some runs have, does not count.

    Args:
        load: whether the load counts.
    """
    idle = _idle_groups(runs)
    found = [_without(idle, _settings(run, load=load)) for run in runs]
    common = known_to_all(found)
    return [str([each[key] for key in common]) for each in found]


def setup_titles(firsts: Sequence[Run]) -> list[str]:
    """The settings that tell setups of runs apart: "tp2", "engine vllm"."""
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
    for key, value in run.settings.items():
        if key == "target.quantised" or (key.partition(".")[0] in GROUPS and key not in LEFT_OUT):
            found[key] = value
    return found


def _part(key: str, value: object) -> str:
    if key == "parallelism":
        return split_words(value) or "one device"
    group, _, name = key.rpartition(".")
    return f"{group if name == 'name' else name} {'-' if value is None else value}"


# ---------------------------------------------------------------- what may be compared


def check_alike(jobs: Sequence[Job]) -> None:
    """Refuse jobs of other targets, sampling or prompts, and runs without a baseline.

    Raises:
        ConfigurationError: naming both runs and the difference.
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
