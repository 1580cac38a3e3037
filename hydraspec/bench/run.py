"""Runs a benchmark in place of a run: a table by engine and method.

Each engine and method runs in a separate process, one after another, so that none finds the
device's memory taken; this process only starts them and puts their figures side by side.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from hydraspec.bench import study as bench_study
from hydraspec.bench.benchmark import Benchmark
from hydraspec.bench.choices import BENCHMARKS
from hydraspec.bench.measure import INTERRUPTED, measure
from hydraspec.config import to_dict
from hydraspec.config.benches import check_room, methods_of
from hydraspec.config.choices import SEARCH_PATH
from hydraspec.config.engines import VLLM
from hydraspec.config.schema import RunConfig, Verification
from hydraspec.config.vllm import is_vllm_key
from hydraspec.errors import CheckpointError
from hydraspec.lab.folder import RunFolder
from hydraspec.metrics.files import Json, plain
from hydraspec.metrics.run_files import BENCH, BENCH_REPORT
from hydraspec.models.checkpoint.config_reader import text_part
from hydraspec.models.checkpoint.reader import open_checkpoint
from hydraspec.shipped import SHAPE_PREFIX, ZOO_PREFIX
from hydraspec.signals import interrupts_held_back
from hydraspec.study.console import table_console
from hydraspec.workloads.generated import random_text_warning

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
LOG = "log.txt"
STOPPED = 130  # exit status after an interrupt
# Keys that the command of a process sets itself; what was typed for them is dropped.
OWN_KEYS = {"engine", "method", "tracker", "baseline"}
OWN_KEYS |= {"bench.engines", "bench.methods", "bench.isolate"}
EXCEPTION = re.compile(r"[\w.]*(Error|Exception): ")  # the last line of a traceback
RANK = re.compile(r"\[rank\d+\]: ?")  # torch writes it before every line of a traceback
WORKER = re.compile(r"\(Worker\S* pid=\d+\) ERROR [^\[]*\[\S+\] ")  # vLLM's worker processes
STATUSES = {0: "ok", 2: "refused", STOPPED: INTERRUPTED}  # by exit status; any other is "failed"
SECONDS_TO_STOP = 20
SYNTHETIC = "method.verification=synthetic with the acceptance length of a run over real text"
WIDE = 140  # columns of a table that goes to a file


def run(
    config: RunConfig,
    *,
    run_dir: Path,
    overrides: Sequence[str],
    quiet: bool = False,
) -> Json:
    """Run the benchmark of config.bench and return the content of `run_dir`/bench.json.

    The status is "failed" if a process failed or nothing could be measured. An engine that refuses
    (vLLM that is not installed, say) is left out of the table, below which its reason stands.

    Raises:
        KeyboardInterrupt: an interrupt came; finished rows are saved, with status "interrupted".
        ConfigurationError: requests are longer than the target takes.
        CheckpointError, ConfigurationError: the engine refuses, where bench.isolate is false.
        OSError: the run folder, which is named, cannot be written.
    """
    _check_target_has_room(config)
    folder = RunFolder(run_dir, to_dict(config), overrides)
    console = table_console(WIDE, quiet=quiet)
    parts: list[Json] = []
    warnings = list(config.warnings)
    if (
        set(methods_of(config)) != {"none"}
        and config.method.verification is not Verification.synthetic
    ):
        warnings.append(random_text_warning(f"bench={config.bench.name}", SYNTHETIC))
        log.warning(warnings[-1])

    def save(status: str) -> Json:
        with interrupts_held_back():
            result = _result(config, parts, status, warnings)
            bench_study.print_result(result, console)
            if folder.holds_older_run and not any(part["rows"] for part in parts):
                log.warning("%s: nothing was measured: the older run's files stay", folder.path)
                return result
            folder.replace_older_run()
            folder.write_bench(result, bench_study.page_of(result))
            page = folder.path / BENCH_REPORT
            console.print(f"Benchmark: {page}", soft_wrap=True, markup=False)
            return result

    try:
        for part in _parts(config, folder.path, overrides, console):
            parts.append(part)  # parts before an interrupt are kept
    except KeyboardInterrupt:
        save(INTERRUPTED)
        raise
    return save(_status(parts))


def _parts(
    config: RunConfig, folder: Path, overrides: Sequence[str], console: Console
) -> Iterator[Json]:
    """Measure part after part; an interrupt is raised after the part that it cut short."""
    if config.bench.isolate:
        yield from _in_processes(config, folder, overrides, console)
        return
    part = measure(config)
    yield part
    if part["status"] == INTERRUPTED:
        raise KeyboardInterrupt


def _check_target_has_room(config: RunConfig) -> None:
    """Refuse requests that are longer than the target takes before a process is started for them.
    A hub id, which may have to be downloaded, is left to the processes.

    Raises:
        ConfigurationError: requests are longer than the target takes.
    """
    checkpoint = config.target.checkpoint
    is_here = checkpoint.startswith((ZOO_PREFIX, SHAPE_PREFIX)) or Path(checkpoint).is_dir()
    if is_here and config.target.max_model_len is None:
        with suppress(CheckpointError):
            sizes = text_part(open_checkpoint(checkpoint).config)
            check_room(config, sizes.get("max_position_embeddings") or sys.maxsize)


def _result(config: RunConfig, parts: Sequence[Json], status: str, warnings: Sequence[str]) -> Json:
    result: Json = plain(
        {
            "schema_version": SCHEMA_VERSION,
            "status": status,
            "bench": config.bench.name,
            "target": config.target.name,
            "dtype": config.target.dtype,
            **BENCHMARKS[config.bench.name].settings(config),
            "warnings": warnings,
            "parts": parts,
        }
    )
    result["ratios"] = bench_study.ratios(result)
    return result


def _status(parts: Sequence[Json]) -> str:
    statuses = {part["status"] for part in parts}
    return "ok" if "ok" in statuses and statuses <= {"ok", "refused"} else "failed"


def _in_processes(
    config: RunConfig, folder: Path, overrides: Sequence[str], console: Console
) -> Iterator[Json]:
    benchmark, parts = BENCHMARKS[config.bench.name], list[Json]()
    for method in methods_of(config):
        for engine in config.bench.engines:  # those that are compared, directly after each other
            own = folder / f"{engine}-{method}"
            own.mkdir(parents=True, exist_ok=True)
            earlier = _written(own / BENCH)
            console.print(f"{engine}, {method}: {own / LOG}", soft_wrap=True, markup=False)
            command = command_of(engine, method, own, overrides, benchmark)
            command += benchmark.carried(config, parts)
            environment = _environment(config, engine)
            try:
                code = _wait(command, own / LOG, environment, config.bench.timeout_s)
            except KeyboardInterrupt:
                yield _part_of(config, engine, method, own, STOPPED, earlier)
                raise
            parts.append(_part_of(config, engine, method, own, code, earlier))
            yield parts[-1]


def command_of(
    engine: str, method: str, folder: Path, overrides: Sequence[str], benchmark: Benchmark
) -> list[str]:
    """The command of a process for one engine and one method, with the overrides typed."""
    path = str(folder.resolve()).replace("\\", "\\\\").replace("'", "\\'")
    return [
        *(sys.executable, "-m", "hydraspec", *_passed_on(overrides, engine)),
        *(f"engine={engine}", f"method={method}", "tracker=none", "baseline=false"),
        *(f"bench.engines=[{engine}]", f"bench.methods=[{method}]", "bench.isolate=false"),
        # vLLM runs as its own generate() does, unless times of tokens are measured: recording
        # every step would cost time.
        *(
            ["engine.vllm.record_steps=false"]
            if engine == VLLM and not benchmark.needs_times
            else []
        ),
        f"hydra.run.dir='{path}'",
    ]


def _passed_on(overrides: Sequence[str], engine: str) -> Iterator[str]:
    """The overrides that the process for an engine gets: keys of engine.vllm are for vLLM alone,
    where they need no "+"."""
    for typed in overrides:
        key = typed.lstrip("+~").partition("=")[0]
        if not is_vllm_key(key):
            if _is_kept(key):
                yield typed
        elif engine == VLLM:
            yield typed.lstrip("+")


def _is_kept(key: str) -> bool:
    if key == SEARCH_PATH:  # choices found there may be the method or the target
        return True
    return key not in OWN_KEYS | {"hydra"} and not key.startswith(("hydra.", "hydra/", "tracker."))


def _environment(config: RunConfig, engine: str) -> dict[str, str]:
    environment = dict(os.environ)
    if engine == VLLM:
        # vLLM's sampler would be compiled on first use; greedy decoding does not use it.
        environment.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        paths = [config.bench.vllm_pythonpath, environment.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment


def _wait(
    command: Sequence[str], log_file: Path, environment: Mapping[str, str], timeout_s: float
) -> int | None:
    """Run a command and return its exit status; None after `timeout_s`. The process leads a new
    session, so that the processes that it starts end with it."""
    with log_file.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:  # an interrupt from the terminal does not reach another session
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, and the rest of its session, which may hold device memory. The
    process takes the signal as an interrupt, and saves."""
    try:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_STOP)
    finally:  # also where a second Ctrl-C cuts the waiting short
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _written(file: Path) -> int | None:
    return file.stat().st_mtime_ns if file.is_file() else None


