"""The ends of outputs by their definition, from the whole text without any end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydraspec.engine.base import Engine
from hydraspec.types import Completion, Request, SamplingParams, StepRecord

LENGTH = 16
PLACES = range(2, 12)  # every place of a window of four, twice


@dataclass(frozen=True)
class Whole:
    """An output without any end, and its text after each number of tokens."""

    tokens: tuple[int, ...]
    texts: tuple[str, ...]

    def ends(self, *, with_least: bool = True) -> Iterator[dict[str, Any]]:
        """Changes of the sampling that end it at each place: by a token, by a string that begins in
        one token and ends in the next, with_least also after a least length, and by length."""
        for place in PLACES:
            border = len(self.texts[place])
            over = self.texts[place + 1][border - 1 : border + 1]
            yield {"stop_token_ids": (self.tokens[place],)}
            yield {"stop": (over,)}
            if with_least:
                yield {"stop": (over,), "min_tokens": place - 1}
            yield {"max_tokens": place}

    def ended(self, sampling: SamplingParams) -> tuple[list[int], str, str]:
        """Tokens, text and reason of the output with this sampling. It ends at its first token that
        is an ending one, or after which the text holds a stop string."""
        tokens, texts = self.tokens, self.texts
        for n in range(sampling.min_tokens + 1, min(sampling.max_tokens, len(tokens)) + 1):
            first = len(texts[sampling.min_tokens])
            places = [
                place
                for stop in sampling.stop
                if (place := texts[n].find(stop, max(0, first - len(stop) + 1))) >= 0
            ]
            if places or tokens[n - 1] in sampling.stop_token_ids:
                text = texts[n][: min(places)] if places else texts[n]
                return list(tokens[:n]), text, "stop"
        return list(tokens[: sampling.max_tokens]), texts[sampling.max_tokens], "length"


def decoded(engine: Engine, asked: Sequence[Request]) -> tuple[list[Completion], int]:
    """Completions, and the tokens that were accepted and then cut off."""
    requests = [replace(request, index=i, id=str(i)) for i, request in enumerate(asked)]
    found, num_cut = dict[int, Completion](), 0
    engine.tokenize(requests)
    for event in engine.run(requests, concurrency=None):
        if isinstance(event, Completion):
            assert event.error is None
            found[event.index] = event
        elif isinstance(event, StepRecord):
            for part in event.requests:
                num_cut += max(0, part.num_accepted + 1 - len(part.output_token_ids))
    return [found[i] for i in range(len(requests))], num_cut


def whole(engine: Engine, request: Request) -> Whole:
    """What the engine says to a request up to LENGTH tokens, whatever they are."""
    asked = [
        with_sampling(request, max_tokens=n, ignore_eos=True, stop=(), stop_token_ids=())
        for n in range(1, LENGTH + 1)
    ]
    ended, _ = decoded(engine, asked)
    assert [len(each.output_token_ids) for each in ended] == list(range(1, LENGTH + 1))
    return Whole(tuple(ended[-1].output_token_ids), ("", *(each.text or "" for each in ended)))


def with_sampling(request: Request, **changes: Any) -> Request:
    return replace(request, sampling=replace(request.sampling, **changes))


def check_ends(engine: Engine, request: Request, said: Whole, **settings: bool) -> int:
    """Every end of `said` comes where the definition says; returns how many accepted tokens were
    cut off."""
    base = {"max_tokens": LENGTH, "ignore_eos": True}
    asked = [with_sampling(request, **base | changes) for changes in said.ends(**settings)]
    ended, num_cut = decoded(engine, asked)
    for completion, each in zip(ended, asked, strict=True):
        tokens, text, reason = said.ended(each.sampling)
        assert completion.output_token_ids == tokens, each.sampling
        assert (completion.text, completion.finish_reason) == (text, reason), each.sampling
    assert len({len(completion.output_token_ids) for completion in ended}) > 4
    return num_cut
