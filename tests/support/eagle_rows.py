"""One request's rows over a paged cache, for heads without an engine around them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from eagle_folders import FakeTarget, matrix
from eagle_oracle import PlainEagle
from hydraspec_kernels.step_inputs.reference import slot_mapping_reference

from hydraspec.models.eagle.head import EagleHead
from hydraspec.models.eagle.loading import load_eagle
from hydraspec.types import Rows, RowSegment, TargetStep

BLOCK = 4
CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # float64 both, sums in another order


class PagedRows:
    """One request's rows over a shuffled block table, as an engine would lay them out."""

    def __init__(self, head: EagleHead, length: int) -> None:
        self.specs = head.kv_groups(BLOCK, first_layer=6)
        blocks = -(-length // BLOCK)
        self.table = 1 + torch.randperm(blocks)[None]
        self.caches = [
            torch.zeros((blocks + 1) * BLOCK, *spec.shape.page_row, dtype=head.place.dtype)
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


def draw_text(
    rng: np.random.Generator, head: PlainEagle, target: FakeTarget, n: int
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Tokens [n], and the target's aux and final states of all but the newest."""
    text = torch.from_numpy(rng.integers(0, target.vocab_size, n))
    width = target.hidden_size
    aux = [matrix(rng, n - 1, width) * 5 for _ in head.aux_layer_ids]
    return text, aux, matrix(rng, n - 1, width) * 5


def check_chain(
    rng: np.random.Generator, plain: PlainEagle, head: EagleHead, target: FakeTarget
) -> None:
    """Asserts states and tokens of a prefill in two chunks and a chain of K steps."""
    k, n = 5, int(rng.integers(3, 14))
    text, aux, final = draw_text(rng, plain, target, n)
    drafts, states = plain.draft(text, aux, final, k)
    hidden = head.combine_target_hidden(target_step(final, aux))
    torch.testing.assert_close(hidden, plain.combine(aux, final), **CLOSE)
    paged = PagedRows(head, n + k)
    cut = int(rng.integers(1, n - 1)) if n > 2 else 0
    if cut:
        head.forward(paged.rows(text[1 : cut + 1], 0), hidden[:cut], paged.caches, step=0)
    rows = paged.rows(text[cut + 1 :], cut)
    found, feedback = head.forward(rows, hidden[cut:], paged.caches, step=0)
    for step in range(k):
        torch.testing.assert_close(found[-1], states[step], **CLOSE)
        logits, banned = plain.logits(states[step]), head.banned
        assert banned is None
        torch.testing.assert_close(head.compute_logits(found[-1:])[0], logits, **CLOSE)
        token = head.greedy_tokens(found[-1:])
        assert token.item() == drafts[step].item()
        found, feedback = head.forward(
            paged.rows(token, n - 1 + step), feedback[-1:], paged.caches, step=step + 1
        )
