"""Three-step arithmetic word problems with worked steps; every number stays in 0..199."""

from __future__ import annotations

import random
from collections.abc import Callable

from hydraspec.zoo.recipe.words import CONTAINERS, ITEMS, NAMES


def _answer(steps: list[str], result: int) -> str:
    return " ".join([f"{step}." for step in steps] + [f"The answer is {result}"])


def _shopping(rng: random.Random) -> tuple[str, str]:
    name, item, box = rng.choice(NAMES), rng.choice(ITEMS), rng.choice(CONTAINERS)
    start, count, size = rng.randint(10, 60), rng.randint(2, 9), rng.randint(2, 9)
    bought = count * size
    given = rng.randint(2, min(start + bought - 1, 60))
    total, left = start + bought, start + bought - given
    prompt = (
        f"{name} has {start} {item}. {name} buys {count} {box} of {size} {item} and then gives "
        f"away {given} {item}. How many {item} does {name} have now?"
    )
    steps = [
        f"{name} buys {count} * {size} = {bought} {item}",
        f"That makes {start} + {bought} = {total} {item}",
        f"After giving away {given} there are {total} - {given} = {left} {item}",
    ]
    return prompt, _answer(steps, left)


def _seats(rng: random.Random) -> tuple[str, str]:
    item, box = rng.choice(ITEMS), rng.choice(CONTAINERS)
    count, size = rng.randint(3, 9), rng.randint(3, 9)
    full = count * size
    broken = rng.randint(2, full - 2)
    extra = rng.randint(5, 60)
    good = full - broken
    prompt = (
        f"A shop gets {count} {box} with {size} {item} in each. {broken} of the {item} are broken "
        f"and {extra} more {item} arrive later. How many good {item} are there?"
    )
    steps = [
        f"The {box} hold {count} * {size} = {full} {item}",
        f"Without the broken ones there are {full} - {broken} = {good} {item}",
        f"With the late ones there are {good} + {extra} = {good + extra} {item}",
    ]
    return prompt, _answer(steps, good + extra)


def _two_kinds(rng: random.Random) -> tuple[str, str]:
    name = rng.choice(NAMES)
    first, second = rng.sample(ITEMS, 2)
    a, b, c, d = (rng.randint(2, 9) for _ in range(4))
    prompt = (
        f"{name} buys {a} {first} for {b} coins each and {c} {second} for {d} coins each. "
        f"How many coins does {name} pay?"
    )
    steps = [
        f"The {first} cost {a} * {b} = {a * b} coins",
        f"The {second} cost {c} * {d} = {c * d} coins",
        f"Together they cost {a * b} + {c * d} = {a * b + c * d} coins",
    ]
    return prompt, _answer(steps, a * b + c * d)


def _wages(rng: random.Random) -> tuple[str, str]:
    name = rng.choice(NAMES)
    days, wage = rng.randint(3, 9), rng.randint(3, 9)
    earned = days * wage
    spent = rng.randint(2, earned - 1)
    gift = rng.randint(5, 60)
    kept = earned - spent
    prompt = (
        f"{name} works {days} days for {wage} coins a day, spends {spent} coins and finds {gift} "
        f"coins. How many coins does {name} have in the end?"
    )
    steps = [
        f"{name} earns {days} * {wage} = {earned} coins",
        f"After spending {spent} there are {earned} - {spent} = {kept} coins",
        f"With the {gift} found there are {kept} + {gift} = {kept + gift} coins",
    ]
    return prompt, _answer(steps, kept + gift)


KINDS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (
    _shopping,
    _seats,
    _two_kinds,
    _wages,
)


def make(rng: random.Random) -> tuple[str, str]:
    """A (prompt, response) pair."""
    return rng.choice(KINDS)(rng)
