"""The test of two distributions of sampled outputs: its level, its power, and what it skips."""

from __future__ import annotations

import numpy as np
import pytest

from hydraspec.metrics.distribution import ENDED, Samples, same_distribution

PROBABILITIES = np.array([0.5, 0.3, 0.1, 0.05, 0.03, 0.02])


def drawn(
    rng: np.random.Generator, shift: float = 0.0, *, num_samples: int = 100, repeats: int = 1
) -> Samples:
    """[2, num_samples, 3]: `shift` of the most frequent token's probability is the second's. Each
    token comes `repeats` times in a row of its sample, as dependent as can be."""
    p = PROBABILITIES + shift * np.array([-1, 1, 0, 0, 0, 0])
    tokens = rng.choice(len(p), (2, num_samples, 3), p=p)
    return np.asarray(np.repeat(tokens[:, :, : 3 // repeats], repeats, axis=2), np.int64)


def test_equal_distributions_are_told_apart_as_seldom_as_the_level_says() -> None:
    """Catches the chi-squared distribution as null: where tokens repeat, a p of 0.01 then comes in
    12 of 100 pairs. 30 pairs at 1 %: more than 3 have a probability of 0.0002."""
    rng = np.random.default_rng(5)
    found = [same_distribution(drawn(rng, repeats=3), drawn(rng, repeats=3)).p for _ in range(30)]
    assert sum(p <= 0.01 for p in found) <= 3
    assert 0.3 < float(np.mean(found)) < 0.7


def test_the_stated_shift_is_told_with_the_stated_power() -> None:
    """80 % of 24: fewer than 14 have a probability of 0.004."""
    rng = np.random.default_rng(6)
    stated = same_distribution(drawn(rng), drawn(rng)).detectable
    assert stated is not None
    assert 0.1 < stated < 0.3
    told = [
        same_distribution(drawn(rng, stated), drawn(rng)).says == "different" for _ in range(24)
    ]
    assert sum(told) >= 14
    less = [
        same_distribution(drawn(rng, stated / 4), drawn(rng)).says == "different" for _ in range(10)
    ]
    assert sum(less) <= 3


def test_more_samples_tell_smaller_shifts() -> None:
    rng = np.random.default_rng(7)
    few, many = (
        same_distribution(drawn(rng, num_samples=n), drawn(rng, num_samples=n)).detectable
        for n in (100, 400)
    )
    assert few is not None
    assert many == pytest.approx(few / 2, rel=0.2)


def test_outputs_that_do_not_vary_tell_nothing() -> None:
    same = np.full((2, 60, 3), 4)
    found = same_distribution(same, same)
    assert (found.p, found.detectable, found.says) == (1.0, None, "cannot_tell")


def test_an_output_that_ends_is_another_token() -> None:
    same = np.full((1, 60, 3), 4)
    ended = same.copy()
    ended[:, :30, 2] = ENDED
    found = same_distribution(ended, same)
    assert found.says == "different"
    assert found.degrees_of_freedom == 1


def test_rare_tokens_share_a_cell() -> None:
    tokens = np.arange(120).reshape(1, 60, 2) % 60
    found = same_distribution(tokens, tokens + 1000)
    assert found.degrees_of_freedom == 0
