"""What every part of the gate is told, and what it answers with."""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

PART_LIMIT_S = 560.0  # a part ends by then, whatever is left
LEAST_LIMIT_S = 10.0  # with less left of it nothing is started
# Sizes of thread pools, unless they are set: on 64 cores 60 processes with a thread for each core
# left no thread to be started.
POOLS = {"RAYON_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "2"}

PASSED, FAILED, NOT_RUN, PARTIAL = "passed", "failed", "not run", "partial"


@dataclass(kw_only=True)
class Result:
    """One cell: a run, a test file, a piece under the sanitizer, a row of the speed table."""

    name: str
    status: str = PASSED
    figures: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what is no failure and should be seen
    log_tail: list[str] = field(default_factory=list)  # of what failed

    def fail(self, *problems: str) -> None:
        self.status = FAILED
        self.problems += problems

    def fail_if(self, problems: Iterable[str]) -> None:
        """Fail for each; no problem, no failure."""
        for problem in problems:
            self.fail(problem)


@dataclass(kw_only=True)
class PartResult:
    """A part's cells and what follows from them."""

    results: list[Result]
    seconds: float = 0.0
    reason: str | None = None  # why it was not run, or failed as a whole
    is_partial: bool = False  # only what CELLS names was run

    @property
    def status(self) -> str:
        if any(result.status == FAILED for result in self.results):
            return FAILED
        if self.reason or not self.results or any(r.status == NOT_RUN for r in self.results):
            return NOT_RUN
        return PARTIAL if self.is_partial else PASSED

    def to_json(self) -> dict[str, Any]:
        rows = [{k: v for k, v in asdict(row).items() if v} for row in self.results]
        return {
            "status": self.status,
            "reason": self.reason,
            "seconds": round(self.seconds, 1),
            "cells": rows,
        }


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where the tree is, where the runs go, and how much of everything there is.

    Attributes:
        tree: the checkout under test; the processes run its code.
        site: a folder that goes before PYTHONPATH, so that they do; None for the installed tree.
        work: where runs and logs go.
        device: "cuda", or "cpu" for a dry run of the gate itself.
        gpus: over which processes are spread; empty: they see what this process sees.
        gpu: the one that processes see, see `on`.
        only: CELLS, names or patterns; empty: everything.
        say: prints a line of progress.
    """

    tree: Path
    work: Path
    site: Path | None = None
    device: str = "cuda"
    gpus: tuple[str, ...] = ()
    gpu: str | None = None
    only: tuple[str, ...] = ()
    device_processes: int = 6
    cpu_processes: int = 8
    test_workers: int = 8
    requests: int | None = None  # a dry run's workload.limit
    deadline: float = float("inf")  # of time.monotonic()
    say: Callable[[str], None] = print

    def for_part(self, part: str) -> Setting:
        work = self.work / part
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        return replace(self, work=work, deadline=time.monotonic() + PART_LIMIT_S)

    def on(self, number: int) -> Setting:
        """For the process of that number: GPUs take turns."""
        return replace(self, gpu=self.gpus[number % len(self.gpus)]) if self.gpus else self

    def chosen(self, names: Iterable[str]) -> list[str]:
        """The names that CELLS lets through."""
        return [name for name in names if not self.only or self._is_named(name)]

    def _is_named(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, f"*{pattern}*") for pattern in self.only)

    def limit_s(self, own: float) -> float:
        """A process's own limit, or what is left of the part's time; 0 where that is too little."""
        left = min(own, self.deadline - time.monotonic())
        return left if left >= min(own, LEAST_LIMIT_S) else 0.0

    def environment(self, device: str) -> dict[str, str]:
        """A child's. On the CPU: one thread, no device in sight. Else one GPU after `on`."""
        environment = POOLS | {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        if self.site is not None:
            paths = [str(self.site), environment.get("PYTHONPATH", "")]
            environment["PYTHONSAFEPATH"] = "1"  # pytest runs in a checkout, which goes first else
            environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        if device == "cpu":
            environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        elif self.gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpu
        return environment

    @property
    def python(self) -> str:
        return sys.executable


def devices() -> list[str]:
    """What CUDA_VISIBLE_DEVICES lists, or the number of every GPU that nvidia-smi lists."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in visible.split(",") if name]
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return listed.stdout.split()


def site_of(checkout: Path, folder: Path) -> Path:
    """A folder for PYTHONPATH in which `checkout` is laid out as its wheel is."""
    folder.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(checkout / "hydraspec", folder / "hydraspec", ignore=ignored)
    shutil.copytree(checkout / "conf", folder / "hydraspec" / "conf", ignore=ignored)
    kernels = checkout / "kernels" / "hydraspec_kernels"
    shutil.copytree(kernels, folder / "hydraspec_kernels", ignore=ignored)
    return folder
