"""The corpus: deterministic, split by hash, and right."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest

from hydraspec.zoo.recipe import batches, corpus, editing, make, tasks, tokenizer

STEP = re.compile(r"(\d+) ([*+-]) (\d+) = (\d+)")


def _take(category: str, count: int, *, seed: int = 7) -> list[corpus.Example]:
    rng = random.Random(seed)
    return [corpus.draw(category, rng, held_out=False) for _ in range(count)]


def test_same_seed_same_examples() -> None:
    first = list(itertools.islice(corpus.training_examples(3), 200))
    assert first == list(itertools.islice(corpus.training_examples(3), 200))
    assert first != list(itertools.islice(corpus.training_examples(4), 200))


def test_shipped_workload_is_what_the_recipe_writes() -> None:
    assert corpus.WORKLOAD_PATH.read_text().splitlines() == list(corpus.workload_lines())


def test_no_held_out_prompt_is_ever_trained_on() -> None:
    """Both sides obey one rule on the prompt's text; a generator that drops it fails here."""
    held_out = {example.prompt for example in corpus.workload_examples()}
    assert len(held_out) == 96
    assert all(corpus.is_held_out(prompt) for prompt in held_out)
    seeds = (
        tokenizer.TOKENIZER_SEED,
        make.TARGET_DATA_SEED * batches.SEED_STRIDE,
        make.ASSISTANT_DATA_SEED * batches.SEED_STRIDE,
    )
    for seed in seeds:
        trained = list(itertools.islice(corpus.training_examples(seed), 4000))
        assert not any(corpus.is_held_out(example.prompt) for example in trained)
        assert held_out.isdisjoint(example.prompt for example in trained)


def test_bucket_is_fixed() -> None:
    """A changed hash would silently move held-out prompts into training."""
    assert [corpus.bucket(text) for text in ("", "a", "sort these")] == [3, 10, 11]


@pytest.mark.parametrize("category", tasks.TASKS)
def test_both_sides_of_the_split_exist(category: str) -> None:
    rng = random.Random(0)
    assert corpus.is_held_out(corpus.draw(category, rng, held_out=True).prompt)


def test_math_steps_and_answer_are_right() -> None:
    for example in _take("math", 500):
        steps = STEP.findall(example.response)
        assert len(steps) == 3
        for left, sign, right, result in steps:
            a, b = int(left), int(right)
            assert {"+": a + b, "-": a - b, "*": a * b}[sign] == int(result)
            assert int(result) >= 0
        assert example.answer == steps[-1][3]


def test_extracted_records_hold_the_prompts_values() -> None:
    for example in _take("extract", 300):
        request, line = example.prompt.split("\n")
        record = dict(part.split(": ") for part in line.split("; "))
        written = json.loads(example.answer)
        wanted = re.findall(r"\w+", request.removeprefix("Write ").split(" of this record")[0])
        assert list(written) == [word for word in wanted if word != "and"]
        assert all(record[key] == value for key, value in written.items())


def test_code_compiles_and_has_the_asked_name() -> None:
    for example in _take("code", 300):
        scope: dict[str, object] = {}
        exec(example.answer, scope)
        name = re.search(r"function (\w+)", example.prompt)
        assert name is not None
        assert callable(scope[name[1]])


def test_code_does_what_the_prompt_says() -> None:
    """One pipeline recomputed by hand from its own words."""
    signs = {"adds": "+", "subtracts": "-", "multiplies by": "*", "divides by": "//"}
    pattern = re.compile(r"(adds|subtracts|multiplies by|divides by) (\d+)")
    for example in _take("code", 300):
        if "that takes" not in example.prompt:
            continue
        scope: dict[str, object] = {}
        exec(example.answer, scope)
        value = 1000
        for phrase, number in pattern.findall(example.prompt):
            value = eval(f"{value} {signs[phrase]} {number}")
        function = next(v for k, v in scope.items() if callable(v) and k != "__builtins__")
        assert function(1000) == value  # type: ignore[operator]


def test_rewrites_are_right() -> None:
    for example in _take("rewrite", 400):
        request, _, content = example.prompt.partition(": ")
        words, answer = content.split(), example.answer.split()
        if request.startswith("Sort these numbers"):
            assert answer == sorted(words, key=int, reverse="large to small" in request)
        elif request.startswith("Sort these words"):
            assert answer == sorted(words)
        elif request.startswith("Write these words"):
            assert answer == words[::-1]


def test_answer_is_scored_after_the_last_mark() -> None:
    assert corpus.extract_answer("The answer is 3. No, the answer is 42 ") == "42"
    assert corpus.extract_answer(" whole text\n") == "whole text"


def test_editing_prompts_are_held_out_and_repeat_what_came_before() -> None:
    """Each version of a task differs from the one before in a number, or in the order of fields."""
    lines = editing.PATH.read_text().splitlines()
    assert lines == list(editing.lines())
    found = [json.loads(line) for line in lines]
    prompts = [line["messages"][0]["content"] for line in found]
    assert len(set(prompts)) == len(prompts) == 96
    assert all(corpus.is_held_out(prompt) for prompt in prompts)
    apart = len(prompts) // editing.NUM_VERSIONS
    for before, after in itertools.pairwise(range(0, len(found), apart)):
        for one, other in zip(found[before:][:apart], found[after:][:apart], strict=True):
            assert one["id"][:-1] == other["id"][:-1]
            if one["category"] == "agent":
                assert json.loads(one["answer"]) == json.loads(other["answer"])
            else:
                texts = one["answer"].split(), other["answer"].split()
                pairs = zip(*texts, strict=True)
                assert sum(a != b for a, b in pairs) == 1
