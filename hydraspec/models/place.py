"""The place of weights: device, type, ranks that share them, pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hydraspec_kernels.rope import Frequencies, mirrored
from torch import Tensor

from hydraspec.models.parts import Share
from hydraspec.models.stages import WHOLE, Stage
from hydraspec.parallel.group import SOLO, TensorGroup


@dataclass(slots=True, frozen=True)
class Place:
    """The type and device of weights, the ranks that share them, and their pipeline stage."""

    dtype: torch.dtype
    device: torch.device
    group: TensorGroup = SOLO
    stage: Stage = WHOLE
    is_quantised: bool = False  # linear maps get their memory once their schemes are known

    def if_held(self, is_held: bool) -> Place:
        """This place if its stage holds the weights; otherwise a place without memory, where
        weights have only names and shapes.
        """
        return self if is_held else replace(self, device=torch.device("meta"))

    def share(self, size: int) -> Share:
        """This rank's share of a dimension that the ranks divide evenly."""
        count = size // self.group.size
        assert count * self.group.size == size, f"{size} does not divide by {self.group.size}"
        return Share(size, self.group.rank * count, count)

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[Share, Share]:
        """This rank's query heads and the KV heads that they read. Where there are fewer KV heads
        than ranks, several ranks hold the same one.
        """
        size, rank = self.group.size, self.group.rank
        queries = self.share(num_heads)
        if num_kv_heads % size == 0:
            return queries, self.share(num_kv_heads)
        assert size % num_kv_heads == 0, f"{num_kv_heads} KV heads on {size} ranks"
        return queries, Share(num_kv_heads, rank * num_kv_heads // size, 1)

    @property
    def uses_cpu_norms(self) -> bool:
        """Returns whether norms run as the few operators of the kernels' `norms/cpu.py`. Narrow
        types keep the reference's order of rounding.
        """
        return self.device.type == "cpu" and self.dtype in (torch.float32, torch.float64)

    @property
    def wide(self) -> torch.dtype:
        """Type of sums that must not round to a narrow type: float32, or float64 for float64."""
        return torch.promote_types(self.dtype, torch.float32)

    def frequencies(self, theta: Tensor) -> Frequencies:
        """Rotary frequencies of a whole head from theta [H/2], in the wide type."""
        return mirrored(theta.to(self.device, self.wide))

    @property
    def of_matrices(self) -> Place:
        """The place where linear maps are built: without memory where it waits for a scheme."""
        return self.if_held(not self.is_quantised)

    def matrix(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An empty matrix [..., k, n] for rows to be multiplied with.

        On a CPU it is contiguous, which spares `torch.mm` a microsecond a call. Elsewhere it is
        the view of [..., n, k] storage, as checkpoints hold it and the kernels read it.
        """
        if self.device.type == "cpu":
            return self.empty(*shape, dtype=dtype)
        *batch, k, n = shape
        return self.empty(*batch, n, k, dtype=dtype).transpose(-1, -2)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor on this device, of this place's dtype unless one is given."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
