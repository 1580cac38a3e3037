"""The device gate: `make verify-gpu`, or

    python tests/gate/verify.py [--checkout DIR] [--device cpu] [--requests N] [--work DIR]

Environment: PART, one of cells, tests, memcheck, speed (all in turn without it); CELLS, names or
patterns with commas between them (a rerun: recorded as partial); OUT, a folder for a second copy of
device.json. Prints one table, writes docs/device.json, and exits with 0 only if everything passed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

import cells
import device_record
import device_tests
import memcheck
import processes
import speed
from device_record import PARTS, ROOT
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from setting import FAILED, PARTIAL, PASSED, PartResult, Setting, devices, site_of

RUN = {
    "cells": cells.run,
    "tests": device_tests.run,
    "memcheck": memcheck.run,
    "speed": speed.run,
}
# Packages of hydraspec[test] without which a part fails late; every test file is collected.
GRAMMARS = "xgrammar"
NEEDED = {"cells": (GRAMMARS,), "tests": (GRAMMARS, "compressed_tensors")}
COLOURS = {PASSED: "green", PARTIAL: "yellow", FAILED: "red"}
WIDTH = 170
GIB_OF_TEST_WORKER = 10  # of a GPU: 24 of them ran out of 140 GiB, 14 of 80
MARK = ".gate"  # in a folder of ours, which may be emptied
SHORT = {
    "verdict": "{}",
    "graphs": "{}",
    "seconds": "{} s",
    "exact_match": "exact {}",
    "baseline_exact_match": "({})",
    "acceptance_length": "length {}",
    "tokens_per_second": "{} tok/s",
    "speedup": "{}x",
}


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    console = Console(width=WIDTH, highlight=False, markup=False, soft_wrap=True, record=True)
    started = time.monotonic()

    def say(line: str) -> None:
        console.print(f"[{time.monotonic() - started:4.0f} s] {line}")

    if problem := _refusal(args):
        console.print(f"verify-gpu: {problem}")
        return 2
    tree = (args.checkout or ROOT).resolve()
    work = args.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    (work / MARK).touch()
    setting = Setting(
        tree=tree,
        site=site_of(tree, work / "site") if args.checkout else None,
        work=work,
        device=args.device,
        gpus=tuple(devices()) if args.device == "cuda" else (),
        only=_only(),
        requests=args.requests,
        device_processes=args.processes,
        cpu_processes=args.cpu_processes,
        test_workers=args.test_workers,
        say=say,
    )
    signal.signal(signal.SIGINT, _interrupted)
    signal.signal(signal.SIGTERM, _interrupted)
    console.print(f"sources {device_record.sources_hash(tree)[:12]}; runs and logs: {work}")
    done: dict[str, PartResult] = {}
    try:
        for part in args.parts:
            say(f"part {part}")
            done[part] = RUN[part](setting.for_part(part))
            if setting.only and not done[part].results and not done[part].reason:
                done[part].reason = f"CELLS={','.join(setting.only)} names nothing of this part"
            _record(args, setting, done)  # what is finished stays, whatever cuts the rest
    except KeyboardInterrupt:
        _print(console, done)
        console.print("verify-gpu: interrupted; the parts that were finished are recorded")
        return 130
    _print(console, done)
    for folder in {setting.work, Path(os.environ.get("OUT") or setting.work)}:
        console.save_text(str(folder / "gate.txt"), clear=False)
    return 0 if all(part.status in (PASSED, PARTIAL) for part in done.values()) else 1


def _interrupted(number: int, frame: object) -> None:
    processes.end_all()
    raise KeyboardInterrupt


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkout", type=Path, help="another tree; its record goes to OUT alone")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a dry run")
    parser.add_argument("--requests", type=int, help="of each cell, in a dry run")
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "gate", help="is emptied")
    num_gpus = max(1, len(devices()))
    first = "that begin with cells on {}; a side that ends first helps the other".format
    each = {"type": int, "default": 8 * num_gpus}
    parser.add_argument("--processes", **each, help=first("GPUs"))
    parser.add_argument("--cpu-processes", **each, help=first("the CPU"))
    parser.add_argument("--test-workers", type=int, default=_test_workers(), help="of pytest-xdist")
    args = parser.parse_args(argv)
    part = os.environ.get("PART") or ",".join(PARTS)
    args.parts = part.split(",")
    return args


def _test_workers() -> int:
    """Three for every four cores, and no more than the GPUs have memory for."""
    of_each = int(_asked("memory.total", "nounits") or 0) // (GIB_OF_TEST_WORKER * 1024)
    at_most = of_each * len(devices())
    return max(1, min(at_most, (os.cpu_count() or 2) * 3 // 4))


def _refusal(args: argparse.Namespace) -> str | None:
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        return f"PART={unknown[0]} is no part\n  allowed: {', '.join(PARTS)}, or none for all"
    if args.checkout is not None and not (args.checkout / "hydraspec").is_dir():
        return f"--checkout {args.checkout} holds no hydraspec/\n  allowed: a checkout's root"
    if args.work.exists() and any(args.work.iterdir()) and not (args.work / MARK).exists():
        return f"--work {args.work} holds other files\n  allowed: a folder to be emptied: a new one"
    others = [part for part in args.parts if part != "cells"]
    if args.device == "cpu" and others:
        return f"--device cpu runs no {others[0]}\n  to do: add PART=cells"
    if args.device == "cuda" and not _device():
        return "nvidia-smi shows no device\n  to do: run it on one, or add --device cpu PART=cells"
    return _lacking(args)


def _lacking(args: argparse.Namespace) -> str | None:
    """A refusal where a chosen part lacks packages. Cells without a grammar need none."""
    for part in args.parts:
        absent = [name for name in NEEDED.get(part, ()) if find_spec(name) is None]
        if part == "cells" and GRAMMARS in absent:
            tree = (args.checkout or ROOT).resolve()
            chosen = Setting(tree=tree, work=args.work, only=_only())
            if not cells.constrained(chosen):
                absent.remove(GRAMMARS)
        if absent:
            return (
                f"PART={part} needs {', '.join(absent)}, not installed for {sys.executable}\n"
                "  to do: in the checkout run `make setup`, or `pip install -e '.[test]'`"
            )
    return None


def _only() -> tuple[str, ...]:
    """The words of CELLS."""
    return tuple(word for word in os.environ.get("CELLS", "").split(",") if word)


# ---------------------------------------------------------------- the record


def _record(args: argparse.Namespace, setting: Setting, done: Mapping[str, PartResult]) -> None:
    """Write the record; of another tree, or of a dry run, to OUT alone."""
    is_ours = args.checkout is None and args.device == "cuda"
    files = [device_record.FILE] if is_ours else []
    if folder := os.environ.get("OUT"):
        files.append(Path(folder) / device_record.FILE.name)
    surroundings = _surroundings(setting.tree)
    parts = {part: {**surroundings, **result.to_json()} for part, result in done.items()}
    record = device_record.merged(
        device_record.read(device_record.FILE) if is_ours else None,
        sources=device_record.sources_hash(setting.tree),
        parts=parts,
        partial=any(result.is_partial for result in done.values()),
    )
    for file in [*files, setting.work / device_record.FILE.name]:
        device_record.write(record, file)


def _surroundings(tree: Path) -> dict[str, Any]:
    """Where and when a part ran; every part has its own."""
    name, _, driver = _device().partition(", ")
    dirty = _git(tree, "status", "--porcelain", "--", *device_record.COVERED)
    return {
        "when": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "commit": _git(tree, "rev-parse", "HEAD"),
        "uncommitted_changes": None if dirty is None else bool(dirty),
        "device": name or "cpu",
        "driver": driver or None,
        "versions": {
            "python": sys.version.split()[0],
            **{package: _version(package) for package in ("torch", "triton")},
        },
    }


def _device() -> str:
    """Name and driver of the first device; empty without one."""
    return _asked("name,driver_version")


def _asked(figures: str, *options: str) -> str:
    """What nvidia-smi says of the first device; empty without one."""
    form = ",".join(("csv", "noheader", *options))
    return _said(["nvidia-smi", f"--query-gpu={figures}", f"--format={form}"]) or ""


def _git(tree: Path, *words: str) -> str | None:
    """What git says of a checkout; None outside of one."""
    return _said(["git", "-C", str(tree), *words], first_line=False)


def _said(command: Sequence[str], *, first_line: bool = True) -> str | None:
    try:
        done = subprocess.run(list(command), capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    text = done.stdout.strip()
    return text.split("\n")[0] if first_line else text


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# ---------------------------------------------------------------- the table


def _print(console: Console, done: Mapping[str, PartResult]) -> None:
    table = Table("part", "cell", "status", "figures", box=box.SIMPLE_HEAD, pad_edge=False)
    for part, result in done.items():
        for row in result.results:
            colour = COLOURS.get(row.status, "yellow")
            words = "  ".join(_figure(k, v) for k, v in row.figures.items() if v is not None)
            table.add_row(part, row.name, Text(row.status, colour), words)
    console.print(table)
    for part, result in done.items():
        for row in result.results:
            for line in (*row.problems, *row.notes):
                console.print(f"{part} {row.name}: {line}")
    for part, result in done.items():
        count = sum(row.status == PASSED for row in result.results)
        reason = f": {result.reason}" if result.reason else ""
        told = f"{count} of {len(result.results)} cells passed in {result.seconds:.0f} s{reason}"
        console.print(f"{part}: {result.status}, {told}")


def _figure(key: str, value: object) -> str:
    text = f"{value:,.0f}" if isinstance(value, float) and value >= 1000 else str(value)
    return SHORT.get(key, f"{key} {{}}").format(text)


if __name__ == "__main__":
    sys.exit(main())
