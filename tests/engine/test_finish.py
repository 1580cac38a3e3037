"""Where a request ends, whatever its tokenizer's pieces look like."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hydraspec.engine.finish import FinishCheck, OfferedRequest
from hydraspec.types import Request, SamplingParams

# Pieces of a tokenizer: none, one, several letters; a long one; spaces that are stripped in front.
PIECES = ["", "", "a", "b", "ab", "ba", "abc", " a", " b", " ", "aaaaaaaaaaaa", "\n"]


def decode(ids: Sequence[int]) -> str:
    """As many tokenizers do it: the first space of a text is not shown."""
    return "".join(PIECES[token] for token in ids).removeprefix(" ")


def offered(num_prompt: int, sampling: SamplingParams) -> OfferedRequest:
    request = Request(index=0, id="0", sampling=sampling)
    return OfferedRequest(request=request, token_ids=[3] * num_prompt, num_prompt=num_prompt)


@pytest.mark.parametrize("seed", range(60))
def test_a_stop_string_is_found_where_the_whole_text_first_holds_it(seed: int) -> None:
    """The check reads the end of the text only; by definition it is about all of it."""
    rng = np.random.default_rng(seed)
    weights = np.where(np.arange(len(PIECES)) < 2, rng.integers(1, 30), 1.0)
    tokens = rng.choice(len(PIECES), 200, p=weights / weights.sum()).tolist()
    whole = decode(tokens)
    stops = []
    for _ in range(int(rng.integers(1, 3))):
        start = int(rng.integers(0, max(1, len(whole) - 12)))
        stops.append(whole[start : start + int(rng.integers(4, 12))] or "ab")
    sequence = offered(5, SamplingParams(max_tokens=1000, stop=tuple(stops)))
    check = FinishCheck([], 10_000, decode)
    expected = next(n for n in range(1, 201) if any(stop in decode(tokens[:n]) for stop in stops))
    place = 0
    while sequence.finish_reason is None:
        step = tokens[place : place + int(rng.integers(1, 5))]
        check.append(sequence, step)
        place += len(step)
    assert len(sequence.output_token_ids) == expected
    assert sequence.finish_reason == "stop"
    assert not sequence.ended_by_token
    text = decode(tokens[:expected])
    assert sequence.text == text[: min(text.find(s) for s in stops if s in text)]


@pytest.mark.parametrize("seed", range(40))
def test_nothing_stops_a_request_within_its_least_tokens(seed: int) -> None:
    """A stop string counts if it ends after the text of the first min_tokens tokens, wherever it
    begins; ending tokens count after those. Fails if an early one ends or cuts the text later."""
    rng = np.random.default_rng(seed)
    tokens = rng.choice([2, 3, 4, 5, 6], 60).tolist()
    least, stop = int(rng.integers(1, 30)), decode(tokens[:2] + tokens[40:41])
    first = len(decode(tokens[:least]))

    def found(count: int) -> int:
        return decode(tokens[:count]).find(stop, max(0, first - len(stop) + 1))

    ends = [n for n in range(least + 1, 61) if found(n) >= 0 or tokens[n - 1] == tokens[50]]
    settings = {"stop": (stop,), "stop_token_ids": (tokens[50],), "min_tokens": least}
    sequence = offered(5, SamplingParams(max_tokens=1000, **settings))
    check = FinishCheck([], 10_000, decode)
    place = 0
    while sequence.finish_reason is None:
        step = tokens[place : place + int(rng.integers(1, 5))]
        check.append(sequence, step)
        place += len(step)
    assert len(sequence.output_token_ids) == ends[0] > least
    text = decode(tokens[: ends[0]])
    assert check.text(sequence) == (text[: found(ends[0])] if found(ends[0]) >= 0 else text)


@pytest.mark.parametrize("ends", ["eos", "stop_token_ids"])
def test_a_stop_string_is_cut_where_its_last_token_ends_the_request_too(ends: str) -> None:
    """Catches the stop string left in the text because the token alone was looked at."""
    sampling = SamplingParams(
        max_tokens=9, stop=("ba",), stop_token_ids=(2,) if ends == "stop_token_ids" else ()
    )
    sequence = offered(5, sampling)
    check = FinishCheck([2] if ends == "eos" else [], 10_000, decode)
    assert check.append(sequence, [6, 3, 2, 4]) == [6, 3, 2]
    assert sequence.finish_reason == "stop"
    assert sequence.ended_by_token
    assert check.text(sequence) == "abc"


def test_the_whole_text_is_not_decoded_at_every_token() -> None:
    longest = 0

    def watched(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    check = FinishCheck([], 10_000, watched)
    sequence = offered(5, SamplingParams(max_tokens=1000, stop=("never",)))
    for _ in range(900):
        check.append(sequence, [2])
    assert longest < 40


@pytest.mark.parametrize(
    ("sampling", "tokens", "kept", "reason"),
    [
        (SamplingParams(max_tokens=9), [4, 5, 6], [4, 5, 6], None),
        (SamplingParams(max_tokens=3), [4, 5, 6, 7], [4, 5, 6], "length"),
        (SamplingParams(max_tokens=9), [4, 1, 6], [4, 1], "stop"),
        (SamplingParams(max_tokens=9, ignore_eos=True), [4, 1, 6], [4, 1, 6], None),
        (SamplingParams(max_tokens=9, stop_token_ids=(6,)), [4, 5, 6, 7], [4, 5, 6], "stop"),
        (SamplingParams(max_tokens=2, stop_token_ids=(5,)), [4, 5, 6], [4, 5], "stop"),
        (SamplingParams(max_tokens=9), [4] * 8, [4] * 5, "length"),  # max_model_len
        (SamplingParams(max_tokens=9, min_tokens=2), [1, 1, 1, 4], [1, 1, 1], "stop"),
        (SamplingParams(max_tokens=2, min_tokens=2), [1, 1, 1, 4], [1, 1], "length"),
    ],
)
def test_the_first_end_counts(
    sampling: SamplingParams, tokens: list[int], kept: list[int], reason: str | None
) -> None:
    sequence = offered(5, sampling)
    assert FinishCheck([1], 10, None).append(sequence, tokens) == kept
    assert sequence.finish_reason == reason
    assert sequence.output_token_ids == kept
