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
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], int]:
    """States [R, D] of a block behind a text whose context is written in two parts; and the text,
    its aux states and K."""
    k = int(rng.integers(1, head.config.most_drafts + 1))
    n = int(rng.integers(3, 14))
    text, aux, final = draw_text(rng, plain, target, n)
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
    return head.draft_block(paged.rows(ids, n - 1), paged.caches), text, aux, k


def check_block(
    rng: np.random.Generator, plain: PlainBlock, head: BlockHead, target: FakeTarget
) -> None:
    """Asserts states and tokens of a block over a context that was written in parts."""
    found, text, aux, k = run_block(rng, plain, head, target)
    found, expected = found[-k:], plain.block_states(text, aux, k)
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(head.compute_logits(found), plain.logits(expected), **CLOSE)
    assert head.greedy_tokens(found).tolist() == plain.choose(expected).tolist()


def check_in_turn(
    rng: np.random.Generator, plain: PlainBlock, head: BlockHead, target: FakeTarget
) -> None:
    """Asserts the drafts of a Markov head, and the estimates of their acceptance."""
    found, text, aux, k = run_block(rng, plain, head, target)
    drafts, before, rows = plain.in_turn(text, aux, k)
    torch.testing.assert_close(found[-k:], rows, **CLOSE)
    chosen = head.in_turn(found[None], text[-1:], k, head.greedy_choice)
    assert [token.item() for token, _ in chosen] == drafts.tolist()
    if plain.flags["enable_confidence_head"]:
        expected = [plain.confidence(t, h) for t, h in zip(before, rows, strict=True)]
        torch.testing.assert_close(head.acceptance(rows, before), torch.stack(expected), **CLOSE)


def check_selected(
    rng: np.random.Generator, plain: PlainBlock, head: BlockHead, target: FakeTarget
) -> None:
    """Asserts the drafts of a candidate selector, and their candidates' scores."""
    found, text, aux, k = run_block(rng, plain, head, target)
    rows = plain.block_states(text, aux, k)
    torch.testing.assert_close(found[-k:], rows, **CLOSE)
    torch.testing.assert_close(head.compute_logits(rows), plain.capped(rows), **CLOSE)
    drafts, scores = plain.selected(text, aux, k)
    candidates, before = head.candidates(found[None, -k:]), text[-1:]
    for i, (token, expected) in enumerate(zip(drafts, scores, strict=True)):
        logits = head.candidate_logits(candidates, i, before)[0]
        torch.testing.assert_close(
            logits.topk(len(expected)).values, expected.sort(descending=True).values, **CLOSE
        )
        assert logits.argmax() == token
        before = token[None]
