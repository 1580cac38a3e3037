"""Processes forked from this one, for tests of many short processes that import torch: a start
takes milliseconds instead of a second."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NoReturn

HIGHEST_FD = 4096


def popen(main: Callable[[], None]) -> type[subprocess.Popen[bytes]]:
    """A Popen for commands of this Python and a file, whose processes call `main` instead, with the
    arguments, environment, session, signals and streams of a new process."""

    class Forked(subprocess.Popen[bytes]):
        def __init__(
            self,
            command: Sequence[str],
            *,
            stdin: int,
            stdout: object,
            stderr: object,
            env: Mapping[str, str],
            start_new_session: bool,
        ) -> None:
            assert (stdin, stdout, start_new_session) == (subprocess.DEVNULL, stderr, True)
            output = None if stdout is None else stdout.fileno()  # type: ignore[attr-defined]
            self._become = partial(_become, main, command[2:], env, output)
            super().__init__(command)

        def _execute_child(self, *_: object) -> None:
            with warnings.catch_warnings():  # of forks of a process with threads
                warnings.simplefilter("ignore", DeprecationWarning)
                self.pid = os.fork()
            if not self.pid:
                self._become()
            self._child_created = True

    return Forked


def _become(
    main: Callable[[], None],
    typed: Sequence[str],
    environment: Mapping[str, str],
    output: int | None,
) -> NoReturn:
    """In the child: be as a process that was just started, run `main`, and end."""
    status = 1
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if output is not None:
            os.dup2(output, 1)
            os.dup2(output, 2)
        os.closerange(3, HIGHEST_FD)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", closefd=False) for fd in (1, 2))
        sys.argv = ["forked", *typed]
        os.environ.clear()
        os.environ.update(environment)
        main()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)
