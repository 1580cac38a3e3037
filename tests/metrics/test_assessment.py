"""The assessment of a run, and its figures by category and by place in the output."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from records import completion, part, request, step

from hydraspec.metrics.assessment import (
    assess,
    by_category,
    by_output_place,
    speedups_by_category,
)
from hydraspec.metrics.counters import place_bin
from hydraspec.metrics.meter import Meter, finished_pairs, speedup
from hydraspec.metrics.summary import Assessment

PER_CATEGORY = 12


def meter(ms_per_token: Mapping[str, float], *, accepted: int = 0) -> Meter:
    """Requests by category, each of some tokens at this pace; a draft of 2 in each step."""
    names = [name for name in ms_per_token for _ in range(PER_CATEGORY)]
    requests = [request(i, category=name) for i, name in enumerate(names)]
    made = Meter(requests, num_speculative_tokens=2)
    for i, name in enumerate(names):
        tokens, wobble = 20 + i % 5, 1 + 0.01 * (i % 7)
        for _ in range(2):
            emitting = part(i, 2, accepted, emitted=tokens)
            made.add_step(step(emitting, ms=tokens * ms_per_token[name] * wobble))
        made.add_completion(completion(i, output_token_ids=[1] * tokens))
    return made


def assessed(
    paces: Mapping[str, float], *, diverged: bool = False, synthetic: bool = False
) -> Assessment:
    pairs = finished_pairs(meter(paces), meter(dict.fromkeys(paces, 1.0)))
    categories = speedups_by_category(pairs, at_once=1)
    return assess(
        speedup(pairs, at_once=1),
        categories,
        num_pairs=len(pairs),
        diverged=diverged,
        synthetic=synthetic,
    )


@pytest.mark.parametrize(
    ("paces", "says", "begins", "ends"),
    [
        ({"a": 0.5, "b": 0.5}, "worth_it", "worth it: 2.00x (2.00 to 2.00)", ""),
        ({"a": 1.9, "b": 1.9}, "slower", "slower: 0.53x (0.53 to 0.53)", ""),
        (
            {"a": 0.2, "c": 0.2, "b": 1.4},
            "worth_it",
            "worth it: 1.6",
            "; slower in b 0.71x (0.71 to 0.71)",
        ),
        ({"a": 0.7, "b": 1.8}, "slower", "slower: 0.8", "; worth it in a 1.43x (1.43 to 1.43)"),
    ],
)
def test_the_sentence_names_the_category_that_differs(
    paces: dict[str, float], says: str, begins: str, ends: str
) -> None:
    found = assessed(paces)
    assert found["says"] == says
    assert found["sentence"].startswith(begins)
    assert found["sentence"].endswith(ends or ")")


def test_what_cannot_be_told() -> None:
    """An interval with 1 in it names what holds in categories; wrong outputs have no speedup."""
    found = assessed({"a": 0.5, "b": 1.5})
    assert found["says"] == "cannot_tell"
    assert "; worth it in a 2.00x (2.00 to 2.00); slower in b 0.67x" in found["sentence"]
    found = assessed({"a": 0.5}, diverged=True)
    assert found["says"] == "cannot_tell"
    assert "not the target's" in found["sentence"]
    none = assess(speedup([], at_once=1), {}, num_pairs=0, diverged=False, synthetic=False)
    assert none["sentence"] == "cannot tell: no request finished on both sides"
    assert "acceptance that was set" in assessed({"a": 0.5}, synthetic=True)["sentence"]


@pytest.mark.parametrize(
    ("count", "finished"), [(1, "one request, but"), (2, "2 requests, but")], ids=["one", "two"]
)
def test_requests_of_one_token_have_no_decode_step(count: int, finished: str) -> None:
    """Catches a sentence that finished requests did not finish: their prompts' step gave all."""
    sides = []
    for _ in range(2):
        requests = [request(i) for i in range(count)]
        side = Meter(requests, num_speculative_tokens=2)
        for i in range(count):
            side.add_step(step(part(i, prefill_rows=5, emitted=1), ms=3.0))
            side.add_completion(completion(i, output_token_ids=[1]))
        sides.append(side)
    pairs = finished_pairs(*sides)
    gained = speedup(pairs, at_once=1)
    found = assess(gained, {}, num_pairs=len(pairs), diverged=False, synthetic=False)
    assert found["says"] == "cannot_tell"
    assert found["sentence"].startswith(f"cannot tell: both sides finished {finished}")
    assert found["sentence"].endswith("no decode step to time")


def test_categories_have_intervals_and_counts() -> None:
    method, baseline = meter({"a": 0.5, "b": 1.0}, accepted=1), meter({"a": 1.0, "b": 1.0})
    speedups = speedups_by_category(finished_pairs(method, baseline), at_once=1)
    figures = by_category(method, speedups)
    assert list(figures) == ["a", "b"]
    assert figures["a"]["num_requests"] == PER_CATEGORY
    assert figures["a"]["acceptance_length"] == {"mean": 2.0, "ci95": (2.0, 2.0)}
    assert figures["a"]["speedup"] is not None
    assert figures["a"]["speedup"]["mean"] == pytest.approx(2.0)
    assert by_category(meter({"a": 0.5}), {})["a"]["speedup"] is None
    assert method.acceptance_lengths() == [2.0] * 2 * PER_CATEGORY
    assert baseline.acceptance_lengths() == [1.0] * 2 * PER_CATEGORY


def test_acceptance_by_place_counts_a_step_where_its_first_token_is() -> None:
    """The second step of each request begins 20 to 24 tokens after the first."""
    places = by_output_place(meter({"a": 1.0}, accepted=2))
    assert [(of["first"], of["last"], of["num_drafts"]) for of in places] == [
        (0, 15, PER_CATEGORY),
        (16, 31, PER_CATEGORY),
    ]
    assert {of["acceptance_length"]["mean"] for of in places} == {3.0}
    assert [place_bin(place) for place in (0, 15, 16, 31, 32, 63, 64)] == [0, 0, 1, 1, 2, 2, 3]
