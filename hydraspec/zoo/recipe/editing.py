"""Prompts as agents and editors send them: the same task again and again, each time with a small
change, so that an answer repeats its prompt and the answers before it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from hydraspec.zoo.recipe.corpus import Example, draw, is_held_out

SEED = 21_000
TASKS_PER_CATEGORY = 12
NUM_VERSIONS = 4  # of each task
MOST_TRIES = 200  # of changes to one task, of which some have too few held-out ones
PATH = Path(__file__).parents[1] / "data" / "editing.jsonl"
NUMBER = re.compile(r"\d+")


def _other_number(example: Example, rng: random.Random) -> Example | None:
    """A function with one of its numbers changed; None: the number stands for two things."""
    number = rng.choice(NUMBER.findall(example.prompt))
    other, whole = str(rng.randint(2, 99)), re.compile(rf"\b{number}\b")
    texts = example.prompt, example.response
    if other == number or any(len(whole.findall(text)) != 1 for text in texts):
        return None
    prompt, response = (whole.sub(other, text) for text in texts)
    return Example(example.category, prompt, response)


def _other_fields(example: Example, rng: random.Random) -> Example:
    """The same record in another order of its fields."""
    line = example.prompt.split("\n")[1]
    record: dict[str, str] = json.loads(example.response)
    fields = rng.sample(list(record), len(record))
    wanted = f"{', '.join(fields[:-1])} and {fields[-1]}"
    prompt = f"Write {wanted} of this record as JSON.\n{line}"
    return Example(example.category, prompt, json.dumps({field: record[field] for field in fields}))


CHANGES: dict[str, tuple[str, Callable[[Example, random.Random], Example | None]]] = {
    "edit": ("code", _other_number),
    "agent": ("extract", _other_fields),
}


def versions(category: str, rng: random.Random) -> list[Example]:
    """Held-out versions of one task, each a change of the one before."""
    task, change = CHANGES[category]
    while True:
        found = [draw(task, rng, held_out=True)]
        for _ in range(MOST_TRIES):
            changed = change(found[-1], rng)
            if changed and is_held_out(changed.prompt) and changed not in found:
                found.append(changed)
            if len(found) == NUM_VERSIONS:
                return found


def lines(tasks_per_category: int = TASKS_PER_CATEGORY) -> Iterator[str]:
    """Lines of a workload file: the first version of every task, then the second ones, …; the
    categories in turn."""
    rng = random.Random(SEED)
    tasks = [
        (f"{category}-{number:02d}", category, versions(category, rng))
        for number in range(tasks_per_category)
        for category in CHANGES
    ]
    for version in range(NUM_VERSIONS):
        for name, category, found in tasks:
            example = found[version]
            line = {
                "id": f"{name}/{version + 1}",
                "messages": [{"role": "user", "content": example.prompt}],
                "category": category,
                "answer": example.answer,
            }
            yield json.dumps(line)


def write(path: Path = PATH) -> None:
    """Write the workload file that ships with the package."""
    path.write_text("".join(f"{line}\n" for line in lines()))
