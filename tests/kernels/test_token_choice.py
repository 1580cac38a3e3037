"""The best token and drawn tokens: kernels against torch, and against their definition."""

from __future__ import annotations

import pytest
import torch
from hydraspec_kernels.sampling.random_streams import DrawKey, Purpose
from hydraspec_kernels.sampling.token_choice import kernel
from hydraspec_kernels.sampling.token_choice.reference import (
    best_candidates_reference,
    draw_tokens_reference,
    greedy_candidates_reference,
    greedy_tokens_reference,
    sample_with_probs_reference,
)
from kernel_places import DEVICES
from scipy import stats
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]
INF = torch.inf


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 37), (2, 4096), (3, 9001), (1, 270_000)])
def test_best_token(rows: int, vocab: int, dtype: torch.dtype, device: str) -> None:
    """One chunk and many, full and partial, one block each and several; bf16 has many ties."""
    logits = randn(rows, vocab).to(dtype)
    got = kernel.greedy_tokens_kernel(logits.to(device)).cpu()
    assert got.equal(greedy_tokens_reference(logits))


@pytest.mark.parametrize("device", DEVICES)
def test_best_token_of_odd_rows(device: str) -> None:
    """Ties over chunks go to the lowest id; masked, infinite and NaN columns; a strided view."""
    logits = torch.full((7, 10_000), -1.0)
    logits[0] = 2.0
    logits[1, [4097, 8500]] = 3.0
    logits[2] = -INF
    logits[3] = -INF
    logits[3, 9999] = -1e30
    logits[4, 6000] = INF
    logits[5, 77] = torch.nan
    logits[6, -1] = 0.0
    wide = torch.full((7, 10_001), 9.0)
    wide[:, :-1] = logits
    got = kernel.greedy_tokens_kernel(wide.to(device)[:, :-1])
    assert got.tolist() == [0, 4097, 0, 9999, 6000, 77, 9999]
    marked = kernel.greedy_tokens_kernel(wide.to(device)[:, :-1], marks_not_finite=True)
    assert marked.tolist() == [0, 4097, ~0, 9999, ~6000, ~77, 9999]
    assert greedy_tokens_reference(logits, marks_not_finite=True).equal(marked.cpu())


def parts_of(logits: Tensor, ranks: int) -> list[tuple[Tensor, int, int]]:
    """Each rank's columns with its first token and their number; padding is NaN."""
    size = logits.shape[1]
    width = -(-size // ranks)
    padded = torch.nn.functional.pad(logits, (0, width * ranks - size), value=torch.nan)
    firsts = [min(rank * width, size) for rank in range(ranks)]
    columns = padded.split(width, 1)
    return [(c, f, min(width, size - f)) for c, f in zip(columns, firsts, strict=True)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("vocab", [1, 2, 7, 9001])
def test_the_best_token_of_parts(vocab: int, ranks: int, device: str) -> None:
    """Ties, infinities and NaN on any rank, ranks without tokens, chunks without tokens."""
    draw = torch.Generator().manual_seed(vocab + ranks)
    few = torch.tensor([1.0, 2.0, -INF])
    logits = few[torch.randint(3, (6, vocab), generator=draw)]
    logits[1] = randn(vocab)
    logits[2] = -INF
    logits[3, -1] = INF
    logits[4, vocab // 2] = torch.nan
    parts = [
        kernel.greedy_candidates_kernel(columns.to(device), first, count)
        for columns, first, count in parts_of(logits, ranks)
    ]
    for marks in (False, True):
        found = kernel.best_candidates_kernel(torch.stack(parts), marks_not_finite=marks).cpu()
        assert found.equal(greedy_tokens_reference(logits, marks_not_finite=marks))
    told = [greedy_candidates_reference(*part) for part in parts_of(logits, ranks)]
    for marks in (False, True):
        found = best_candidates_reference(torch.stack(told), marks_not_finite=marks)
        assert found.equal(greedy_tokens_reference(logits, marks_not_finite=marks))


def keys(rows: int) -> tuple[Tensor, Tensor]:
    """Seeds and positions of any size and sign."""
    draw = torch.Generator().manual_seed(3)
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=draw)
    return seeds, torch.randint(0, 2**40, (rows,), generator=draw)


def moved(key: DrawKey, device: str) -> DrawKey:
    return DrawKey(*(x.to(device) if isinstance(x, Tensor) else x for x in key))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [5, 2048, 5000])
def test_draws_are_those_of_the_streams(vocab: int, device: str) -> None:
    """The same uniforms to the bit: a race over equal weights has its winner from them alone."""
    seeds, positions = keys(20)
    weights = torch.ones(20, vocab)
    every = torch.arange(20)
    key = DrawKey(seeds, positions, every % 4, every % 9)
    for given in (key, DrawKey(seeds, positions, Purpose.RESIDUAL, 3)):
        got = kernel.draw_tokens_kernel(weights.to(device), moved(given, device))
        assert got.cpu().equal(draw_tokens_reference(weights, given))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_from_weights(dtype: torch.dtype, device: str) -> None:
    """Zero weights are never drawn, wherever the chunk; a row of zeros gives a legal id."""
    seeds, positions = keys(12)
    weights = randn(12, 4500).exp().to(dtype)
    weights[:, 100:4400] = 0
    weights[7] = 0
    weights[8] = torch.nan
    weights[9, :4499] = 0
    key = DrawKey(seeds, positions, Purpose.BONUS, 2)
    wanted = draw_tokens_reference(weights, key)
    got = kernel.draw_tokens_kernel(weights.to(device), moved(key, device))
    assert got.cpu().equal(wanted)
    assert got[9] == 4499


@pytest.mark.parametrize("device", DEVICES)
def test_draws_over_leading_dimensions(device: str) -> None:
    seeds, positions = keys(3)
    weights = randn(3, 4, 50).exp()
    index = torch.arange(4)
    key = DrawKey(seeds[:, None], positions[:, None] + index, Purpose.DRAFT, index)
    got = kernel.draw_tokens_kernel(weights.to(device), moved(key, device))
    assert got.cpu().equal(draw_tokens_reference(weights, key))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [37, 2048, 6500])
