"""The environment of a run, for env.json: versions, processor, devices, commit.

The file has no user names, environment variables or secrets.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import torch

from hydraspec import version
from hydraspec.engine.base import EngineInfo
from hydraspec.metrics.files import Json

PACKAGES = (
    "hydraspec",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "hydra-core",
    "omegaconf",
    "numpy",
    "triton",
    "wandb",
    "vllm",
)


def describe(info: EngineInfo) -> Json:
    """The content of env.json; `info` is that of the run's engine."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
        "device": info.device,
        "dtype": info.dtype,
        "cpu": {"model": _cpu_model(), "cores": _cores()},
        "gpus": _gpus(),
        "num_threads": torch.get_num_threads(),
        "git": _git(),
    }


def peak_rss_bytes() -> int:
    """The largest resident set size of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cores() -> int | None:
    """Number of cores that this process may use, if the system reports it, else of all cores."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _git() -> Json:
    """Commit of the checkout that the package runs from, and whether files differ from it; None for
    an installed package."""
    root = Path(version.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    commit = _git_output(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git_output(root, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "uncommitted_changes": bool(changes)}


def _git_output(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
