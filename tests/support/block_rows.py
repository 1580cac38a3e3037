"""One request's context and blocks over a paged cache, for heads without an engine around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from block_oracle import PlainBlock
from eagle_folders import FakeTarget
from eagle_rows import CLOSE, PagedRows, draw_text, target_step

from hydraspec.models.block_drafter.head import BlockHead
from hydraspec.models.block_drafter.loading import load_block_drafter


def load(folder: Path, method: str, target: Any) -> BlockHead:
    return load_block_drafter(
        str(folder), method=method, weights="checkpoint", target=target, seed=0
    )


def run_block(
    rng: np.random.Generator, plain: PlainBlock, head: BlockHead, target: FakeTarget
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Drafting states [k, D] behind a text whose context is written in two parts: those by the
    cache, those by the definition, and the text."""
    k = int(rng.integers(1, head.config.most_drafts + 1))
    n = int(rng.integers(3, 14))
    text, aux, final = draw_text(rng, plain, target, n)
    expected = plain.block_states(text, aux, k)
    rows = plain.num_rows(k)
    paged = PagedRows(head, n + rows + 4)  # type: ignore[arg-type]
    features = head.context_features(target_step(final, aux))
    torch.testing.assert_close(features, plain.features(aux), **CLOSE)
    cut = int(rng.integers(1, n - 1))
    # The second part comes after rows that were rejected, and after a block, at its positions.
    head.write_context(paged.rows(text[:cut], 0), features[:cut], paged.caches)
    wrong = features[cut:] * 0.5 + 1
    head.write_context(paged.rows(text[cut:-1], cut), wrong, paged.caches)
    head.draft_block(paged.rows(text[:rows].repeat(9)[:rows], cut), paged.caches)
    head.write_context(paged.rows(text[cut:-1], cut), features[cut:], paged.caches)
    ids = torch.full((rows,), plain.mask_token)
    ids[0] = text[-1]
    found = head.draft_block(paged.rows(ids, n - 1), paged.caches)[-k:]
    return found, expected, text


def check_block(
    rng: np.random.Generator, plain: PlainBlock, head: BlockHead, target: FakeTarget
) -> None:
    """Asserts states and tokens of a block over a context that was written in parts."""
    found, expected, _ = run_block(rng, plain, head, target)
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(head.compute_logits(found), plain.logits(expected), **CLOSE)
    assert head.greedy_tokens(found).tolist() == plain.choose(expected).tolist()
