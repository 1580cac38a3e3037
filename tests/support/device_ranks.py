"""Processes with a CUDA device each, started by a test: what they check is in `device_checks`, or
in another module: `module.function:argument`.

As a program: one such process. It prints a line of JSON for every check.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

SUPPORT = Path(__file__).parent
KERNELS = SUPPORT.parents[1] / "kernels"
AFTER_A_LOSS_S = 20.0
ALIKE_S = 5.0  # for a check to fail on every rank
START_S = 90.0  # imports, NCCL, first compilations


def num_devices() -> int:
    """CUDA devices of this host."""
    return torch.cuda.device_count()


def checked(count: int, checks: Sequence[str], limit_s: float) -> dict[str, list[str]]:
    """Run checks one after another on `count` ranks; what each rank says of each, "" if it passes.

    Ranks that have not ended after the limit are killed, and their checks without a word fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ, TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NCCL_NVLS_ENABLE="0")
        paths = [str(SUPPORT), str(KERNELS), str(SUPPORT.parents[1])]
        environment["PYTHONPATH"] = os.pathsep.join([*paths, environment.get("PYTHONPATH", "")])
        files = [Path(folder) / f"out{rank}" for rank in range(count)]
        ranks = []
        for rank, file in enumerate(files):
            command = [sys.executable, __file__, str(rank), str(count), f"{folder}/store", *checks]
            with file.open("w") as out:
                ranks.append(
                    subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
                )
        until = time.monotonic() + limit_s + START_S
        try:
            while time.monotonic() < until and None in (codes := [rank.poll() for rank in ranks]):
                if any(codes):  # the others may wait for it
                    until = min(until, time.monotonic() + AFTER_A_LOSS_S)
                time.sleep(0.1)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        texts = [file.read_text(errors="replace") for file in files]
    return {check: [_said(text, check) for text in texts] for check in checks}


def _said(text: str, check: str) -> str:
    for line in text.splitlines():
        if line.startswith('{"check"'):
            found = json.loads(line)
            if found["check"] == check:
                return str(found["error"])
    return f"nothing was said of {check}; the end of the output:\n{text[-3000:]}"


def main(rank: int, count: int, store: str, checks: Sequence[str]) -> None:
    """One rank."""
    import traceback
    from datetime import timedelta
    from importlib import import_module

    import device_checks
    import torch.distributed as dist

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        store=dist.FileStore(store, count),
        rank=rank,
        world_size=count,
        timeout=timedelta(minutes=3),
    )
    world = device_checks.World(rank, count, device, dist.group.WORLD)
    for number, name in enumerate(checks):
        start, error = time.perf_counter(), ""
        try:
            path, _, argument = name.partition(":")
            module, _, function = path.rpartition(".")
            check = getattr(import_module(module or "device_checks"), function)
            check(world, *([argument] if argument else []))
            torch.cuda.synchronize()
        except Exception:
            error = traceback.format_exc()
        took = round(time.perf_counter() - start, 2)
        sys.stdout.write(json.dumps({"check": name, "error": error, "seconds": took}) + "\n")
        sys.stdout.flush()
        failures = [Path(f"{store}.{number}.{other}") for other in range(count)]
        if error and not _fail_alike(failures, rank):
            os._exit(1)
    os._exit(0)  # taking NCCL down could wait for a rank that is gone


def _fail_alike(failures: Sequence[Path], rank: int) -> bool:
    """Whether every rank fails here. If not, one of them is further, and nothing can go on."""
    failures[rank].touch()
    until = time.monotonic() + ALIKE_S
    while not all(file.exists() for file in failures):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
