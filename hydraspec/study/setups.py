"""Setups of jobs: split, device, engine and its settings, and which jobs share a baseline.

Jobs of one setup and load decode without drafts at the same speed. Speedups, each over its own
baseline, say which job is faster only among jobs of one setup; others are compared by their tokens
per second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hydraspec.metrics.splits import split_words
from hydraspec.study.runs import SPLIT, Run, known_to_all

SETUP = ("parallelism", "engine", "device", "dtype")  # keys of summary.json
LOAD = ("concurrency", "request_rate", "burstiness")  # keys of summary.json
GROUPS = ("engine", "parallelism", "cudagraph")  # config groups that set the speed of any method
# Of these groups: what a summary says better, and what no speed depends on.
LEFT_OUT = {
    *("engine.name", "engine.device", *SPLIT, "parallelism.timeout_s"),
    *("engine.vllm.master_addr", "engine.vllm.master_port", "engine.vllm.node_rank"),
}


def baseline_keys(runs: Sequence[Run], *, load: bool = True) -> list[str]:
    """A key for each run: equal where setup and load are.

    A setting that only some versions know, and so only some runs have, does not count.

    Args:
        load: whether the load counts.
    """
    found = [_settings(run, load=load) for run in runs]
    common = known_to_all(found)
    return [str([each[key] for key in common]) for each in found]


def setup_titles(firsts: Sequence[Run]) -> list[str]:
    """What tells the setups of runs apart: "tp2", "engine vllm"; further settings where these are
    equal."""
    found = [_settings(run, load=False) for run in firsts]
    keys = dict.fromkeys(key for each in found for key in each)
    setups = [str([each.get(key) for key in SETUP]) for each in found]
    made = []
    for each, setup in zip(found, setups, strict=True):
        alike = [other for other, its in zip(found, setups, strict=True) if its == setup]
        parts = [
            _part(key, each.get(key))
            for key in keys
            if len({str(one.get(key)) for one in (found if key in SETUP else alike)}) > 1
        ]
        made.append(", ".join(parts))
    return made


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
