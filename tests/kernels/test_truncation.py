"""Truncation by kernels cuts what sorting cuts, ties included, and touches no other row."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydraspec_kernels.sampling.records import SamplingTensors
from hydraspec_kernels.sampling.truncation import launches, truncate_, truncate_reference
from kernel_places import DEVICES, PLACES, poison
from torch import Tensor

INF = torch.inf
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
DTYPES = {"top_k": torch.long}
# A set of tokens with this much less or more mass may be a nucleus, see `truncate_`.
MASS_TOLERANCE = 2e-5


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parameters(rows: int, **given: object) -> dict[str, Tensor]:
    """temperature, top_k, top_p and min_p [N]; what is not given is off."""
    made = {}
    for name, value in (OFF | given).items():
        each = torch.as_tensor(value, dtype=DTYPES.get(name, torch.float32))
        made[name] = each.expand(rows).contiguous()
    return made


def truncate_rows(
    rows: Tensor, named: Tensor, num_drafts: Tensor, samples: Tensor, slots: Tensor, given: Any
) -> None:
    """The kernels' truncation of rows on a device; the rest may be elsewhere."""
    batch = {"verify_rows": named, "num_drafts": num_drafts, "samples": samples, "slots": slots}
    moved = ({name: x.to(rows.device) for name, x in of.items()} for of in (batch, given))
    truncate_(rows, *(SimpleNamespace(**tensors) for tensors in moved))  # type: ignore[arg-type]


def by_sorting(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    return truncate_reference(logits, SamplingTensors(**given))


def cut(logits: Tensor, parameters: dict[str, Tensor], device: str = "cpu") -> Tensor:
    """A request each row, whose slots are in the opposite order."""
    count = len(logits)
    slots = torch.arange(count - 1, -1, -1)
    where = (torch.arange(count).view(-1, 1), torch.zeros_like(slots), torch.ones_like(slots) > 0)
    by_slot = {name: values.flip(0) for name, values in parameters.items()}
    rows = logits.to(device).clone()
    truncate_rows(rows, *where, slots, by_slot)
    return rows.cpu()


def mixed(rows: int, vocab: int, seed: int) -> dict[str, Tensor]:
    """All ways of truncating among each other."""
    draw = torch.Generator().manual_seed(seed)

    def any_of(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (rows,), generator=draw)]

    return parameters(
        rows,
        temperature=any_of(0.0, 0.3, 1.0, 1.0, 2.5),
        top_k=any_of(0, 0, 1, 5, 64, vocab, vocab + 9),
        top_p=any_of(1.0, 1.0, 0.0, 1e-6, 0.3, 0.5, 0.95),
        min_p=any_of(0.0, 0.0, 0.1, 1.0),
    )


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        *(place for place in PLACES if place != ("cpu", torch.float16)),
        pytest.param("cpu", torch.float16, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("rows", "vocab"), [(6, 1), (12, 37), (8, 300), (3, 4500)])
def test_mixed_requests(
    rows: int, vocab: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One group and several, one program a row and two; some tokens are suppressed."""
    poison(monkeypatch)
    logits = (randn(rows, vocab, seed=vocab) * 3).to(dtype)
    logits[:, 3:9] = -INF
    given = mixed(rows, vocab, seed=vocab + 1)
    assert cut(logits, given, device).equal(by_sorting(logits, given))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_with_many_ties(device: str) -> None:
    """All ties of the k-th stay; of a nucleus's least, those with the lowest ids."""
    logits = (randn(1, 200) * 2).round().expand(6, -1).contiguous()
    given = parameters(
        6,
        top_k=torch.tensor([3, 20, 0, 0, 40, 7]),
        top_p=torch.tensor([1, 1, 0.2, 0.7, 0.6, 0.5]),
    )
    got = cut(logits, given, device)
    assert got.equal(by_sorting(logits, given))
    count = (got > -INF).sum(-1)
    values = got[0][got[0] > -INF]
    assert count[0] == (logits[0] >= values.min()).sum() > 3
    partial = got[3] > -INF
    least = logits[3] == logits[3][partial].min()
    assert 0 < (least & partial).sum() < least.sum()
    assert (least & partial).nonzero().max() < (least & ~partial).nonzero().min()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [-7.5, 0.0, 30.0])
def test_equal_rows(value: float, device: str) -> None:
    """Every token is a tie of every other: top_k keeps all, top_p the share asked for."""
    given = parameters(
        5, top_k=torch.tensor([3, 0, 0, 3, 0]), top_p=torch.tensor([1, 0.5, 0, 0.25, 1]),
        min_p=torch.tensor([0, 0, 0, 0, 1.0]),
    )  # fmt: skip
    kept = cut(torch.full((5, 256), value), given, device) > -INF
    assert kept.sum(-1).tolist() == [256, 128, 1, 64, 256]
    assert kept[:, :1].all()
    assert kept[1, :128].all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e6, 1e30])
def test_temperatures_that_make_ties(temperature: float, device: str) -> None:
    """Numbers far from the peak, and all at a great temperature, may be scaled to one."""
    logits = torch.full((3, 150), -1e4)
    logits[:, 10:90] = torch.linspace(0, 1e-6, 80)
    logits[:, 140] = 1e4
    given = parameters(3, temperature=temperature, top_k=torch.tensor([9, 3, 0]), top_p=0.9)
    given["top_p"][0] = 1.0
    assert cut(logits, given, device).equal(by_sorting(logits, given))


