"""The tasks of the corpus: three-step arithmetic with worked steps (every number stays in 0..199),
some fields of a record as JSON, small functions from one sentence, and rewriting.

Rewriting is the least predictable: in a sorted or reversed list every word depends on a search
through the prompt, which a shallow drafter does badly.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from hydraspec.zoo.recipe.words import (
    CITIES,
    COLOURS,
    CONTAINERS,
    FUNCTION_VERBS,
    ITEMS,
    JOBS,
    NAMES,
    NOUNS,
    SURNAMES,
    VARIABLES,
    VERBS,
)

Make = Callable[[random.Random], tuple[str, str]]  # a prompt and its only right response

# ------------------------------------------------------------------ arithmetic


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


# ------------------------------------------------------------------ records

FIELDS = ("name", "city", "age", "job", "id", "color", "item")


def _value(field: str, rng: random.Random) -> str:
    match field:
        case "name":
            return f"{rng.choice(NAMES)} {rng.choice(SURNAMES)}"
        case "city":
            return rng.choice(CITIES)
        case "age":
            return str(rng.randint(18, 89))
        case "job":
            return rng.choice(JOBS)
        case "id":
            return rng.choice("ABCDEFGH") + str(rng.randint(1000, 9999))
        case "color":
            return rng.choice(COLOURS)
        case _:
            return rng.choice(ITEMS)


def _record(rng: random.Random) -> tuple[str, str]:
    """Some fields of a record as JSON; the response lists them in the order asked for."""
    fields = rng.sample(FIELDS, 6)
    record = {field: _value(field, rng) for field in fields}
    wanted = rng.sample(fields, 5)
    line = "; ".join(f"{field}: {value}" for field, value in record.items())
    prompt = f"Write {', '.join(wanted[:-1])} and {wanted[-1]} of this record as JSON.\n{line}"
    return prompt, json.dumps({field: record[field] for field in wanted})


# ------------------------------------------------------------------ code

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


# ------------------------------------------------------------------ rewriting


def _sort_numbers(rng: random.Random) -> tuple[str, str]:
    numbers = rng.sample(range(10, 100), rng.randint(13, 15))
    falling = rng.random() < 0.5
    order = "from large to small" if falling else "from small to large"
    prompt = f"Sort these numbers {order}: {' '.join(map(str, numbers))}"
    return prompt, " ".join(map(str, sorted(numbers, reverse=falling)))


def _sort_words(rng: random.Random) -> tuple[str, str]:
    words = rng.sample(NOUNS, rng.randint(14, 18))
    return f"Sort these words by the alphabet: {' '.join(words)}", " ".join(sorted(words))


def _reverse_words(rng: random.Random) -> tuple[str, str]:
    words = rng.sample(NOUNS, rng.randint(16, 20))
    return f"Write these words in reverse order: {' '.join(words)}", " ".join(reversed(words))


def _past_tense(rng: random.Random) -> tuple[str, str]:
    names, verbs = rng.sample(NAMES, 3), rng.sample(VERBS, 3)
    nouns, colours = rng.sample(NOUNS, 6), rng.sample(COLOURS, 3)
    now, then = [], []
    for i in range(3):
        tail = f"the {colours[i]} {nouns[2 * i]} near the {nouns[2 * i + 1]}"
        now.append(f"{names[i]} {verbs[i][1]} {tail}")
        then.append(f"{names[i]} {verbs[i][2]} {tail}")
    prompt = f"Put this into the past tense: {now[0]}, {now[1]} and {now[2]}."
    return prompt, f"{then[0]}, {then[1]} and {then[2]}."


def _one_of(*kinds: Make) -> Make:
    return lambda rng: rng.choice(kinds)(rng)


TASKS: dict[str, Make] = {
    "math": _one_of(_shopping, _seats, _two_kinds, _wages),
    "extract": _record,
    "code": _one_of(_pipeline, _total, _branch),
    "rewrite": _one_of(_sort_numbers, _sort_words, _reverse_words, _past_tense),
}
