"""Timing shared by the kernel benchmarks: in a CUDA graph, with arguments that are not in the L2.

calls = rotation(lambda: (torch.randn(...), ...))          # > 256 MB of argument sets
micros = time_us(kernel, calls)                            # microseconds per call
print_table("linear", [Measured("down", "1x10240x2560", micros, bytes_moved)])
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

# One H200: read-only traffic, a copy (read + written), and a tiny kernel inside a CUDA graph.
READ_TB_S = 4.42
COPY_TB_S = 4.26
LAUNCH_US = 1.3
# Several times the L2 of 50 to 60 MB, so that no replay finds its arguments there.
ROTATION_BYTES = 256 << 20

Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """A line of a table: operation, shape, time, bytes moved."""

    name: str
    shape: str
    micros: float
    nbytes: float
    tb_s: float = READ_TB_S  # the bandwidth of the floor, the least possible time
    note: str = ""

    @property
    def floor_us(self) -> float:
        return max(self.nbytes / self.tb_s * 1e-6, LAUNCH_US)

    @property
    def speed_tb_s(self) -> float:
        return self.nbytes / self.micros * 1e-6

    @property
    def of_floor(self) -> float:
        return self.floor_us / self.micros

    def record(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self) | {"tb_s": self.speed_tb_s, "of_floor": self.of_floor}


def nbytes(arguments: Iterable[Any]) -> int:
    """Bytes of the tensors among `arguments`; an expanded view counts every element."""
    return sum(a.numel() * a.element_size() for a in arguments if isinstance(a, Tensor))


def rotation(
    make: Callable[[], Arguments], at_least: int = ROTATION_BYTES, most: int = 512
) -> list[Arguments]:
    """Argument sets from `make`: until they hold `at_least` bytes in total, at most `most` sets."""
    sets = [make()]
    wanted = -(-at_least // max(nbytes(sets[0]), 1))
    sets += [make() for _ in range(min(max(wanted, 2), most) - 1)]
    return sets


def time_us(
    call: Callable[..., object],
    arguments: Sequence[Arguments],
    *,
    least_calls: int = 32,
    replays: int = 10,
) -> float:
    """Microseconds per call: median of `replays` of a graph that calls with each set in turn."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call(*arguments[0])
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    rounds = -(-least_calls // len(arguments))
    graph = torch.cuda.CUDAGraph()
    # Threads of NCCL may ask the device meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(rounds):
            for one in arguments:
                call(*one)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    spans = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        spans.append((start, end))
    torch.cuda.synchronize()
    replay_us = 1000 * statistics.median(start.elapsed_time(end) for start, end in spans)
    return replay_us / (rounds * len(arguments))


def print_table(title: str, rows: Sequence[Measured]) -> None:
    """Name, shape, microseconds, megabytes moved, TB/s, fraction of the floor."""
    wide = max([len(row.name) for row in rows] + [4])
    shape = max([len(row.shape) for row in rows] + [5])
    lines = [title, f"{'name':{wide}}  {'shape':{shape}}        us       MB   TB/s  of floor"]
    lines += [
        f"{row.name:{wide}}  {row.shape:{shape}}  {row.micros:8.2f} {row.nbytes / 1e6:8.1f}"
        f"  {row.speed_tb_s:5.2f}  {row.of_floor:7.2f}  {row.note}".rstrip()
        for row in rows
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def describe_device() -> str:
    """Device and versions, for the title of a table."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    return f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}"
