"""Small code: a function or a loop written from a one-sentence specification."""

from __future__ import annotations

import random
from collections.abc import Callable

from hydraspec.zoo.recipe.words import FUNCTION_VERBS, ITEMS, VARIABLES

OPERATIONS = {
    "adds {n}": "+",
    "subtracts {n}": "-",
    "multiplies by {n}": "*",
    "divides by {n}": "//",
}
COMPARISONS = {"above": ">", "below": "<"}


def _pipeline(rng: random.Random) -> tuple[str, str]:
    variable = rng.choice(VARIABLES)
    name = f"{rng.choice(FUNCTION_VERBS)}_{variable}"
    said, lines = [], [f"def {name}({variable}):"]
    for phrase in rng.sample(list(OPERATIONS), 3):
        number = rng.randint(2, 99)
        said.append(phrase.format(n=number))
        lines.append(f"    {variable} = {variable} {OPERATIONS[phrase]} {number}")
    lines.append(f"    return {variable}")
    prompt = f"Write a function {name} that takes {variable}, {said[0]}, {said[1]} and {said[2]}."
    return prompt, "\n".join(lines)


def _total(rng: random.Random) -> tuple[str, str]:
    items, result = rng.choice(ITEMS), rng.choice(VARIABLES)
    item = items[:-1]
    word = rng.choice(list(COMPARISONS))
    limit, phrase = rng.randint(2, 99), rng.choice(list(OPERATIONS)[:3])
    number = rng.randint(2, 9)
    prompt = (
        f"Write a function sum_{items} that goes over {items}, {phrase.format(n=number)} for each "
        f"{item} {word} {limit} and sums them up in {result}."
    )
    lines = [
        f"def sum_{items}({items}):",
        f"    {result} = 0",
        f"    for {item} in {items}:",
        f"        if {item} {COMPARISONS[word]} {limit}:",
        f"            {result} += {item} {OPERATIONS[phrase]} {number}",
        f"    return {result}",
    ]
    return prompt, "\n".join(lines)


def _branch(rng: random.Random) -> tuple[str, str]:
    variable = rng.choice(VARIABLES)
    name = f"{rng.choice(FUNCTION_VERBS)}_{variable}"
    high, low = rng.randint(50, 99), rng.randint(2, 49)
    first, second, third = rng.sample(list(OPERATIONS), 3)
    a, b, c = (rng.randint(2, 99) for _ in range(3))
    prompt = (
        f"Write a function {name} that {first.format(n=a)} if {variable} is above {high}, "
        f"{second.format(n=b)} if it is below {low} and else {third.format(n=c)}."
    )
    lines = [
        f"def {name}({variable}):",
        f"    if {variable} > {high}:",
        f"        return {variable} {OPERATIONS[first]} {a}",
        f"    if {variable} < {low}:",
        f"        return {variable} {OPERATIONS[second]} {b}",
        f"    return {variable} {OPERATIONS[third]} {c}",
    ]
    return prompt, "\n".join(lines)


KINDS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (_pipeline, _total, _branch)


def make(rng: random.Random) -> tuple[str, str]:
    """A (prompt, response) pair."""
    return rng.choice(KINDS)(rng)