@pytest.mark.parametrize("device", DEVICES)
def test_signed_zeros_are_ties(device: str) -> None:
    logits = torch.full((2, 70), -1.0)
    logits[:, [3, 66]] = torch.tensor([-0.0, 0.0])
    given = parameters(2, top_k=torch.tensor([1, 0]), top_p=torch.tensor([1.0, 0.001]))
    kept = cut(logits, given, device) > -INF
    assert [row.nonzero().flatten().tolist() for row in kept] == [[3, 66], [3]]


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_allowed_and_nan_leave_something(device: str) -> None:
    logits = torch.full((4, 100), -INF)
    logits[1] = torch.nan
    logits[2, 7] = torch.nan
    logits[3, 9] = INF
    got = cut(logits, parameters(4, top_k=2, top_p=0.5, min_p=0.1), device)
    assert (got[0] == -INF).all()
    assert (got[1:] > -INF).logical_or(got[1:].isnan()).any(-1).all()


@pytest.mark.parametrize("device", DEVICES)
def test_more_tokens_than_are_listed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If too many tokens may be in the nucleus, their groups are searched instead."""
    monkeypatch.setattr(launches, "MAX_LISTED", 16)
    monkeypatch.setattr(launches, "WIDE", 128)
    rows = 8 if device == "cuda" else 4  # the interpreter is slow
    logits = (randn(rows, 700) * 2).half().float()
    logits[:, ::5] = 1.5
    given = mixed(rows, 700, seed=3) | {"temperature": torch.ones(rows)}
    given["top_k"][:4] = torch.tensor([0, 10, 60, 300])
    given["top_p"][:4] = torch.tensor([0.9, 1.0, 0.95, 0.7])
    assert cut(logits, given, device).equal(by_sorting(logits, given))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_no_request_needs_stay(device: str) -> None:
    """After a request's drafts, of requests that do not sample or are greedy or not truncated."""
    wide = torch.full((12, 101), torch.nan)
    wide[:, :100] = randn(12, 100)
    logits = wide[:, :100]
    named = torch.tensor([[2, 1, 5], [7, 6, 8], [0, 3, 4], [9, 9, 9], [10, 10, 10]])
    num_drafts = torch.tensor([1, 2, 2, 0, 0])
    samples = torch.tensor([True, True, False, True, True])
    slots = torch.tensor([4, 0, 1, 2, 3])
    given = parameters(5, top_k=torch.tensor([5, 5, 5, 0, 7]))
    given["temperature"][2] = 0.0
    rows = wide.to(device).clone()
    truncate_rows(rows[:, :100], named, num_drafts, samples, slots, given)
    got, wanted = rows.cpu()[:, :100], logits.clone()
    for row, top_k in {2: 7, 1: 7, 7: 5, 6: 5, 8: 5}.items():
        one = slice(row, row + 1)
        wanted[one] = by_sorting(logits[one], parameters(1, top_k=top_k))
    assert got.equal(wanted)
    assert rows[:, 100].isnan().all()


def zipf(rows: int, vocab: int) -> Tensor:
    return (torch.rand(rows, vocab, device="cuda").argsort(-1) + 1).float().log_().mul_(-1.5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", ["peaked", "flat"])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 262_144), (64, 262_144), (64, 151_936)])
def test_full_vocabularies(rows: int, vocab: int, shape: str, dtype: torch.dtype) -> None:
    """The same tokens as by sorting, but for a boundary within rounding; twice the same."""
    made = zipf(rows, vocab) if shape == "peaked" else 3 * randn(rows, vocab).cuda()
    logits = made.to(dtype).cpu()
    combinations = list(product([0, 1, 64, 20_000], [1.0, 0.3, 0.95], [0.0, 0.02]))
    chosen = [combinations[i % len(combinations)] for i in range(3, rows + 3)]
    top_k, top_p, min_p = (torch.tensor(x) for x in zip(*chosen, strict=True))
    given = parameters(rows, temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
    got = cut(logits, given, "cuda")
    assert cut(logits, given, "cuda").equal(got)
    moved = {name: value.cuda() for name, value in given.items()}
    wanted = by_sorting(logits.cuda(), moved).cpu()
    kept, differ = got > -INF, (got > -INF) != (wanted > -INF)
    assert got[kept].equal(logits[kept])
    assert (kept.sum(-1) > 0).all()
    mass = (logits.float() / 0.8).softmax(-1)
    assert ((mass * differ).sum(-1) < MASS_TOLERANCE).all()
    assert differ[top_p == 1].sum() == 0


@pytest.mark.gpu
def test_a_captured_truncation_reads_its_parameters_anew() -> None:
    """Nothing about requests is frozen in a graph."""
    logits = (randn(4, 9000) * 3).bfloat16().cuda()
    where = [torch.arange(4).view(2, 2), torch.tensor([1, 1]), torch.ones(2) > 0, torch.arange(2)]
    where = [x.cuda() for x in where]
    given = {name: value.cuda() for name, value in parameters(2, top_k=9).items()}
    static, stream = logits.clone(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        truncate_rows(static, *where, given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        truncate_rows(static, *where, given)
    for top_k, top_p in ((0, 0.9), (3, 1.0), (0, 1.0)):
        given["top_k"].fill_(top_k)
        given["top_p"].fill_(top_p)
        static.copy_(logits)
        graph.replay()
        repeated = {name: value.repeat_interleave(2) for name, value in given.items()}
        assert static.equal(by_sorting(logits, repeated))
