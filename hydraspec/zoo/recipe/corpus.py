"""The synthetic corpus: seeded examples, and the rule that keeps held-out prompts out of training.

Every prompt falls into one of `NUM_BUCKETS` buckets by the hash of its text. Training draws only
prompts outside `HELD_OUT_BUCKET`, the workload only prompts inside it, so the two are disjoint for
every seed.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hydraspec.zoo.recipe.tasks import TASKS

NUM_BUCKETS = 16
HELD_OUT_BUCKET = 0
WORKLOAD_SEED = 20_000
WORKLOAD_PER_CATEGORY = 24
WORKLOAD_MAX_TOKENS = 96
WORKLOAD_PATH = Path(__file__).parents[1] / "data" / "tiny.jsonl"
ANSWER_MARK = "answer is"


@dataclass(frozen=True)
class Example:
    """A prompt with the only response that is right."""

    category: str
    prompt: str
    response: str

    @property
    def answer(self) -> str:
        """The scored part of the response."""
        return extract_answer(self.response)


def extract_answer(text: str) -> str:
    """The scored part of a response: the text after the last "answer is", else the whole text."""
    return text.rsplit(ANSWER_MARK, 1)[-1].strip()


def bucket(prompt: str) -> int:
    """Hash bucket of a prompt, the same on every machine and Python."""
    return hashlib.sha256(prompt.encode()).digest()[0] % NUM_BUCKETS


def is_held_out(prompt: str) -> bool:
    """Returns whether a prompt belongs to the held-out side of the split."""
    return bucket(prompt) == HELD_OUT_BUCKET


def draw(category: str, rng: random.Random, *, held_out: bool) -> Example:
    """Draw examples of a category until one lies on the wanted side of the split; returns that."""
    while True:
        prompt, response = TASKS[category](rng)
        if is_held_out(prompt) is held_out:
            return Example(category, prompt, response)


def training_examples(seed: int) -> Iterator[Example]:
    """Endless training examples, the categories in turn."""
    rng = random.Random(seed)
    while True:
        for category in TASKS:
            yield draw(category, rng, held_out=False)


def workload_examples(per_category: int = WORKLOAD_PER_CATEGORY) -> list[Example]:
    """Held-out prompts, the categories in turn, no prompt twice; the first 96 are `tiny`."""
    rng = random.Random(WORKLOAD_SEED)
    examples: list[Example] = []
    seen: set[str] = set()
    while len(examples) < per_category * len(TASKS):
        category = list(TASKS)[len(examples) % len(TASKS)]
        example = draw(category, rng, held_out=True)
        if example.prompt not in seen:
            seen.add(example.prompt)
            examples.append(example)
    return examples


def workload_lines(per_category: int = WORKLOAD_PER_CATEGORY) -> Iterator[str]:
    """Held-out prompts as lines of a workload file; by default those of `data/tiny.jsonl`."""
    counts = dict.fromkeys(TASKS, 0)
    for example in workload_examples(per_category):
        number = counts[example.category]
        counts[example.category] += 1
        yield json.dumps(
            {
                "id": f"{example.category}-{number:02d}",
                "messages": [{"role": "user", "content": example.prompt}],
                "category": example.category,
                "answer": example.answer,
            }
        )


def write_workload(path: Path = WORKLOAD_PATH) -> None:
    """Write the held-out prompts as a workload file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in workload_lines()))
