"""Cold start of a checkpoint of a real size: time from the start of the process to loaded weights
and to the first token, and peak memory of host and device, from the page cache and from the disk.

    python tests/bench/cold_start.py                                     # 33 GB of gemma4_31b_fp8
    python tests/bench/cold_start.py --like zoo:tiny_gemma4_fp8_block    # on a CPU

Writes a folder of random weights in the shapes of --like under --folder (kept for a next call),
then starts `python -m hydraspec target=custom` over it: a first start, which compiles kernels, one
from the page cache, and one after the files have left the cache; none that --limit seconds do not
allow. Arguments of the form key=value go to the commands. Figures are printed, and written to
--json.

The first token is that of the first measured request, after a warm-up by the same request. Memory
that a process maps from files is the page cache's, and is listed apart from its own. The device's
memory is nvidia-smi's: the CUDA context is in it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from random_folder import write_folder
from rich.console import Console

say = Console(soft_wrap=True, markup=False, highlight=False).print
SHAPE = "shape:gemma4_31b_fp8"
LOADED, READY = "target's weights:", "round 1 of"  # in lines that a run prints
SHOWN = (LOADED, "compiled ", "captured ", "largest step:", "KV cache:", READY, "hydraspec:")
POLL_S, SMI_POLL_S = 0.02, 0.2
PROMPT = list(range(3, 67))
GIB = 1 << 30
HOST_KEYS = {"VmHWM": "host_peak", "RssAnon": "host_own_peak", "RssFile": "host_mapped_peak"}


@dataclass
class Start:
    """One start of the command: seconds since the process began, and peaks in bytes."""

    label: str
    loaded_s: float | None = None  # CUDA only: the target's weights are on the device
    ready_s: float | None = None  # the first measured round begins
    first_token_s: float | None = None
    seconds: float = 0.0
    status: int | None = None
    device_peak: int = 0
    device_peak_loading: int = 0
    peaks: dict[str, int] = field(default_factory=dict)  # by the values of HOST_KEYS
    lines: list[str] = field(default_factory=list)

    def said(self, line: str, seconds: float) -> None:
        """Takes a line of the command's output."""
        if LOADED in line:
            self.loaded_s = seconds
        if READY in line and self.ready_s is None:
            self.ready_s = seconds
        self.lines.append(line)
        if any(text in line for text in SHOWN):
            say(f"  {seconds:6.1f} s  {line}")


def start(label: str, folder: Path, typed: Sequence[str], limit_s: float) -> Start:
    """Runs the command over the folder with one prompt, watching it."""
    found = Start(label)
    say(f"{label}:")
    with tempfile.TemporaryDirectory() as work:
        workload = Path(work) / "workload.jsonl"
        workload.write_text(json.dumps({"prompt_token_ids": PROMPT}))
        out = Path(work) / "out"
        command = [sys.executable, "-m", "hydraspec", "target=custom"]
        command += [f"target.checkpoint={folder}", "method=none", "baseline=false", "tracker=none"]
        command += ["workload=jsonl", f"workload.path={workload}", "sampling.max_tokens=1"]
        command += ["sampling.ignore_eos=true", f"hydra.run.dir={out}", *typed]
        began = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        threads = [
            threading.Thread(target=_listen, args=(process, found, began)),
            threading.Thread(target=_watch_device, args=(process, found)),
        ]
        for thread in threads:
            thread.start()
        try:
            _watch_host(process, found, out / "requests.jsonl", began, limit_s)
        finally:
            process.kill()
            for thread in threads:
                thread.join()
    found.seconds, found.status = time.perf_counter() - began, process.wait()
    if found.status:
        say("\n".join(found.lines[-30:]))
    return found


def _listen(process: subprocess.Popen[str], found: Start, began: float) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        found.said(line.rstrip(), time.perf_counter() - began)


def _watch_host(
    process: subprocess.Popen[str], found: Start, requests: Path, began: float, limit_s: float
) -> None:
    """Follows memory and the requests' file until the process ends or its time is up."""
    while process.poll() is None and time.perf_counter() - began < limit_s:
        if found.first_token_s is None and requests.is_file() and requests.stat().st_size:
            found.first_token_s = time.perf_counter() - began
            say(f"  {found.first_token_s:6.1f} s  first token")
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:  # it has just ended
            continue
        for line in status.splitlines():
            key, _, value = line.partition(":")
            if key in HOST_KEYS:
                name = HOST_KEYS[key]
                found.peaks[name] = max(found.peaks.get(name, 0), int(value.split()[0]) << 10)
        time.sleep(POLL_S)


def _watch_device(process: subprocess.Popen[str], found: Start) -> None:
    """Follows the device's memory, all processes together; nothing where nvidia-smi is not."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    while shutil.which(query[0]) and process.poll() is None:
        answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        if answer.isdigit():
            used = int(answer) << 20
            found.device_peak = max(found.device_peak, used)
            if found.loaded_s is None:
                found.device_peak_loading = max(found.device_peak_loading, used)
        time.sleep(SMI_POLL_S)


def drop_from_cache(folder: Path) -> None:
    """Writes the folder's files to the disk and takes them out of the page cache."""
    for file in sorted(folder.glob("*.safetensors")):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_bytes() -> int:
    """Bytes in the page cache of this machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Cached:"))


def _text(found: Start) -> str:
    times = (("weights", found.loaded_s), ("ready", found.ready_s), ("first", found.first_token_s))
    said = ", ".join(f"{name} {s:.1f} s" for name, s in times if s is not None)
    sizes = {
        **found.peaks,
        "device_loading": found.device_peak_loading,
        "device": found.device_peak,
    }
    memory = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in sizes.items() if size)
    return f"{found.label}: {said}; {memory}; exit {found.status} after {found.seconds:.1f} s"


def main() -> None:
    """Writes the folder and measures the three starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--like", default=SHAPE, help="checkpoint whose config gives the shapes")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "cold_start")
    parser.add_argument("--limit", type=float, default=285.0, help="seconds in all")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("typed", nargs="*", help="key=value, for the commands")
    given = parser.parse_args()
    began = time.monotonic()

    def left() -> float:
        return given.limit - (time.monotonic() - began)

    folder = given.folder / given.like.replace(":", "_").replace("/", "_")
    total = write_folder(given.like, folder)
    took = time.monotonic() - began
    say(f"{folder}: {total / 1e9:.2f} GB of weights, written in {took:.1f} s")
    starts: list[Start] = []
    for label in ("first start", "page cache", "first read"):
        if starts and left() < 1.2 * starts[-1].seconds:
            say(f"{label}: left out, {left():.0f} s are left")
            continue
        if label == "first read":
            before, since = cached_bytes(), time.monotonic()
            drop_from_cache(folder)
            dropped, seconds = before - cached_bytes(), time.monotonic() - since
            say(f"page cache: {dropped / 1e9:.2f} GB less, in {seconds:.1f} s")
        starts.append(start(label, folder, given.typed, max(left(), 1.0)))
    for found in starts:
        say(_text(found))
    if given.json is not None:
        record = {"like": given.like, "bytes": total, "starts": [asdict(one) for one in starts]}
        given.json.write_text(json.dumps(record, indent=1))
    sys.exit(any(one.status for one in starts))


if __name__ == "__main__":
    main()
