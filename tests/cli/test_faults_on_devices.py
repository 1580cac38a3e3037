"""A rank that fails while graphs replay on two devices: the run ends, names it, and leaves nothing.

The ranks fail in a step, as support/faulty_site tells them to.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from faulty_rank import is_gone

SITE = Path(__file__).parents[1] / "support" / "faulty_site"
STEP = 60
TIMEOUT_S = 9.0  # of a step; the devices' own limit is two thirds of it
ENDS_WITHIN_S = 30.0
RUN = [
    *("parallelism=tp2", f"parallelism.timeout_s={TIMEOUT_S:g}", "engine.device=cuda"),
    *("method=none", "tracker=none", "baseline=false", "workload=random", "sampling=greedy"),
    *("workload.num_requests=200", "workload.prompt_tokens=16", "workload.output_tokens=32"),
]
LEFT_BYTES = 64 << 20  # of a device, that may be other processes'

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two devices"),
]


def free_bytes() -> list[int]:
    """Of both devices, as the driver says to a process of its own."""
    program = "import torch\nfor i in (0, 1): print(torch.cuda.mem_get_info(i)[0])"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    return [int(line) for line in said.stdout.split()]


@pytest.mark.parametrize("rank", [1, 0])
@pytest.mark.parametrize("fault", ["raise", "kill", "stop", "device"])
def test_a_rank_that_fails_is_named(tmp_path: Path, fault: str, rank: int) -> None:
    """`device`: its host goes on, its device does not."""
    before, folder, reached = free_bytes(), tmp_path / "run", tmp_path / "reached"
    told = {"FAULT": f"{rank}:{STEP}:{fault}", "FAULT_FILE": str(reached)}
    told["PYTHONPATH"] = os.pathsep.join([str(SITE), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "hydraspec", *RUN, f"hydra.run.dir={folder}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | told,
        start_new_session=True,
    )
    _, errors = process.communicate(timeout=200)
    assert reached.exists(), f"no step {STEP}: {errors}"
    assert time.time() - reached.stat().st_mtime < ENDS_WITHIN_S
    assert process.returncode == 1, errors
    assert f"rank {rank} of 2 " in errors, errors
    others = Path("/proc").glob("[0-9]*/stat")
    group = [int(stat.parent.name) for stat in others if group_of(stat) == process.pid]
    assert all(map(is_gone, group))
    after = free_bytes()
    assert all(a > b - LEFT_BYTES for a, b in zip(after, before, strict=True)), (before, after)


def group_of(stat: Path) -> int:
    """The session of a process; -1: it has ended."""
    try:
        return int(stat.read_text().rpartition(")")[2].split()[3])
    except OSError:
        return -1
