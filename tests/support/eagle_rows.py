"""One request's rows over a paged cache, for heads without an engine around them."""

from __future__ import annotations

from pathlib import Path

import torch
from eagle_folders import FakeTarget
from hydraspec_kernels.step_inputs.reference import slot_mapping_reference

from hydraspec.models.eagle.head import EagleHead
from hydraspec.models.eagle.loading import load_eagle
from hydraspec.types import Rows, RowSegment, TargetStep

BLOCK = 4


class PagedRows:
    """One request's rows over a shuffled block table, as an engine would lay them out."""

    def __init__(self, head: EagleHead, length: int) -> None:
        self.specs = head.kv_groups(BLOCK, first_layer=6)
        blocks = -(-length // BLOCK)
        self.table = 1 + torch.randperm(blocks)[None]
        self.caches = [
            torch.zeros((blocks + 1) * BLOCK, *spec.shape.page_row).double()
            for spec in self.specs
            for _ in spec.layers
        ]

    def rows(self, tokens: torch.Tensor, first: int) -> Rows:
        n = len(tokens)
        positions = torch.arange(first, first + n)
        slots = slot_mapping_reference(self.table, torch.zeros_like(positions), positions, BLOCK)
        return Rows(
            segments=(RowSegment(0, 0, 1, n, first + n),),
            input_ids=tokens,
            positions=positions,
            seq_lens=torch.tensor([first + n]),
            slot_mapping=[slots] * len(self.specs),
            block_tables=[self.table] * len(self.specs),
            query_start_loc=torch.tensor([0, n]),
        )


def target_step(final: torch.Tensor, aux: list[torch.Tensor]) -> TargetStep:
    return TargetStep(hidden_states=final, logits=torch.empty(0), aux_hidden_states=aux)


def load(folder: Path, method: str, target: FakeTarget) -> EagleHead:
    return load_eagle(str(folder), method=method, weights="checkpoint", target=target, seed=0)  # type: ignore[arg-type]
