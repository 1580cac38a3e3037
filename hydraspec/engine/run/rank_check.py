"""parallelism.check: tensor-parallel ranks compare what they computed after every step."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from hydraspec.engine.run.results import StepResult
from hydraspec.parallel.group import TensorGroup


class RanksDiffer(RuntimeError):
    """Ranks of one replica computed different things in a step."""


class RankCheck:
    """Compares the results of ranks by digests. A draft that differs shows in the step that
    verifies it."""

    def __init__(self, group: TensorGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    def compare(self, step: int, rows: np.ndarray, result: StepResult) -> None:
        """Compare a step's results, and `rows` [B, 2], the first position and the number of rows of
        each request. Every rank calls this. Raises RanksDiffer, on every rank, if any differ."""
        counts = np.concatenate((result.num_sampled, result.not_finite))
        parts = {
            "step number": np.array([step]),
            "rows": rows,
            "tokens": result.tokens,
            "counts": counts,
            "drafts": result.draft_tokens,
        }
        own = torch.tensor([_digest(part) for part in parts.values()], device=self._device)
        found = self._group.all_gather(own).tolist()
        others = [rank for rank, digests in enumerate(found) if digests != found[0]]
        if not others:
            return
        wrong = [
            name
            for i, name in enumerate(parts)
            if any(digests[i] != found[0][i] for digests in found)
        ]
        raise RanksDiffer(
            f"parallelism.check: in step {step} the {' and '.join(wrong)} of tensor-parallel rank"
            f"{'s' if len(others) > 1 else ''} {', '.join(map(str, others))} differ from those of "
            "rank 0: ranks must compute the same, so what they return is not to be trusted"
        )


def _digest(numbers: np.ndarray) -> int:
    """A whole number of 8 bytes for an array and its shape."""
    content = np.ascontiguousarray(numbers, dtype=np.int64).tobytes() + repr(numbers.shape).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), signed=True)
