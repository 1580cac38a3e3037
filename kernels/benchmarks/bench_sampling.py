"""Truncation of logits (top-k, top-p, min-p), then verification, per sampled step of K = 3 drafts.

    python kernels/benchmarks/bench_sampling.py [--rows 1 4 32 128] [--vocab 262144] [--torch]

Logits follow Zipf's law with exponent 1.5, as a language model's do roughly (top_p=0.95 keeps some
240 tokens), or are normal: no model's, but the longest search (it keeps tens of thousands).
"""

from __future__ import annotations

import argparse
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from harness import Measured, describe_device, print_table, rotation, time_us
from hydraspec_kernels.sampling.records import SamplingTensors
from hydraspec_kernels.sampling.rejection import Rule
from hydraspec_kernels.sampling.rejection.launches import verify_sampled_launches
from hydraspec_kernels.sampling.truncation import truncate_, truncate_reference
from torch import Tensor

DRAFTS = 3
CASES = {  # top_k, top_p, min_p
    "top_k=64 top_p=0.95": (64, 0.95, 0.0),
    "top_k=64": (64, 1.0, 0.0),
    "top_p=0.95": (0, 0.95, 0.0),
    "min_p=0.05": (0, 1.0, 0.05),
    "off": (0, 1.0, 0.0),
}


def zipf(rows: int, vocab: int) -> Tensor:
    ranks = torch.rand(rows, vocab, device="cuda").argsort(-1).add_(1)
    return ranks.float().log_().mul_(-1.5).add_(20).bfloat16()


def normal(rows: int, vocab: int) -> Tensor:
    return torch.randn(rows, vocab, device="cuda").mul_(3).bfloat16()


def parameters(rows: int, top_k: int, top_p: float, min_p: float) -> SamplingTensors:
    """A plan of requests of one row each."""
    return SamplingTensors(
        temperature=torch.full((rows,), 0.8, device="cuda"),
        top_k=torch.full((rows,), top_k, device="cuda"),
        top_p=torch.full((rows,), top_p, device="cuda"),
        min_p=torch.full((rows,), min_p, device="cuda"),
    )


def step(rows: int, width: int) -> SimpleNamespace:
    """A batch of requests of `width` rows each."""
    each = torch.arange(rows // width, device="cuda")
    return SimpleNamespace(
        verify_rows=torch.arange(rows, device="cuda").view(-1, width),
        draft_tokens=torch.randint(0, 1000, (len(each), width - 1), device="cuda"),
        num_drafts=torch.full_like(each, width - 1),
        samples=torch.ones_like(each, dtype=torch.bool),
        seq_lens=each + 50,
        slots=each,
    )


def truncations(rows: int, vocab: int, with_torch: bool) -> list[Measured]:
    """Rows are written over: every call cuts a copy, whose time is taken off."""
    lines = []
    batch = step(rows, 1)
    read = float(rows * vocab * 2)
    for shape, make in (("zipf", zipf), ("normal", normal)):
        kept = [one for (one,) in rotation(lambda make=make: (make(rows, vocab),), most=8)]
        scratch = torch.empty_like(kept[0])
        copy = time_us(lambda x, scratch=scratch: scratch.copy_(x), [(x,) for x in kept])
        for name, given in CASES.items():
            about = parameters(rows, *given)

            def cut(x: Tensor, scratch: Tensor = scratch, about: Any = about) -> None:
                scratch.copy_(x)
                truncate_(scratch, batch, about)

            micros = time_us(cut, [(x,) for x in kept]) - copy
            lines.append(Measured(f"{name}, {shape}", f"{rows}x{vocab}", micros, read))
            if with_torch and name.startswith("top_k=64 top_p"):
                sorting = partial(truncate_reference, sampling=about)
                micros = time_us(sorting, [(kept[0],)], least_calls=2, replays=3)
                lines.append(Measured(f"torch, {shape}", f"{rows}x{vocab}", micros, read))
    return lines


def verifications(rows: int, vocab: int) -> list[Measured]:
    """Verification of rows that are truncated already."""
    if rows % (DRAFTS + 1):
        return []
    batch = step(rows, DRAFTS + 1)
    slots = batch.slots
    hot = torch.full((len(slots),), 0.8, device="cuda")
    probs = torch.randn(len(slots), DRAFTS, vocab, device="cuda").softmax(-1)
    lines = []
    for name, rule, q, again in (  # rows that are read a second time, beside their q
        ("verify, one-hot", Rule.STANDARD, None, 0),
        ("verify, sampled", Rule.STANDARD, probs, 1),
        ("verify block, sampled", Rule.BLOCK, probs, DRAFTS),
    ):
        state = SimpleNamespace(
            temperature=hot, seed=slots * 7, draft_probs=q, draft_vocab_map=None
        )

        def verify(x: Tensor, rule: Rule = rule, state: Any = state) -> object:
            return verify_sampled_launches(x, batch, state, rule)

        sets = rotation(lambda: (zipf(rows, vocab),), most=8)
        read = float(rows * vocab * 2 + len(slots) * again * vocab * 6)
        lines.append(Measured(name, f"{rows}x{vocab}", time_us(verify, sets), read))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 32, 128])
    parser.add_argument("--vocab", type=int, default=262_144)
    parser.add_argument("--torch", action="store_true", help="time the reference, too")
    given = parser.parse_args()
    lines: list[Measured] = []
    for rows in given.rows:
        lines += truncations(rows, given.vocab, given.torch)
        lines += verifications(rows, given.vocab)
    print_table(f"sampling: {describe_device()}", lines)


if __name__ == "__main__":
    main()
