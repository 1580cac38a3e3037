"""Compiles kernels on a CPU, in separate processes: in a test's own, Triton interprets. They are
forks of one that has imported torch and Triton, which takes as long as most of the compiling."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

SHARED_BYTES = 227 << 10  # that a program may have on sm_90


def compiled(program: str, jobs: Sequence[Any], cache: Path) -> list[list[int]]:
    """Run `program` with the jobs as JSON; it prints a list for each job, as JSON. It may import
    what is beside this file, such as `sm90`."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        server.stdin.write(json.dumps([program, json.dumps(jobs), str(cache)]) + "\n")
        server.stdin.flush()
        status, output, errors = json.loads(server.stdout.readline())
    except BaseException:  # a time limit, after which an answer would be that of another program
        server.kill()
        _server.cache_clear()
        raise
    assert status == 0, errors[-2000:]
    found: list[list[int]] = json.loads(output)
    return found


@cache
def _server() -> subprocess.Popen[str]:
    """The process that forks; it ends when this one does."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    server = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    atexit.register(server.communicate)
    return server


def _serve() -> None:
    """Run the programs of standard input, a fork each."""
    import sm90  # noqa: F401  imports Triton
    import torch  # noqa: F401

    for line in sys.stdin:
        program, jobs, folder = json.loads(line)
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            child = os.fork()
            if not child:
                _run(program, jobs, folder, output.fileno(), errors.fileno())
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            output.seek(0)
            errors.seek(0)
            sys.stdout.write(json.dumps([status, output.read(), errors.read()]) + "\n")
            sys.stdout.flush()


def _run(program: str, jobs: str, folder: str, output: int, errors: int) -> NoReturn:
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(errors, 2)
        os.environ["TRITON_CACHE_DIR"] = folder
        sys.argv = ["-c", jobs]
        exec(program, {"__name__": "__main__"})
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
