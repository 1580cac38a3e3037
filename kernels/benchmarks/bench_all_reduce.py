"""Sums over ranks with the residual sum and norms after them, by every way, in a CUDA graph.

    python kernels/benchmarks/bench_all_reduce.py [--ranks 2] [--rows 1 4 8 32 128 512 2048]

Starts a process a device itself. Microseconds a call, of the slowest rank. For one-shot and
two-shot the block's output already lies in symmetric memory; a copy to it would come on top.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from harness import describe_device, time_us
from hydraspec_kernels import collectives
from hydraspec_kernels.collectives import Mailboxes
from hydraspec_kernels.collectives import kernel as kernels
from hydraspec_kernels.collectives.memory import found_fault, open_mailboxes, shared_memory
from hydraspec_kernels.norms import add_norm
from round_trip_kernel import round_trips
from torch import Tensor

EPS, SCALE = 1e-6, 0.5
WAIT_S = 5.0
LIMIT_S = 240.0
ROUND_TRIPS = 20_000
CALLS = 128  # in a graph
WAYS = ("messages", "sum, norm", "one-shot", "two-shot", "NCCL", "gather", "NCCL gather")


class Bench:
    """The part of a rank."""

    def __init__(self, rank: int, options: argparse.Namespace) -> None:
        self.rank, self.size, self.width = rank, options.ranks, options.width
        self.warps: list[int] = options.warps
        self.ways = (*WAYS, *(f"{warps} warps" for warps in self.warps))
        self.device = torch.device("cuda", rank)
        self.group = dist.group.WORLD
        self.boxes: Mailboxes = open_mailboxes(self.group, self.device, WAIT_S)
        num_bytes = 2 * max(options.rows) * self.width
        self.memory, _ = shared_memory(self.group, self.device, num_bytes)
        self.weights = [self.normal(self.width) for _ in range(2)]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device)

    def times(self, rows: int) -> dict[str, float]:
        """Microseconds of each way; ways that do not take so many rows are missing."""
        h, x = self.normal(rows, self.width), self.normal(rows, self.width)
        pairs = torch.zeros(rows, 2, device=self.device)
        every = torch.empty(self.size, rows, 2, device=self.device)
        shared = self.memory[: 2 * rows * self.width].view(torch.bfloat16).view(rows, self.width)
        shared.zero_()
        name, ops = self.group.group_name, torch.ops.symm_mem
        post, following = self.weights
        options = {"post_weight": post, "next_weight": following, "eps": EPS, "scale": SCALE}

        def normed(total: Tensor) -> None:
            add_norm(h, total, **options)

        def by_nccl() -> None:
            dist.all_reduce(x, group=self.group)
            normed(x)

        ways: dict[str, Callable[[], object]] = {
            "one-shot": lambda: normed(ops.one_shot_all_reduce(shared, "sum", name)),
            "two-shot": lambda: normed(ops.two_shot_all_reduce_(shared, "sum", name)),
            "NCCL": by_nccl,
            "NCCL gather": lambda: dist.all_gather_into_tensor(every, pairs, group=self.group),
            "gather": lambda: collectives.all_gather(self.boxes, pairs),
        }
        if collectives.fits_add_norm(h):
            ways["messages"] = lambda: collectives.add_norm_over_ranks(self.boxes, h, x, **options)
            for warps in self.warps:
                ways[f"{warps} warps"] = partial(self._with_warps, warps, ways["messages"])
        if collectives.fits_all_reduce(x):
            ways["sum, norm"] = lambda: normed(collectives.all_reduce(self.boxes, x))
        return {
            way: self.slowest(time_us(ways[way], [()], least_calls=CALLS))
            for way in self.ways
            if way in ways
        }

    def _with_warps(self, warps: int, call: Callable[[], object]) -> None:
        """Programs of at most `warps` warps: what kernel.MOST_WARPS was chosen from."""
        before, kernels.MOST_WARPS = kernels.MOST_WARPS, warps
        try:
            call()
        finally:
            kernels.MOST_WARPS = before

    def norm_alone(self, rows: int) -> float:
        h, x = self.normal(rows, self.width), self.normal(rows, self.width)
        post, following = self.weights
        options = {"post_weight": post, "next_weight": following, "eps": EPS, "scale": SCALE}
        return self.slowest(time_us(lambda: add_norm(h, x, **options), [()], least_calls=CALLS))

    def round_trip_us(self) -> float:
        """Between ranks 0 and 1: a number there and back."""
        words, addresses = shared_memory(self.group, self.device, 4096)
        words.zero_()
        out = torch.zeros(32, dtype=torch.int32, device=self.device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        micros, used = 0.0, 0
        for count in (100, ROUND_TRIPS):
            torch.cuda.synchronize()
            dist.barrier(self.group)
            if self.rank < 2:
                own, peer = addresses[self.rank], addresses[1 - self.rank]
                start.record()
                round_trips[(1,)](out, own, peer, int(self.rank == 0), used, count, num_warps=1)
                end.record()
                torch.cuda.synchronize()
                assert not out.any(), "an answer did not come"
                micros = 1000 * start.elapsed_time(end) / count
            used += count
        return self.slowest(micros)

    def slowest(self, micros: float) -> float:
        """The largest of all ranks; they are together again afterwards."""
        found = torch.tensor(micros, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return float(found.item())


def run_rank(rank: int, options: argparse.Namespace) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        store=dist.FileStore(options.store, options.ranks),
        rank=rank,
        world_size=options.ranks,
        timeout=timedelta(seconds=LIMIT_S),
        device_id=torch.device("cuda", rank),
    )
    with torch.inference_mode():
        bench = Bench(rank, options)
        trip = bench.round_trip_us()
        if rank == 0:
            title = f"{options.ranks} ranks, width {options.width}, {describe_device()}"
            say(f"{title}\nround trip between two ranks: {trip:.2f} us")
            names = " ".join(f"{way:>12}" for way in bench.ways)
            say(f"{'rows':>5} {'KiB':>7} {'norm':>8} {names}  least")
        for rows in options.rows:
            found = bench.times(rows) | {"norm": bench.norm_alone(rows)}
            if rank == 0:
                report(rows, rows * options.width / 512, found, bench.ways, options.json)
    if fault := found_fault(bench.boxes):
        say(f"rank {rank}: rank {fault.peer} sent nothing; the figures are wrong")
    sys.stdout.flush()
    os._exit(0)


def report(
    rows: int, kib: float, found: dict[str, float], ways: tuple[str, ...], file: str | None
) -> None:
    """A line of the table, and of the file."""
    cells = " ".join(f"{found[way]:12.2f}" if way in found else " " * 12 for way in ways)
    best = min((way for way in WAYS if way in found and "gather" not in way), key=found.__getitem__)
    say(f"{rows:5} {kib:7.0f} {found['norm']:8.2f} {cells}  {best}")
    if file:
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(json.dumps({"rows": rows, "kib": kib, "us": found}) + "\n")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 32, 64, 128, 512, 2048])
    parser.add_argument("--width", type=int, default=5376)
    parser.add_argument("--warps", type=int, nargs="*", default=[], help="8 16: of messages, too")
    parser.add_argument("--json", help="file that a line for each number of rows is added to")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.rank, options)
    if torch.cuda.device_count() < options.ranks:
        say(f"all_reduce: needs {options.ranks} CUDA devices")
        return
    environment = dict(os.environ, TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NCCL_NVLS_ENABLE="0")
    with tempfile.TemporaryDirectory() as folder:
        own = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--store", f"{folder}/store"]
        ranks = [
            subprocess.Popen([*own, "--rank", str(rank)], env=environment)
            for rank in range(options.ranks)
        ]
        try:
            until = time.monotonic() + LIMIT_S
            while None in (codes := [rank.poll() for rank in ranks]):
                if any(codes) or time.monotonic() > until:
                    break
                time.sleep(0.1)
        finally:
            for rank in ranks:
                rank.kill()
    sys.exit(0 if codes == [0] * options.ranks else 1)


if __name__ == "__main__":
    main()
