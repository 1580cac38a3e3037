"""The lossless verdict on outputs that are equal, tied, wrong, or not comparable."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fake_engine import Behaviour, FakeEngine

from hydraspec.lab.verdict import judge
from hydraspec.types import Completion, Request, SamplingParams

EPS = float(np.finfo(np.float32).eps)
ALLOWED = 8 * EPS * 10  # the fake target's largest logit is 10


def request(index: int, temperature: float = 0.0) -> Request:
    return Request(index=index, id=f"r{index}", sampling=SamplingParams(temperature=temperature))


def completion(index: int, *tokens: int, finish_reason: str = "length") -> Completion:
    return Completion(
        index=index,
        prompt_token_ids=[1, 2],
        output_token_ids=list(tokens),
        text=None,
        finish_reason=finish_reason,
        error=None,
        ttft_ms=1.0,
        latency_ms=1.0,
    )


def both(*outputs: tuple[int, ...]) -> dict[int, Completion]:
    return {i: completion(i, *tokens) for i, tokens in enumerate(outputs)}


def test_identical() -> None:
    outputs = both((1, 2), (3, 4))
    result = judge([request(0), request(1)], outputs, outputs, FakeEngine(), synthetic=False)
    assert (result.verdict, result.num_requests_checked) == ("identical", 2)
    assert result.first_divergence is None


@pytest.mark.parametrize(
    ("margin", "verdict"), [(0.9 * ALLOWED, "numerical"), (1.1 * ALLOWED, "diverged")]
)
def test_the_margin_decides(margin: float, verdict: str) -> None:
    engine = FakeEngine(Behaviour(margin=margin))
    ours, theirs = both((1, 2), (3, 4, 5)), both((1, 2), (3, 9, 9))
    result = judge([request(0), request(1)], ours, theirs, engine, synthetic=False)
    first = result.first_divergence
    assert result.verdict == verdict
    assert first is not None
    assert (first.request, first.index, first.position) == ("r1", 1, 1)
    assert (first.method_token, first.baseline_token) == (4, 9)
    assert first.target_margin == pytest.approx(margin, rel=1e-3)
    assert first.allowed_margin == pytest.approx(ALLOWED)


def test_margin_is_taken_after_the_common_prefix() -> None:
    """Catches logits of the prompt alone, or of a prefix that is one token off."""
    asked: list[list[int]] = []

    class Listening(FakeEngine):
        def next_token_logits(self, token_ids):  # type: ignore[no-untyped-def]
            asked.append(list(token_ids))
            return super().next_token_logits(token_ids)

    judge([request(0)], both((5, 6, 7)), both((5, 6, 8)), Listening(), synthetic=False)
    assert asked == [[1, 2, 5, 6]]


def test_one_request_beyond_rounding_is_enough() -> None:
    """Catches a verdict from the first divergence alone: that one ties, the next does not."""

    class Mixed(FakeEngine):
        def next_token_logits(self, token_ids):  # type: ignore[no-untyped-def]
            self.behaviour = replace(self.behaviour, margin=0.0 if token_ids[-1] == 1 else 1.0)
            return super().next_token_logits(token_ids)

    ours, theirs = both((1, 5), (3, 5)), both((1, 6), (3, 6))
    result = judge([request(0), request(1)], ours, theirs, Mixed(), synthetic=False)
    assert result.verdict == "diverged"
    assert result.first_divergence is not None
    assert result.first_divergence.index == 0
    assert result.first_beyond_margin is not None
    assert result.first_beyond_margin.index == 1


def test_an_output_that_ends_earlier_diverges_where_it_ended() -> None:
    result = judge([request(0)], both((1, 2)), both((1, 2, 3)), FakeEngine(), synthetic=False)
    assert result.verdict == "diverged"
    assert result.first_divergence is not None
    assert result.first_divergence.position == 2
    assert result.first_divergence.method_token is None


def test_not_checked() -> None:
    outputs = both((1,), (2,))
    greedy, stochastic = [request(0)], [request(0, 0.5)]
    engine = FakeEngine()
    assert judge(greedy, outputs, outputs, engine, synthetic=True).verdict == "not_checked"
    assert judge(stochastic, outputs, outputs, engine, synthetic=False).verdict == "not_checked"
    assert judge(greedy, outputs, {}, engine, synthetic=False).verdict == "not_checked"
    failed = {0: completion(0, finish_reason="error")}
    assert judge(greedy, outputs, failed, engine, synthetic=False).verdict == "not_checked"


def test_only_greedy_requests_of_a_mixed_workload_are_compared() -> None:
    ours, theirs = both((1,), (2,)), both((1,), (3,))
    result = judge([request(0), request(1, 0.5)], ours, theirs, FakeEngine(), synthetic=False)
    assert (result.verdict, result.num_requests_checked) == ("identical", 1)
