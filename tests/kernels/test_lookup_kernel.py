"""Lookups on a device against their definition: random texts, short and longer than one block."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from compiled_apart import compiled
from hydraspec_kernels.lookup import Lookup, kernel
from hydraspec_kernels.lookup.kernel import continued_kernel, write_drafts_kernel
from hydraspec_kernels.lookup.reference import continued_reference, write_drafts_reference
from kernel_places import DEVICES

COLUMNS, NUM_SLOTS, SMALL_BLOCK = 61, 5, 16


def texts(rng: random.Random) -> torch.Tensor:
    """Texts of few different tokens, which repeat themselves; -1 and drafts are among them."""
    size = rng.randint(1, 9)
    return torch.tensor([[rng.randrange(size) for _ in range(COLUMNS)] for _ in range(NUM_SLOTS)])


@pytest.mark.parametrize("device", DEVICES)
def test_continuations_are_the_references(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches matches over a text's ends, and a later block that loses to an earlier one."""
    monkeypatch.setattr(kernel, "BLOCK", SMALL_BLOCK)
    rng, num_found = random.Random(30), 0
    for _ in range(150):
        token_ids, most = texts(rng).to(device), rng.choice((1, 3, 5))
        slots = torch.tensor(rng.sample(range(NUM_SLOTS), 3), device=device)
        last = torch.tensor([rng.randrange(COLUMNS - 8) for _ in range(3)], device=device)
        asked = {"num_drafts": rng.randint(1, 7), "least": rng.randint(1, most), "most": most}
        wanted = continued_reference(token_ids, slots, last, **asked)
        found = continued_kernel(token_ids, slots, last, **asked)
        assert found.tolist() == wanted.tolist()
        num_found += int((wanted >= 0).sum())
    assert num_found > 300


@pytest.mark.parametrize("device", DEVICES)
def test_drafts_are_written_as_by_the_reference(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches drafts of a continuation that is wrong, or used up, or of another request."""
    monkeypatch.setattr(kernel, "BLOCK", SMALL_BLOCK)
    rng, num_followed, num_looked_up = random.Random(47), 0, 0
    for _ in range(200):
        k, is_ahead = rng.randint(1, 5), rng.random() < 0.8
        token_ids, num_computed = texts(rng), torch.zeros(NUM_SLOTS, dtype=torch.int64)
        rows = []
        for slot in rng.sample(range(NUM_SLOTS), 3):
            num_known, num_sampled = rng.randint(1, COLUMNS - 13), rng.randint(0, k + 1) * is_ahead
            num_computed[slot] = num_known + num_sampled - 1
            sampled = token_ids[slot, num_known : num_known + num_sampled].tolist()
            said = [rng.choice((*sampled, 7, 8, 9)) for _ in range(rng.randint(0, 2 * k + 1))]
            said[: len(sampled)] = sampled if rng.random() < 0.7 else said[: len(sampled)]
            said = said[: 2 * k + 1]
            rows.append([slot, num_known, *said, *[-1] * (2 * k + 1 - len(said))])
        numbers = torch.tensor(rows)
        lookup = Lookup(rng.choice((1, 2, 4)), rng.choice((0.5, 1.0, 2.0)))
        given = {
            "width": COLUMNS + 3,
            "is_ahead": is_ahead,
            "lookup": rng.choice((None, lookup)),
        }
        wanted, found = token_ids.clone(), token_ids.clone().to(device)
        write_drafts_reference(wanted, num_computed, numbers, **given)
        write_drafts_kernel(found, num_computed.to(device), numbers.to(device), **given)
        assert found.tolist() == wanted.tolist()
        changed = int((wanted != token_ids).sum())
        num_followed += changed * (given["lookup"] is None)
        num_looked_up += changed * (given["lookup"] is not None)
    assert min(num_followed, num_looked_up) > 100


COMPILE = """
import json, sys
from sm90 import build
from triton.compiler import ASTSource
from hydraspec_kernels.lookup import kernel

found = []
for name, types, fixed in json.loads(sys.argv[1]):
    built = getattr(kernel, name)
    kinds = {each: "*i64" for each in built.arg_names if each.endswith("_ptr")} | types
    made = build(built, kinds, fixed | {"BLOCK": 1024, "PDL": True}, source=ASTSource, num_warps=4)
    found.append([made.asm["ptx"].count("st.global")])
print(json.dumps(found))
"""
COLUMN_TYPES = {"columns": "i32", "width": "i32", "factor": "fp32", "fewest": "i32"}


def test_kernels_compile_without_a_device(tmp_path: Path) -> None:
    """Catches what the interpreter does not: types that differ between the sides of a branch."""
    sizes = {"K": 5, "WIDTH": 8}
    jobs = [
        ("_write_drafts", COLUMN_TYPES, {**sizes, "LONGEST": longest, "IS_AHEAD": is_ahead})
        for longest, is_ahead in ((0, False), (0, True), (4, True))
    ]
    jobs.append(("_continued", {"columns": "i32", "least": "i32"}, {**sizes, "MOST": 5}))
    assert all(stores > 0 for (stores,) in compiled(COMPILE, jobs, tmp_path))
