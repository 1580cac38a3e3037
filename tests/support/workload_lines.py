"""Workloads of lines that are written to a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hydraspec.config.schema import RunConfig
from hydraspec.workloads import reading as workloads

GOOD = {"prompt": "hello"}


def read_lines(config: RunConfig, path: Path, *lines: Any) -> workloads.Workload:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text), encoding="utf-8")
    config.workload.path = str(path)
    workload = workloads.read(config)
    assert workload is not None
    return workload
