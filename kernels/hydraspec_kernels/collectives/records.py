"""Message boxes of ranks: their sizes and records."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# A program has one box. The programs of a launch wait for each other across ranks, so all of them
# have to run at once: fewer than an H100 or H200 has SMs.
MAX_BOXES = 128
BOX_BYTES = 32768


@dataclass(slots=True, frozen=True)
class Fault:
    """A message that did not arrive in time."""

    peer: int  # the rank that did not send it
    box: int
    count: int  # messages that had arrived in this box before, modulo 2^32

    @classmethod
    def of(cls, word: int) -> Fault:
        """The fault of a kernel's word: bit 0 is set; peer, box, count start at bits 8, 16, 32."""
        return cls(word >> 8 & 0xFF, word >> 16 & 0xFFFF, word >> 32 & 0xFFFFFFFF)


@dataclass(slots=True, frozen=True)
class Mailboxes:
    """A rank's end of the message boxes of `size` ranks.

    Every rank has boxes [2, size, MAX_BOXES, BOX_BYTES]: for alternating messages, from each rank.
    All bits are set where no message is. Ranks make the same calls in the same order, on one stream
    each; a call that was not made by every rank leaves the boxes unusable.
    """

    rank: int
    size: int
    boxes: Tensor  # this rank's, uint8
    peers: tuple[int, ...]  # addresses of every rank's boxes: rank + 1, rank + 2, ..., rank
    counts: Tensor  # [MAX_BOXES] int32: messages received
    control: Tensor  # [2] int64: address of `fault`, nanoseconds to wait for a message
    fault: Tensor  # [1] int64 in pinned host memory: 0, or see `Fault.of`


def num_bytes(size: int) -> int:
    """Bytes of a rank's boxes."""
    return 2 * size * MAX_BOXES * BOX_BYTES
