"""Temperature and truncation against transformers' warpers and by hand; drawing from weights."""

from __future__ import annotations

import pytest
import torch
from hydraspec_kernels.sampling.random_streams import DrawKey, Purpose, exponential_race
from hydraspec_kernels.sampling.records import SamplingTensors
from hydraspec_kernels.sampling.token_choice import draw_tokens, reference, sample_with_probs
from hydraspec_kernels.sampling.truncation import target_probs
from scipy import stats
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hydraspec.types import SamplingFlags

VOCAB = 37
NO_TRUNCATION = SamplingFlags(any_greedy=False, any_top_k=False, any_top_p=False, any_min_p=False)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def processed(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    flags: SamplingFlags | None = None,
) -> Tensor:
    """`target_probs` with the same parameters in every row."""
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    rows = {name: torch.full(logits.shape[:1], value) for name, value in given.items()}
    return target_probs(logits, SamplingTensors(**rows), *([] if flags is None else [flags]))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 5, 100])
@pytest.mark.parametrize("top_p", [0.05, 0.6, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
def test_matches_transformers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Catches a wrong order, a cut that is off by one, and top_p taken before renormalising."""
    logits = randn(40, VOCAB).double()
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(temperature)]
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    expected = logits
    for warper in warpers:
        expected = warper(torch.empty(40, 0, dtype=torch.long), expected)
    # The parameters are float32, as in the request state: 1e-6 covers their rounding.
    probs = processed(logits, temperature, top_k, top_p, min_p)
    torch.testing.assert_close(probs, expected.softmax(-1), atol=1e-6, rtol=1e-6)


def test_parameters_are_per_row_and_flags_only_save_work() -> None:
    """Catches a parameter that leaks between rows, or a path without a flag that differs."""
    logits = randn(5, VOCAB)
    given = {
        "temperature": torch.tensor([0.0, 0.5, 1.0, 1.0, 2.0]),
        "top_k": torch.tensor([0, 3, 0, 0, 0]),
        "top_p": torch.tensor([0.5, 1.0, 0.4, 1.0, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.3, 0.0]),
    }
    probs = target_probs(logits, SamplingTensors(**given))
    assert probs[0].equal(torch.nn.functional.one_hot(logits[0].argmax(), VOCAB).float())
    assert int((probs[1] > 0).sum()) == 3
    torch.testing.assert_close(probs[4], (logits[4] / 2).softmax(-1))
    for row, flags in enumerate(
        [
            SamplingFlags(any_top_k=False, any_top_p=False, any_min_p=False),
            SamplingFlags(any_greedy=False, any_top_p=False, any_min_p=False),
            SamplingFlags(any_greedy=False, any_top_k=False, any_min_p=False),
            SamplingFlags(any_greedy=False, any_top_k=False, any_top_p=False),
            NO_TRUNCATION,
        ]
    ):
        one = slice(row, row + 1)
        alone = {name: values[one] for name, values in given.items()}
        alone = target_probs(logits[one], SamplingTensors(**alone), flags)
        torch.testing.assert_close(alone[0], probs[row])


def test_ties() -> None:
    """top_k keeps every tie of the k-th; top_p prefers lower ids; argmax takes the lowest."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    assert (processed(logits, top_k=2) > 0).tolist() == [[False, True, True, True, False]]
    assert (processed(logits, top_p=0.5) > 0).tolist() == [[False, True, True, False, False]]
    assert (processed(logits, min_p=1.0) > 0).tolist() == [[False, True, True, True, False]]
    assert processed(logits, temperature=0.0).tolist() == [[0, 1, 0, 0, 0]]


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-6, 1e6])
def test_extreme_temperatures_and_masked_tokens_stay_finite(temperature: float) -> None:
    logits = torch.tensor([[-torch.inf, 1e4, -1e4, 1e4 - 1]])
    probs = processed(logits, temperature, top_k=3, top_p=0.999, min_p=0.001)
    assert probs.isfinite().all()
    assert probs[0, 0] == 0
    torch.testing.assert_close(probs.sum(-1), torch.ones(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_probabilities_are_at_least_float32(dtype: torch.dtype) -> None:
    expected = torch.float64 if dtype is torch.float64 else torch.float32
    assert processed(randn(3, VOCAB).to(dtype)).dtype is expected


def test_sampling_follows_the_weights_and_skips_zeros() -> None:
    """2**17 draws see a total-variation distance of 0.01 with power above 0.99 at level 1e-4."""
    weights = torch.tensor([0.0, 0.5, 3.0, 0.01, 0.0, 1.49])
    count = 1 << 17
    key = DrawKey(torch.arange(count), torch.tensor(3), Purpose.BONUS, 0)
    ids = draw_tokens(weights.expand(count, -1), key)
    counts = torch.bincount(ids, minlength=6).double()
    assert counts[weights == 0].sum() == 0
    support = weights > 0
    expected = weights[support].double() / weights.sum() * count
    assert stats.chisquare(counts[support], expected, sum_check=False).pvalue > 1e-4


def p_value_of_chunks(monkeypatch: pytest.MonkeyPatch, first_chunk: int) -> float:
    """2**17 draws over chunks of four: some of equal, little or no mass, the last one short."""
    monkeypatch.setattr(reference, "CHUNK", 4)
    monkeypatch.setattr(reference, "FIRST_CHUNK", first_chunk)
    weights = torch.tensor([2.0, 1, 1, 1, 0, 0, 0, 0, 0.01, 0, 0, 3, 1, 0.5, 0, 0, 2, 4])
    count = 1 << 17
    key = DrawKey(torch.arange(count), torch.tensor(3), Purpose.BONUS, 0)
    ids = draw_tokens(weights.expand(count, -1), key)
    counts, support = torch.bincount(ids, minlength=18).double(), weights > 0
    assert counts[~support].sum() == 0
    expected = weights[support].double() / weights.sum() * count
    return float(stats.chisquare(counts[support], expected, sum_check=False).pvalue)


def test_a_token_of_a_chunk_follows_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Power as above. A chunk and its tokens have separate draws: shared ones are detected."""
    assert p_value_of_chunks(monkeypatch, reference.FIRST_CHUNK) > 1e-4
    assert p_value_of_chunks(monkeypatch, 0) < 1e-4


def test_a_draw_is_two_races() -> None:
    """What defines it: chunks of 1024 tokens, their numbers in the stream, and tokens by id."""
    weights = randn(5, 3000).exp()
    key = DrawKey(torch.arange(5), torch.tensor(7), Purpose.DRAFT, 2)
    wanted = []
    masses = torch.nn.functional.pad(weights, (0, 72)).view(5, 3, 1024).sum(-1)
    chunks = (masses / exponential_race(*key, (1 << 31) + torch.arange(3))).argmax(-1)
    race = weights / exponential_race(*key, torch.arange(3000))
    for row, chunk in enumerate(chunks.tolist()):
        wanted.append(chunk * 1024 + int(race[row, chunk * 1024 : (chunk + 1) * 1024].argmax()))
    assert draw_tokens(weights, key).tolist() == wanted
    assert len(set(chunks.tolist())) > 1


def test_draft_distribution_is_the_one_sampled_from() -> None:
    """Temperature only, one-hot where greedy; the ids follow the returned probabilities."""
    logits, count = randn(1, 6, seed=3).expand(1 << 16, -1), 1 << 16
    temperature = torch.full((count,), 0.7)
    temperature[::2] = 0.0
    key = DrawKey(torch.arange(count), torch.full((count,), 9), Purpose.DRAFT, 1)
    ids, probs = sample_with_probs(logits, temperature, key)
    assert probs.dtype is torch.float32
    assert (ids[::2] == logits[0].argmax()).all()
    assert probs[0].equal(torch.nn.functional.one_hot(logits[0].argmax(), 6).float())
    torch.testing.assert_close(probs[1], (logits[0] / 0.7).softmax(-1))
    counts = torch.bincount(ids[1::2], minlength=6).double()
    expected = probs[1].double() * (count // 2)
    assert stats.chisquare(counts, expected, sum_check=False).pvalue > 1e-4