def test_sampled_tokens(vocab: int, dtype: torch.dtype, device: str) -> None:
    """Peaks of different chunks are brought to one scale; greedy rows among sampling ones."""
    logits = (randn(16, vocab) * 4).to(dtype)
    temperature = torch.tensor([0.0, 0.7, 1.0, 3.0])[torch.arange(16) % 4]
    seeds, positions = keys(16)
    key = DrawKey(seeds, positions, Purpose.BONUS, 1)
    wanted, _ = sample_with_probs_reference(logits, temperature, key, any_greedy=True)
    given = (logits.to(device), temperature.to(device), moved(key, device))
    got, _ = kernel.sample_with_probs_kernel(*given)
    assert got.cpu().equal(wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1.0, 1e6])
def test_sampling_from_odd_rows(temperature: float, device: str) -> None:
    """Tiny temperatures still choose among ties; masked tokens are never drawn; NaN is legal."""
    logits = torch.full((40, 5000), -INF)
    logits[:, [3, 4100]] = 50.0
    logits[:, 30] = -1e4
    logits[38:] = torch.nan
    logits[36:38] = -INF
    key = moved(DrawKey(torch.arange(40), torch.arange(40), Purpose.DRAFT, 0), device)
    temperatures = torch.full((40,), temperature, device=device)
    got = kernel.sample_with_probs_kernel(logits.to(device), temperatures, key)[0].cpu()
    allowed = {3, 4100} if temperature < 1e6 else {3, 30, 4100}
    assert set(got[:36].tolist()) == allowed
    assert ((got >= 0) & (got < 5000)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [37, 5000])
def test_distributions_of_drafts(vocab: int, device: str) -> None:
    """Chunks of one row share a mass; greedy rows are one-hot at their token."""
    logits = randn(6, vocab) * 4
    logits[:, 5] = -INF
    temperature = torch.tensor([0.0, 0.7, 1.0, 3.0, 1e-6, 0.0])
    seeds, positions = keys(6)
    key = DrawKey(seeds, positions, Purpose.DRAFT, 2)
    tokens, probs = sample_with_probs_reference(logits, temperature, key, any_greedy=True)
    got = kernel.sample_with_probs_kernel(
        logits.to(device), temperature.to(device), moved(key, device)
    )
    assert got[0].cpu().equal(tokens)
    torch.testing.assert_close(got[1].cpu(), probs)
    assert got[1][0].cpu().equal(probs[0])


@pytest.mark.gpu
def test_sampling_follows_the_distribution() -> None:
    """Catches a draw shared between chunks, or weights of chunks at different scales."""
    count, vocab = 4000, 4097
    logits = torch.full((vocab,), -INF)
    logits[[0, 1, 2047, 2048, 4096]] = torch.tensor([0.0, 1.0, 0.5, 2.0, 1.5])
    every = torch.arange(count, device="cuda")
    rows, temperature = logits.cuda().expand(count, -1), torch.ones(count, device="cuda")
    key = DrawKey(every, every, Purpose.BONUS, 0)
    got = kernel.sample_with_probs_kernel(rows, temperature, key)[0].cpu()
    counts = torch.bincount(got, minlength=vocab).double()
    expected = logits.double().softmax(-1) * count
    support = expected > 0
    assert counts[~support].sum() == 0
    p_value = stats.chisquare(counts[support], expected[support], sum_check=False).pvalue
    assert p_value > 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 33, 128])
def test_a_full_vocabulary_on_the_device(rows: int) -> None:
    """bf16 logits over 262144 tokens; the reference runs on the device too."""
    logits = (randn(rows, 262_144) * 3).bfloat16().cuda()
    assert kernel.greedy_tokens_kernel(logits).equal(greedy_tokens_reference(logits))
    seeds, positions = (x.cuda() for x in keys(rows))
    temperature = torch.full((rows,), 0.8, device="cuda")
    arguments = (logits, temperature, DrawKey(seeds, positions, Purpose.BONUS, 2))
    wanted, _ = sample_with_probs_reference(*arguments, any_greedy=False)
    assert kernel.sample_with_probs_kernel(*arguments)[0].equal(wanted)
