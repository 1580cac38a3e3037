"""Rewriting: sort numbers or words, reverse a list, put a sentence into the past tense.

The least predictable category: in a sorted or reversed list every word depends on a search through
the prompt, which a shallow drafter does badly.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from hydraspec.zoo.recipe.words import COLOURS, NAMES, NOUNS, VERBS


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


KINDS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (
    _sort_numbers,
    _sort_words,
    _reverse_words,
    _past_tense,
)


def make(rng: random.Random) -> tuple[str, str]:
    """A (prompt, response) pair."""
    return rng.choice(KINDS)(rng)
