"""Reads large tensors from safetensors files straight to where they are used: several threads, and
for a CUDA device pinned buffers, so that reading the files and copying to the device overlap.

It knows the layout of the files, and nothing of names or models. Tensors that need a conversion, or
of which only a part is used, are read by `tensors`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from hydraspec.errors import CheckpointError
from hydraspec.models.checkpoint.reader import TensorEntry, cannot_read

LEAST_BYTES = 1 << 20  # smaller tensors are not worth a thread
CHUNK_BYTES = 16 << 20
NUM_THREADS = 8
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
}


@dataclass(slots=True, frozen=True)
class _Chunk:
    """Bytes of a file and where they go."""

    first: int  # in the file
    memory: Tensor  # [n] uint8


@dataclass(slots=True)
class _Lane:
    """What one thread reads with: two pinned buffers in turns and a stream, or on a CPU nothing."""

    device: torch.device
    stream: torch.cuda.Stream | None = None
    buffers: list[Tensor] = field(default_factory=list)
    copied: list[torch.cuda.Event] = field(default_factory=list)
    turn: int = 0

    @classmethod
    def on(cls, device: torch.device, size: int) -> _Lane:
        """A lane for chunks of at most `size` bytes, whose copies follow what is under way."""
        lane = cls(device)
        if device.type == "cuda":
            lane.stream = torch.cuda.Stream(device)
            lane.stream.wait_stream(torch.cuda.current_stream(device))
            lane.buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            lane.copied = [torch.cuda.Event() for _ in range(2)]
        return lane

    def fill(self, descriptor: int, chunk: _Chunk) -> None:
        """Reads a chunk; on CUDA its copy to the device may be under way still."""
        if self.stream is None:
            _read_into(descriptor, chunk.first, chunk.memory)
            return
        buffer = self.buffers[self.turn][: chunk.memory.numel()]
        copied = self.copied[self.turn]
        self.turn = 1 - self.turn
        copied.synchronize()
        _read_into(descriptor, chunk.first, buffer)
        # A thread begins with gradients, whatever mode the weights were made in.
        with torch.cuda.stream(self.stream), torch.inference_mode():
            chunk.memory.copy_(buffer, non_blocking=True)
            copied.record(self.stream)

    def wait(self) -> None:
        """Waits for the lane's copies."""
        if self.stream is not None:
            self.stream.synchronize()


def goes_straight(entry: TensorEntry, tensor: Tensor) -> bool:
    """Returns whether the file's bytes are the tensor's, and enough of them to be read here."""
    return (
        entry.convert is None
        and tensor.device.type in ("cpu", "cuda")
        and tensor.is_contiguous()
        and _TYPES.get(entry.dtype) is tensor.dtype
        and tensor.nbytes >= LEAST_BYTES
    )


def read_straight(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fills tensors of one device, for which `goes_straight` holds, by their names in the file.

    Raises CheckpointError if the file cannot be read or ends too early.
    """
    if not tensors:
        return
    device = next(iter(tensors.values())).device
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError as error:
        raise cannot_read(file, error) from None
    try:
        chunks = list(_chunks(_firsts(descriptor), tensors))
        size = max(chunk.memory.numel() for chunk in chunks)
        lanes = [_Lane.on(device, size) for _ in range(min(NUM_THREADS, len(chunks)))]
        rest, lock = iter(chunks), Lock()

        def run(lane: _Lane) -> None:
            while True:
                with lock:
                    chunk = next(rest, None)
                if chunk is None:
                    return
                lane.fill(descriptor, chunk)

        with ThreadPoolExecutor(len(lanes)) as pool:
            try:
                list(pool.map(run, lanes))
            finally:
                for lane in lanes:
                    lane.wait()
    except EOFError:
        raise CheckpointError(
            f"{str(file)!r} is cut short: it ends inside a tensor; expected the length that its "
            "header gives: download it again"
        ) from None
    except OSError as error:
        raise cannot_read(file, error) from None
    finally:
        os.close(descriptor)


def _firsts(descriptor: int) -> dict[str, int]:
    """Place in the file of each tensor's first byte, from a header that has been checked."""
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    header = json.loads(os.pread(descriptor, length, 8))
    return {
        name: 8 + length + entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _chunks(firsts: Mapping[str, int], tensors: Mapping[str, Tensor]) -> Iterator[_Chunk]:
    """Yields the tensors' bytes in the file's order."""
    for name in sorted(tensors, key=firsts.__getitem__):
        memory = tensors[name].view(torch.uint8).view(-1)
        for start in range(0, memory.numel(), CHUNK_BYTES):
            yield _Chunk(firsts[name] + start, memory[start : start + CHUNK_BYTES])


def _read_into(descriptor: int, first: int, memory: Tensor) -> None:
    """Fills host memory [n] uint8. Raises EOFError if the file ends before."""
    view = memoryview(memory.numpy().data)
    while view:
        count = os.preadv(descriptor, [view], first)
        if not count:
            raise EOFError
        view, first = view[count:], first + count
