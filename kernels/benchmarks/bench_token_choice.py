"""From logits to tokens, and to the next step's inputs: argmax, draws, verification, centroid head.

    python kernels/benchmarks/bench_token_choice.py [--rows 1 8 32] [--vocab 262144]

Each line is the time of one call with all its launches. A step of K = 3 drafts verifies 4 rows per
request.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from harness import Measured, describe_device, nbytes, print_table, rotation, time_us
from hydraspec_kernels.embedding import centroid_greedy
from hydraspec_kernels.sampling.random_streams import DrawKey, Purpose
from hydraspec_kernels.sampling.rejection import Rule
from hydraspec_kernels.sampling.rejection.launches import verify_sampled_launches
from hydraspec_kernels.sampling.token_choice import draw_tokens, greedy_tokens, sample_with_probs
from hydraspec_kernels.sampling.verification import (
    commit_tokens,
    store_drafts,
    verify_prefix,
    verify_synthetic,
)
from hydraspec_kernels.step_inputs import GroupTables, decode_rows, newest_rows, prepare_rows
from torch import Tensor

DRAFTS = 3
SLOTS, COLUMNS, BLOCK_SIZE = 260, 8192, 16
Call = tuple[str, Callable[..., object], Callable[[], tuple[object, ...]], float | None]


def logits_of(rows: int, vocab: int) -> Tensor:
    return torch.randn(rows, vocab, device="cuda").bfloat16()


def keys(rows: int) -> tuple[Tensor, Tensor]:
    """Seeds and positions."""
    each = torch.arange(rows, device="cuda")
    return each * 77, each + 100


def choices(rows: int, vocab: int) -> list[Call]:
    """A token per row of logits; the torch lines are what the kernels stand in for."""
    hot = torch.full((rows,), 0.8, device="cuda")
    seed, position = keys(rows)
    read = rows * vocab * 2

    def drawn(logits: Tensor) -> object:
        return sample_with_probs(logits, hot, DrawKey(seed, position, Purpose.DRAFT, 0))

    def weighted(probs: Tensor) -> Tensor:
        return draw_tokens(probs, DrawKey(seed, position, Purpose.BONUS, 0))

    return [
        ("greedy_tokens", greedy_tokens, lambda: (logits_of(rows, vocab),), read),
        ("torch.argmax", lambda x: x.argmax(-1), lambda: (logits_of(rows, vocab),), read),
        ("sample_with_probs", drawn, lambda: (logits_of(rows, vocab),), 4 * read),
        ("draw_tokens fp32", weighted, lambda: (logits_of(rows, vocab).float().exp_(),), 2 * read),
    ]


def centroid(rows: int) -> list[Call]:
    """Gemma 4 E's head: 2048 clusters of 128 tokens, 32 of them scored."""
    vocab = 2048 * 128

    def make() -> tuple[object, ...]:
        d = torch.randn(rows, 256, device="cuda").bfloat16()
        table = torch.randn(vocab, 256, device="cuda").bfloat16()
        centroids = torch.randn(2048, 256, device="cuda").bfloat16().t()
        clusters = torch.randperm(vocab, device="cuda").view(2048, 128)
        return d, table, centroids, clusters, 32, None

    read = 2048 * 256 * 2 + rows * 32 * 128 * (256 * 2 + 8)
    return [("centroid_greedy", centroid_greedy, make, float(read))]


