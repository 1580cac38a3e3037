"""The random streams: pure functions of their key, uniform, and independent between keys."""

from __future__ import annotations

import pytest
import torch
from hydraspec_kernels.sampling.random_streams import (
    MAX_INDEX,
    Purpose,
    exponential_race,
    stream_key,
    uniform,
)
from hydraspec_kernels.sampling.random_streams.reference import unit_interval
from scipy import stats
from torch import Tensor

ALPHA = 1e-5
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mixed(word: int) -> int:
    """SplitMix64's finaliser in Python's unbounded integers."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def reference_key(seed: int, position: int, purpose: int, index: int) -> int:
    counter = (position << 16) + (index << 2) + purpose
    return mixed((counter * GOLDEN + mixed((seed + GOLDEN) & MASK)) & MASK)


def as_signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


KEYS = [
    (0, 0, Purpose.DRAFT, 0),
    (1, 17, Purpose.ACCEPT, 3),
    (-1, 131071, Purpose.RESIDUAL, 15),
    (2**63 - 1, 2**40, Purpose.BONUS, MAX_INDEX),
    (-(2**63), 1, Purpose.BONUS, 1),
]
GOLDEN_KEYS = [
    5197578548964807871,
    2677498578790633297,
    -997834865888976479,
    -4682013640890670751,
    5806873274685851664,
]


@pytest.mark.parametrize("number", range(len(KEYS)))
def test_keys_are_exact_integer_arithmetic(number: int) -> None:
    """Catches arithmetic shifts, overflow that saturates, and any change of the streams."""
    seed, position, purpose, index = KEYS[number]
    key = stream_key(torch.tensor(seed), torch.tensor(position), purpose, index)
    assert key == as_signed(reference_key(seed, position, purpose, index))
    assert key == GOLDEN_KEYS[number]


def test_race_is_exact_up_to_its_logarithm() -> None:
    race = exponential_race(
        torch.tensor([5]), torch.tensor([9]), Purpose.RESIDUAL, 2, torch.arange(4)
    )
    key = reference_key(5, 9, Purpose.RESIDUAL, 2)
    words = [mixed((key + token * GOLDEN) & MASK) for token in range(4)]
    # The sign bit is flipped when signed words become offsets from the middle of (0, 1).
    units = [(((word ^ (1 << 63)) >> 12) + 0.5) * 2.0**-52 for word in words]
    torch.testing.assert_close(race[0], -torch.tensor(units, dtype=torch.float64).log())


def test_interval_is_open() -> None:
    """0 would make log infinite and accept impossible drafts; 1 would give a race time of 0."""
    ends = unit_interval(torch.tensor([-(2**63), 2**63 - 1]))
    assert ends[0] == 2.0**-53
    assert ends[1] == 1 - 2.0**-53


def test_draws_do_not_depend_on_the_batch() -> None:
    seed, position = torch.arange(50) * 77, torch.arange(50) + 3
    purpose = torch.arange(50) % 4
    together = exponential_race(seed, position, purpose, torch.arange(50) % 5, torch.arange(11))
    for row in (0, 13, 49):
        alone = exponential_race(
            seed[row], position[row], Purpose(row % 4), row % 5, torch.arange(11)
        )
        assert torch.equal(alone, together[row])


def p_value_uniform(draws: Tensor, bins: int) -> float:
    counts = torch.bincount((draws.flatten() * bins).long(), minlength=bins).double()
    expected = draws.numel() / bins
    return float(stats.chi2.sf(float(((counts - expected) ** 2 / expected).sum()), bins - 1))


def p_value_independent(first: Tensor, second: Tensor, bins: int = 16) -> float:
    cell = (first.flatten() * bins).long() * bins + (second.flatten() * bins).long()
    return p_value_uniform((cell.double() + 0.5) / bins**2, bins**2)


def grid(seeds: Tensor, positions: Tensor, purpose: Purpose, index: int) -> Tensor:
    return uniform(seeds[:, None], positions, purpose, index)


SEEDS, POSITIONS = torch.arange(400), torch.arange(500)


@pytest.mark.parametrize("purpose", list(Purpose))
def test_draws_are_uniform(purpose: Purpose) -> None:
    assert p_value_uniform(grid(SEEDS, POSITIONS, purpose, 1), 1000) > ALPHA


NEIGHBOURS = {
    "purpose": (SEEDS, POSITIONS, Purpose.RESIDUAL, 0),
    "position": (SEEDS, POSITIONS + 1, Purpose.DRAFT, 0),
    "index": (SEEDS, POSITIONS, Purpose.DRAFT, 1),
    "index_and_position": (SEEDS, POSITIONS + 1, Purpose.DRAFT, 1),
    "seed": (SEEDS + 1, POSITIONS, Purpose.DRAFT, 0),
    "high_bit_of_seed": (SEEDS + (1 << 62), POSITIONS, Purpose.DRAFT, 0),
    "seed_against_position": (SEEDS + 1, POSITIONS - 1, Purpose.DRAFT, 0),
}


@pytest.mark.parametrize("changed", NEIGHBOURS)
def test_neighbouring_streams_are_independent(changed: str) -> None:
    """Catches a part of the key that is dropped (identical draws) or folded in too weakly."""
    here = grid(SEEDS, POSITIONS, Purpose.DRAFT, 0)
    there = grid(*NEIGHBOURS[changed])
    assert p_value_independent(here, there) > ALPHA


def test_race_is_independent_between_tokens_and_exponential() -> None:
    race = exponential_race(torch.arange(3000), torch.tensor(4), Purpose.DRAFT, 0, torch.arange(64))
    units = (-race).exp()
    assert p_value_uniform(units, 1000) > ALPHA
    assert p_value_independent(units[:, :-1], units[:, 1:]) > ALPHA
    assert p_value_independent(units[:-1], units[1:]) > ALPHA


def test_a_race_has_no_ties() -> None:
    """Catches uniforms of few bits: ties favour low ids, and what is rarer than a step is lost."""
    race = exponential_race(
        torch.tensor(1), torch.tensor(2), Purpose.BONUS, 0, torch.arange(1 << 20)
    )
    assert race.unique().numel() == race.numel()


def test_every_key_bit_moves_every_output_bit() -> None:
    """Avalanche: flipping one bit of seed, position or index flips each key bit half the time."""
    generator = torch.Generator().manual_seed(0)
    seed = torch.randint(-(2**62), 2**62, (4000,), generator=generator)
    position = torch.randint(0, 2**20, (4000,), generator=generator)
    key = stream_key(seed, position, Purpose.ACCEPT, 0)
    flipped = [stream_key(seed ^ (1 << bit), position, Purpose.ACCEPT, 0) for bit in range(63)]
    flipped += [stream_key(seed, position ^ (1 << bit), Purpose.ACCEPT, 0) for bit in range(20)]
    flipped += [stream_key(seed, position, Purpose.ACCEPT, 1 << bit) for bit in range(4)]
    changes = (torch.stack(flipped) ^ key)[..., None] >> torch.arange(64) & 1
    rate = changes.double().mean(1)
    assert (rate - 0.5).abs().max() < 6 * 0.5 / 4000**0.5  # six standard errors over 5568 rates


@pytest.mark.gpu
def test_cuda_draws_the_same_numbers() -> None:
    seed, position = torch.arange(-500, 500), torch.arange(1000)
    for purpose in Purpose:
        here = uniform(seed, position, purpose, position % 9)
        there = uniform(seed.cuda(), position.cuda(), purpose, position.cuda() % 9)
        assert torch.equal(here, there.cpu())