def _part_of(
    config: RunConfig,
    engine: str,
    method: str,
    folder: Path,
    code: int | None,
    earlier: int | None,
) -> Json:
    """The part that a process measured, or one without rows, with status and reason. `earlier` is
    the time in ns at which bench.json was last written before; None if there was none."""
    written = _written(folder / BENCH)
    if code == 0 or (code == STOPPED and written not in (None, earlier)):
        parts: list[Json] = json.loads((folder / BENCH).read_text(encoding="utf-8"))["parts"]
        if parts:
            return parts[0]
    status = "timed out" if code is None else STATUSES.get(code, "failed")
    nothing_done = f"before a {BENCHMARKS[config.bench.name].unit} was finished"
    reason = nothing_done if code == STOPPED else _last_words(folder / LOG)
    log.warning("%s, %s %s: %s", engine, method, status, reason)
    return {"engine": engine, "method": method, "status": status, "reason": reason, "rows": []}


def _last_words(log_file: Path) -> str:
    """The message that a process ended with, on one line, quoted from its log: hydraspec's, else
    that of the last exception, which libraries may follow with warnings, else the last line. An
    exception of a worker process goes first, as the cause of its engine's."""
    text = log_file.read_text(encoding="utf-8", errors="replace")
    lines = [RANK.sub("", line, count=1) for line in text.splitlines()]
    said = [i for i, line in enumerate(lines) if line.startswith("hydraspec: ")]
    inside = [WORKER.sub("", line) for line in lines if WORKER.match(line)]
    raised = [line for line in lines if EXCEPTION.match(line)]
    raised += [line for line in inside if EXCEPTION.match(line)]
    words = lines[said[-1] :] if said else raised[-1:] or lines[-1:]
    text = "; ".join(line.strip() for line in words if line.strip())
    return text.removeprefix("hydraspec: ")[:500] or "it said nothing"
