"""A folder is used by one run at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hydraspec.cli.folders import LOCK, RUN_DIR, claimed
from hydraspec.errors import ConfigurationError

HOLDER = """
import os, sys, time
from pathlib import Path
from hydraspec.cli.folders import claimed
with claimed(Path(sys.argv[1]), "hydra.run.dir"):
    if len(sys.argv) > 2 and os.fork():
        os._exit(0)  # without cleaning up
    print(os.getpid(), flush=True)
    time.sleep(600)
"""


def holder(folder: Path, *more: str) -> tuple[subprocess.Popen[str], int]:
    """A process that claims a folder, and the id of the process that sleeps."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), *more], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_folder_in_use_is_refused_until_its_run_ends(tmp_path: Path) -> None:
    """Catches two runs whose files mix; and a lock that outlives a run that was killed."""
    process, _ = holder(tmp_path / "run")
    try:
        with pytest.raises(ConfigurationError, match="is in use by process") as caught:
            claimed(tmp_path / "run", RUN_DIR).__enter__()
        said = str(caught.value)
        assert f"hydra.run.dir={tmp_path / 'run'} is in use by process {process.pid} on " in said
        assert f" since {time.strftime('%Y-')}" in said
    finally:
        process.kill()
        process.communicate()
    assert (tmp_path / "run" / LOCK).exists()
    with claimed(tmp_path / "run", RUN_DIR):
        assert json.loads((tmp_path / "run" / LOCK).read_text())["pid"] == os.getpid()
    assert list((tmp_path / "run").iterdir()) == []


def test_runs_of_one_process_exclude_each_other_too(tmp_path: Path) -> None:
    with (
        claimed(tmp_path, RUN_DIR),
        claimed(tmp_path / "0", RUN_DIR),
        pytest.raises(ConfigurationError, match="is in use by process"),
    ):
        claimed(tmp_path, RUN_DIR).__enter__()


def test_a_forked_process_holds_no_lock(tmp_path: Path) -> None:
    """Catches a lock that workers keep after their run was killed."""
    process, sleeping = holder(tmp_path, "fork")
    try:
        process.wait()
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == process.pid
        with claimed(tmp_path, RUN_DIR):
            pass
    finally:
        os.kill(sleeping, signal.SIGKILL)
        process.communicate()


def test_a_lock_file_that_is_damaged_or_left_over_is_ignored(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("{")
    with claimed(tmp_path, RUN_DIR):
        pass
    assert list(tmp_path.iterdir()) == []