def step(requests: int) -> dict[str, Tensor]:
    """The tensors of a decode step of `requests` with three drafts each."""
    each, rows = torch.arange(requests, device="cuda"), DRAFTS + 1
    made = {
        "token_ids": torch.randint(0, 1000, (SLOTS, COLUMNS), device="cuda"),
        "num_computed": torch.randint(1, 4000, (SLOTS,), device="cuda"),
        "slots": each,
        "num_rows": torch.full_like(each, rows),
        "num_drafts": torch.full_like(each, DRAFTS),
        "samples": torch.ones(requests, dtype=torch.bool, device="cuda"),
        "row_request": each.repeat_interleave(rows),
        "row_offset": torch.arange(rows, device="cuda").repeat(requests),
        "query_start_loc": torch.arange(requests + 1, device="cuda") * rows,
        "verify_rows": torch.arange(requests * rows, device="cuda").view(requests, rows),
        "draft_tokens": torch.randint(0, 1000, (requests, DRAFTS), device="cuda"),
        "choices": torch.randint(0, 1000, (requests * rows,), device="cuda"),
        "table": torch.randint(1, 99, (requests, COLUMNS // BLOCK_SIZE), device="cuda"),
        "temperature": torch.full((SLOTS,), 0.8, device="cuda"),
        "seed": torch.arange(SLOTS, device="cuda"),
    }
    return made | {"seq_lens": made["num_computed"][:requests] + rows}


def small_work(requests: int) -> list[Call]:
    """Work of a step beside the models; launches, not bytes, are what it costs."""
    s = step(requests)
    groups = GroupTables([s["table"]] * 2, [BLOCK_SIZE] * 2)
    batch = state = layout = SimpleNamespace(**s)
    verified = verify_prefix(s["choices"], batch)
    newest = newest_rows(verified, batch, s["num_computed"])

    def rows() -> object:
        return prepare_rows(state, layout, s["slots"], groups, DRAFTS)

    def at_rate() -> object:
        return verify_synthetic(s["choices"], batch, s["seed"], 2.5)

    def commit() -> object:
        return commit_tokens(state, batch, verified)

    def newest_of() -> object:
        return newest_rows(verified, batch, s["num_computed"])

    def store() -> object:
        return store_drafts(state, batch, s["draft_tokens"])

    def behind() -> object:
        return decode_rows(newest.positions, newest.seq_lens, 1, groups)

    def prefix() -> object:
        return verify_prefix(s["choices"], batch)

    work = {
        "prepare_rows, 2 groups": rows,
        "verify_prefix": prefix,
        "verify_synthetic": at_rate,
        "commit_tokens": commit,
        "newest_rows": newest_of,
        "decode_rows, 2 groups": behind,
        "store_drafts": store,
    }
    return [(name, call, lambda: (), 0.0) for name, call in work.items()]


def sampled_verification(requests: int, vocab: int) -> list[Call]:
    """Verification by distributions: drafts chosen outright, and drafts sampled from q."""
    s = step(requests)
    rows = requests * (DRAFTS + 1)
    q = torch.randn(requests, DRAFTS, vocab, device="cuda").softmax(-1)
    made = []
    for name, rule, probs, again in (  # rows that are read a second time, beside their q
        ("standard, one-hot", Rule.STANDARD, None, 0),
        ("standard, sampled", Rule.STANDARD, q, 1),
        ("block, sampled", Rule.BLOCK, q, DRAFTS),
    ):
        batch = SimpleNamespace(draft_probs=probs, draft_vocab_map=None, **s)

        def verify(logits: Tensor, rule: Rule = rule, batch: Any = batch) -> object:
            return verify_sampled_launches(logits, batch, batch, rule)

        read = float(rows * vocab * 2 + requests * again * vocab * 6)
        made.append((f"verify {name}", verify, lambda: (logits_of(rows, vocab),), read))
    return made


def measure(calls: Sequence[Call], shape: str) -> list[Measured]:
    lines = []
    for name, call, make, read in calls:
        # The head's table alone would be rotated out of memory: two sets hold 256 MB.
        sets = rotation(make) if read else [()] * 2
        lines.append(Measured(name, shape, time_us(call, sets), read or float(nbytes(sets[0]))))
        del sets
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--vocab", type=int, default=262_144)
    given = parser.parse_args()
    lines: list[Measured] = []
    for requests in given.rows:
        for rows in sorted({requests, requests * (DRAFTS + 1)}):
            lines += measure(choices(rows, given.vocab), f"{rows}x{given.vocab}")
        lines += measure(centroid(requests), f"B={requests}")
        lines += measure(small_work(requests), f"B={requests} K={DRAFTS}")
        lines += measure(sampled_verification(requests, given.vocab), f"B={requests} K={DRAFTS}")
    print_table(f"heads: {describe_device()}", lines)


if __name__ == "__main__":
    main()
