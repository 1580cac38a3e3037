"""Layout of the ranks of a run: replicas, pipeline stages, tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Coordinates:
    """Place of a rank: its number on each axis, from 0."""

    replica: int
    stage: int
    tensor: int


@dataclass(slots=True, frozen=True, kw_only=True)
class Layout:
    """Ranks along each axis. Tensor-parallel ranks are neighbours, then stages, then replicas."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def num_ranks(self) -> int:
        """Ranks of the run."""
        return self.tensor * self.pipeline * self.data

    def coordinates(self, rank: int) -> Coordinates:
        """The place of `rank`."""
        rest, tensor = divmod(rank, self.tensor)
        replica, stage = divmod(rest, self.pipeline)
        return Coordinates(replica, stage, tensor)

    def rank_at(self, at: Coordinates) -> int:
        """The rank at a place."""
        return (at.replica * self.pipeline + at.stage) * self.tensor + at.tensor
