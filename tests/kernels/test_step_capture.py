"""The kernels of a decode step outside its layers in one CUDA graph: replays equal eager calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydraspec_kernels.embedding import centroid_greedy
from hydraspec_kernels.sampling.random_streams import DrawKey, Purpose
from hydraspec_kernels.sampling.rejection import Rule
from hydraspec_kernels.sampling.rejection.launches import verify_sampled_launches
from hydraspec_kernels.sampling.token_choice import greedy_tokens, sample_with_probs
from hydraspec_kernels.sampling.verification import commit_tokens, store_drafts, verify_prefix
from hydraspec_kernels.step_inputs import (
    GroupTables,
    decode_rows,
    newest_rows,
    prepare_rows,
    shifted_tokens,
)
from torch import Tensor

VOCAB, SLOTS, COLUMNS, SIZES = 4096, 9, 256, (16, 16)
Given = dict[str, Tensor]


def given(num_requests: int, num_drafts: int, padding: int) -> Given:
    """A padded decode batch; padding requests have the last slot and no rows."""
    torch.manual_seed(num_requests)
    b, width = num_requests + padding, num_drafts + 1
    real = torch.arange(b) < num_requests
    made = {
        "token_ids": torch.randint(0, VOCAB, (SLOTS, COLUMNS)),
        "num_computed": torch.randint(1, 100, (SLOTS,)).where(torch.arange(SLOTS) < SLOTS - 1, 0),
        "slots": torch.arange(b).where(real, SLOTS - 1),
        "num_rows": real * width,
        "num_drafts": real * num_drafts,
        "samples": real,
        "row_request": torch.arange(b).repeat_interleave(width),
        "row_offset": torch.arange(width).repeat(b),
        "query_start_loc": torch.arange(b + 1) * width,
        "verify_rows": torch.arange(b * width).view(b, width),
        "table": torch.randint(1, 50, (b, COLUMNS // 16)),
        "logits": torch.randn(b * width, VOCAB),
        "temperature": torch.tensor([0.0, 0.8, 1.3]).repeat(3),
        "seed": torch.arange(SLOTS) * 1001,
        "d": torch.randn(b, 64),
        "centroids": torch.randn(64, 64),
        "weights": torch.randn(VOCAB, 64),
        "clusters": torch.randperm(VOCAB).view(64, 64),
    }
    return {name: value.cuda() for name, value in made.items()}


def step(g: Given, num_drafts: int) -> list[Tensor]:
    """Rows, verification by choices and by distributions, commit, the next rows, drafts."""
    groups, slots = GroupTables([g["table"], g["table"]], SIZES), g["slots"]
    state: Any = SimpleNamespace(draft_probs=None, draft_vocab_map=None, **g)
    rows = prepare_rows(state, state, slots, groups, num_drafts, padded=True)
    batch: Any = SimpleNamespace(draft_tokens=rows.draft_tokens, seq_lens=rows.seq_lens, **g)
    sampled = verify_sampled_launches(g["logits"], batch, state, Rule.STANDARD)
    verdict = verify_prefix(greedy_tokens(g["logits"]), batch)
    commit_tokens(state, batch, verdict)
    newest = newest_rows(verdict, batch, g["num_computed"])
    after = decode_rows(newest.positions, newest.seq_lens, 1, groups)
    shifted = shifted_tokens(g["token_ids"], slots, g["row_request"], rows.positions)
    greedy = centroid_greedy(g["d"], g["weights"], g["centroids"], g["clusters"], 5, None)
    logits = g["logits"][: len(slots)]
    hot, seed = g["temperature"][slots], g["seed"][slots]
    key = DrawKey(seed, newest.seq_lens, Purpose.DRAFT, 0)
    drawn, probs = sample_with_probs(logits, hot, key)
    drafts = torch.stack([greedy, drawn, greedy][:num_drafts], 1)
    store_drafts(state, batch, drafts)
    return [
        rows.input_ids, rows.positions, *rows.slot_mapping, rows.draft_tokens, sampled.tokens,
        verdict.tokens, newest.rows, newest.token_ids, *after.slot_mapping, shifted, drafts, probs,
        g["token_ids"][:, :-1], g["num_computed"],
    ]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("count", "padding"), [(1, 0), (3, 0), (5, 3)])
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_a_captured_step_is_the_eager_step(count: int, padding: int, num_drafts: int) -> None:
    """Three steps each: catches a host read, a value frozen at capture, a launch too early."""
    eager, captured = (given(count, num_drafts, padding) for _ in range(2))
    wanted = [[x.clone() for x in step(eager, num_drafts)] for _ in range(3)]
    start = {name: value.clone() for name, value in captured.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(captured, num_drafts)
    torch.cuda.current_stream().wait_stream(stream)
    for name, value in start.items():
        captured[name].copy_(value)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = step(captured, num_drafts)
    for expected in wanted:
        graph.replay()
        for ours, theirs in zip(out, expected, strict=True):
            assert ours.equal(theirs)
