"""Commands of several processes that are under way, and whether any of them is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

FAULTS = Path(__file__).parent / "faulty_site"
MARK = "TEST_MARK"


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Command:
    """A command that is under way, in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        *typed: str,
        fault: str | None = None,
        in_background: bool = False,
        torchrun: int = 0,
    ) -> None:
        """fault: see faulty_site, which every process imports. torchrun: how many ranks it
        starts; 0: the command is started without it."""
        self.folder, self.reached = folder / "run", folder / "reached"
        self.mark = uuid.uuid4().hex
        environment = os.environ | {MARK: self.mark, "OMP_NUM_THREADS": "1"}
        if fault is not None:
            more = {"FAULT": fault, "FAULT_FILE": str(self.reached), "PYTHONPATH": str(FAULTS)}
            environment |= more
        started = [sys.executable]
        if torchrun:
            launcher = ["-m", "torch.distributed.run", "--standalone"]
            started += [*launcher, f"--nproc-per-node={torchrun}"]
        self.process = subprocess.Popen(
            [*started, "-m", "hydraspec", *typed, f"hydra.run.dir={self.folder}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            # as a shell's & and nohup do
            preexec_fn=_ignore_interrupts if in_background else None,
        )

    def wait(self) -> str:
        """Its errors, once it has ended."""
        self.output, errors = self.process.communicate(timeout=170)
        return errors

    def processes(self) -> list[int]:
        """Those of this command that there are."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"{MARK}={self.mark}".encode() in entry.read_bytes():
                    found.append(int(entry.parent.name))
            except OSError:
                continue
        return found

    def reaches_fault(self) -> None:
        """Wait until it does, or until the command has ended."""
        while not self.reached.exists() and self.process.poll() is None:
            time.sleep(0.05)

    def ends_within(self, limit_s: float) -> None:
        """Wait until none of its processes is left, and fail if that takes longer."""
        until = time.monotonic() + limit_s
        while left := self.processes():
            assert time.monotonic() < until, f"{len(left)} processes are left"
            time.sleep(0.2)

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found
