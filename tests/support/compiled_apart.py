"""Compiles kernels on a CPU, in a separate process: in a test's own, Triton interprets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHARED_BYTES = 227 << 10  # that a program may have on sm_90


def compiled(program: str, jobs: Sequence[Any], cache: Path) -> list[list[int]]:
    """Run `program` with the jobs as JSON; it prints a list for each job, as JSON. It may import
    what is beside this file, such as `sm90`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    beside = str(Path(__file__).parent), environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, beside))
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(jobs)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[list[int]] = json.loads(done.stdout)
    return found
