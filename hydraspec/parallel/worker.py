"""Process of one rank of a job, started by parallel/launch.py.

The first rank runs the job as one process would, prints and writes; the others follow it.
"""

from __future__ import annotations

import json
import os
import signal
import traceback
from typing import Any

from hydraspec.errors import CannotWriteError, UserError
from hydraspec.parallel import torchrun
from hydraspec.parallel.fleet import Fleet
from hydraspec.parallel.job import Program, RankJob
from hydraspec.signals import (
    ignore_interrupts,
    interrupts_stay_interrupts,
    leave,
    output_may_be_cut,
    terminations_as_interrupts,
)


def work(program: Program) -> int:
    """Take part in the job that the parent announces; returns the exit status."""
    if os.environ["RANK"] != "0":
        return torchrun.follow(program)
    # The parent interrupts this rank so, also if the parent itself ignores Ctrl-C (nohup, &).
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fleet = torchrun.met()
    with output_may_be_cut(), terminations_as_interrupts():
        result = _ended(fleet, program)
        if result is not None:
            fleet.answer(json.dumps(result))
    fleet.close()
    if result is None or fleet.watch.lost:
        leave(1 if result is None else 0)  # taking groups and devices down could wait for a rank
    return 0


def _ended(fleet: Fleet, program: Program) -> dict[str, Any] | None:
    """Plain data on how the job ended: a summary, an interrupt, or an error for the user; None
    after any other exception, whose traceback is printed."""
    watch = fleet.watch
    try:
        with interrupts_stay_interrupts():
            job = RankJob.of_text(fleet.next_job())
            with program.logged(job), torchrun.joined(fleet, job):
                return {"summary": program.run(job)}
    except KeyboardInterrupt:
        ignore_interrupts()
        return {"interrupted": True}
    except UserError as error:
        watch.record(error)
        fields = {"key": error.key, "request_id": error.request_id}
        named = {"name": type(error).__name__, "exit_code": error.exit_code}
        return {"mistake": {"text": str(error), **named, **fields}}
    except CannotWriteError as error:
        watch.record(error)
        return {"cannot_write": [error.errno, error.strerror, error.filename]}
    except Exception as error:
        watch.record(error)
        traceback.print_exc()
        return None
