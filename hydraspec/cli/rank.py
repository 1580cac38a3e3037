"""One rank of a job: `python -m hydraspec.cli.rank <folder>`, started by cli/ranks.py.

The first rank runs the job as one process would, prints and writes; the others follow it.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import sys
import traceback
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from hydraspec.cli.rank_job import RankJob, layout_of
from hydraspec.cli.ranks import JOB, RESULT
from hydraspec.errors import CannotWriteError, UserError
from hydraspec.parallel.faults import FileRecords
from hydraspec.parallel.launch import PARENT, SIGNS
from hydraspec.parallel.progress import ROW, Progress
from hydraspec.parallel.watch import Watch
from hydraspec.signals import (
    ignore_interrupts,
    interrupts_stay_interrupts,
    leave,
    output_may_be_cut,
    terminations_as_interrupts,
)


def main() -> int:
    """Run the rank that the environment names, of the job in the folder that argv names."""
    shared, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    num_ranks, parent = int(os.environ["WORLD_SIZE"]), int(os.environ[PARENT])
    if rank:
        ignore_interrupts()  # the first rank ends the others once it has saved
    else:  # the parent's way to end it, also where the parent itself ignores Ctrl-C (nohup, &)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with ExitStack() as opened:
        file = opened.enter_context((shared / SIGNS).open("r+b"))
        row = memoryview(mmap.mmap(file.fileno(), 0))[ROW.size * rank : ROW.size * (rank + 1)]
        watch = Watch(
            *(rank, num_ranks),
            records=FileRecords(shared),
            progress=Progress(row),
            each_look=lambda: _stay_with(parent),
            before_exit=lambda: _clean_up(shared, rank, parent),
        )
        opened.enter_context(watch.watching())
        status = _lead(shared, watch) if rank == 0 else _follow(shared, watch)
    _clean_up(shared, rank, parent)
    if status or watch.lost:
        leave(status)  # taking groups and devices down could wait for a rank that is lost
    return status


def _stay_with(parent: int) -> None:
    if os.getppid() != parent:
        raise ProcessLookupError("the process that started the ranks is gone")


def _clean_up(shared: Path, rank: int, parent: int) -> None:
    """The first rank removes what its parent would have, if that was killed."""
    if rank == 0 and os.getppid() != parent:
        shutil.rmtree(shared, ignore_errors=True)


def _follow(shared: Path, watch: Watch) -> int:
    try:
        job = _read(shared)
        with job.logged(), _joined(job, shared, watch):
            from hydraspec import factory

            factory.follow_first_rank(job.config)
    except BaseException as error:
        watch.record(error)
        if not (watch.lost or isinstance(error, UserError)):
            traceback.print_exc()
        return 1
    return 0


def _lead(shared: Path, watch: Watch) -> int:
    """0 where the job's end is in the result's file: a summary, an interrupt or an error that says
    all."""
    with output_may_be_cut(), terminations_as_interrupts():
        try:
            with interrupts_stay_interrupts():
                job = _read(shared)
                with job.logged(), _joined(job, shared, watch):
                    result: dict[str, Any] = {"summary": job.run()}
        except KeyboardInterrupt:
            ignore_interrupts()
            result = {"interrupted": True}
        except UserError as error:
            watch.record(error)
            fields = {"key": error.key, "request_id": error.request_id}
            named = {"name": type(error).__name__, "exit_code": error.exit_code}
            result = {"mistake": {"text": str(error), **named, **fields}}
        except CannotWriteError as error:
            watch.record(error)
            result = {"cannot_write": [error.errno, error.strerror, error.filename]}
        except Exception as error:
            watch.record(error)
            traceback.print_exc()
            return 1
        _write(shared / RESULT, result)
    return 0


def _joined(job: RankJob, shared: Path, watch: Watch) -> AbstractContextManager[object]:
    from hydraspec import factory
    from hydraspec.parallel.processes import joined, local_store

    on_cuda = factory.device_type(job.config) == "cuda"
    store = local_store(shared, watch.rank, watch.num_ranks)
    watch.timeout_s = job.config.parallelism.timeout_s
    return joined(layout_of(job.config), watch.rank, store, watch, on_cuda=on_cuda)


def _read(shared: Path) -> RankJob:
    return RankJob.of_text((shared / JOB).read_bytes())


def _write(file: Path, content: object) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content), encoding="utf-8")
    part.rename(file)


if __name__ == "__main__":
    sys.exit(main())
