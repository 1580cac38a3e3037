"""The lossless verdict on outputs that are equal, tied, wrong, or not comparable."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import records
from fake_engine import Behaviour, FakeEngine, make_info

from hydraspec.lab.run_warnings import verdict_warnings
from hydraspec.lab.verdict import judge
from hydraspec.metrics.lossless import rounds_inputs, verdict_words
from hydraspec.models.checkpoint.quantization import Scheme
from hydraspec.types import Completion, Request

EPS = float(np.finfo(np.float32).eps)
ALLOWED = 8 * EPS * 10  # the fake target's largest logit is 10


def request(index: int, temperature: float = 0.0) -> Request:
    return records.request(index, id=f"r{index}", temperature=temperature)


def completion(index: int, *tokens: int, finish_reason: str = "length") -> Completion:
    known = {"prompt_token_ids": [1, 2], "output_token_ids": list(tokens)}
    return records.completion(index, **known, finish_reason=finish_reason)


def both(*outputs: tuple[int, ...]) -> dict[int, Completion]:
    return {i: completion(i, *tokens) for i, tokens in enumerate(outputs)}


def test_identical() -> None:
    outputs = both((1, 2), (3, 4))
    result = judge([request(0), request(1)], outputs, outputs, FakeEngine(), synthetic=False)
    assert (result["verdict"], result["num_requests_checked"]) == ("identical", 2)
    assert result["first_divergence"] is None


@pytest.mark.parametrize(
    ("margin", "verdict"), [(0.9 * ALLOWED, "numerical"), (1.1 * ALLOWED, "diverged")]
)
def test_the_margin_decides(margin: float, verdict: str) -> None:
    engine = FakeEngine(Behaviour(margin=margin))
    ours, theirs = both((1, 2), (3, 4, 5)), both((1, 2), (3, 9, 9))
    result = judge([request(0), request(1)], ours, theirs, engine, synthetic=False)
    first = result["first_divergence"]
    assert result["verdict"] == verdict
    assert first is not None
    assert (first["request"], first["index"], first["position"]) == ("r1", 1, 1)
    assert (first["method_token"], first["baseline_token"]) == (4, 9)
    assert first["target_margin"] == pytest.approx(margin, rel=1e-3)
    assert first["allowed_margin"] == pytest.approx(ALLOWED)


FP8 = {"q_proj": "fp8 per channel, inputs per token"}


@pytest.mark.parametrize(
    ("quantization", "dtype", "allowed"),
    [
        pytest.param(FP8, "float32", 10 / 8, id="float32 moves inputs across a step of e4m3"),
        pytest.param(FP8, "bfloat16", 10 / 8, id="bfloat16 too"),
        pytest.param(FP8, "float64", 8 * 2.0**-52 * 10, id="float64 moves none"),
        pytest.param({"q_proj": "int4 group 32"}, "float32", ALLOWED, id="inputs not rounded"),
    ],
)
def test_inputs_rounded_to_fp8_allow_more(
    quantization: dict[str, str], dtype: str, allowed: float
) -> None:
    for factor, verdict in ((0.9, "numerical"), (1.1, "diverged")):
        behaviour = Behaviour(margin=factor * allowed)
        engine = FakeEngine(behaviour, dtype=dtype, quantization=quantization)
        result = judge([request(0)], both((1, 2)), both((1, 3)), engine, synthetic=False)
        first = result["first_divergence"]
        assert first is not None
        assert first["allowed_margin"] == pytest.approx(allowed)
        assert result["verdict"] == verdict
    within = judge(
        [request(0)],
        both((1, 2)),
        both((1, 3)),
        FakeEngine(Behaviour(margin=0.0), dtype=dtype, quantization=quantization),
        synthetic=False,
    )
    is_reported = bool(verdict_warnings(within, engine.info))
    assert is_reported == (allowed < 10 / 8), "equality is expected unless inputs are rounded"


@pytest.mark.parametrize("inputs", ["token", "group", "static", "float"])
def test_the_words_of_a_scheme_say_whether_inputs_are_rounded(inputs: Any) -> None:
    scheme = Scheme(kind="fp8", rows=1, columns=None, inputs=inputs, group=128)
    assert rounds_inputs({"q_proj": str(scheme)}, "float32") == (inputs != "float")


def test_margin_is_taken_after_the_common_prefix() -> None:
    """Catches logits of the prompt alone, or of a prefix that is one token off."""
    asked: list[list[int]] = []

    class Listening(FakeEngine):
        def next_token_logits(self, token_ids, spans=(), images=()):  # type: ignore[no-untyped-def]
            asked.append(list(token_ids))
            return super().next_token_logits(token_ids)

    judge([request(0)], both((5, 6, 7)), both((5, 6, 8)), Listening(), synthetic=False)
    assert asked == [[1, 2, 5, 6]]


def test_one_request_beyond_rounding_is_enough() -> None:
    """Catches a verdict from the first divergence alone: that one ties, the next does not."""

    class Mixed(FakeEngine):
        def next_token_logits(self, token_ids, spans=(), images=()):  # type: ignore[no-untyped-def]
            self.behaviour = replace(self.behaviour, margin=0.0 if token_ids[-1] == 1 else 1.0)
            return super().next_token_logits(token_ids)

    ours, theirs = both((1, 5), (3, 5)), both((1, 6), (3, 6))
    result = judge([request(0), request(1)], ours, theirs, Mixed(), synthetic=False)
    assert result["verdict"] == "diverged"
    assert result["first_divergence"] is not None
    assert result["first_divergence"]["index"] == 0
    assert result["first_beyond_margin"] is not None
    assert result["first_beyond_margin"]["index"] == 1


def test_an_output_that_ends_earlier_diverges_where_it_ended() -> None:
    result = judge([request(0)], both((1, 2)), both((1, 2, 3)), FakeEngine(), synthetic=False)
    assert result["verdict"] == "diverged"
    assert result["first_divergence"] is not None
    assert result["first_divergence"]["position"] == 2
    assert result["first_divergence"]["method_token"] is None


def test_not_checked() -> None:
    outputs = both((1,), (2,))
    greedy, stochastic = [request(0)], [request(0, 0.5)]
    engine = FakeEngine()
    failed = {0: completion(0, finish_reason="error")}
    for asked, theirs, synthetic, reason in (
        (greedy, outputs, True, "synthetic verification"),
        (stochastic, outputs, False, "sampled"),
        (greedy, {}, False, "no greedy request was finished"),
        (greedy, failed, False, "the baseline failed 1 greedy request"),
    ):
        result = judge(asked, outputs, theirs, engine, synthetic=synthetic)
        assert result["verdict"] == "not_checked"
        assert (result["reason"] or "").startswith(reason)


class WithoutLogits(FakeEngine):
    """An engine that hands out tokens only, as vLLM does."""

    def next_token_logits(self, token_ids, spans=(), images=()):  # type: ignore[no-untyped-def]
        return None


@pytest.mark.parametrize(
    ("dtype", "verdict"),
    [
        *(("bfloat16", "not_checked"), ("float16", "not_checked")),
        *(("float32", "diverged"), ("float64", "diverged")),
    ],
)
def test_without_margins_low_precision_cannot_be_judged(dtype: str, verdict: str) -> None:
    """Catches a tie in bfloat16 that ends the run with 4, and an error in float32 that does not."""
    engine = WithoutLogits(engine="vllm", dtype=dtype)
    ours, theirs = both((1, 2), (3, 4)), both((1, 2), (3, 9))
    result = judge([request(0), request(1)], ours, theirs, engine, synthetic=False)
    assert (result["verdict"], result["num_requests_diverged"]) == (verdict, 1)
    assert result["first_divergence"] is not None
    assert (
        result["first_divergence"]["position"],
        result["first_divergence"]["target_margin"],
    ) == (1, None)
    assert (result["reason"] is None) == (verdict == "diverged")
    if result["reason"] is not None:
        assert f"engine=vllm gives no logits, so that in {dtype}" in result["reason"]
    same = judge([request(0)], ours, ours, engine, synthetic=False)
    assert (same["verdict"], same["reason"]) == ("identical", None)


FAILED = {"finish_reason": "error"}


def test_a_request_that_only_the_method_failed_diverges() -> None:
    """Catches "identical" over the requests that are left, where the others were lost."""
    requests, theirs = [request(0), request(1)], both((1, 2), (3, 4))
    ours = {0: theirs[0], 1: completion(1, **FAILED)}
    result = judge(requests, ours, theirs, FakeEngine(), synthetic=False)
    assert (result["verdict"], result["num_requests_checked"]) == ("diverged", 1)
    assert (result["num_failed_with_method_only"], result["first_divergence"]) == (1, None)
    assert verdict_warnings(result, make_info()) == [
        "1 request ended with an error in method=gemma4_mtp but not in the baseline"
    ]
    only = judge([request(1)], {1: ours[1]}, {1: theirs[1]}, FakeEngine(), synthetic=False)
    assert (only["verdict"], only["num_requests_checked"]) == ("diverged", 0)


def test_a_request_that_only_the_baseline_failed_is_not_identical() -> None:
    requests, ours = [request(0), request(1), request(2)], both((1, 2), (3, 4), (5,))
    theirs = {0: ours[0], 1: completion(1, **FAILED), 2: completion(2, **FAILED)}
    result = judge(requests, ours, theirs, FakeEngine(), synthetic=False)
    assert (result["verdict"], result["num_failed_with_baseline_only"]) == ("not_checked", 2)
    assert verdict_warnings(result, make_info()) == [
        "2 requests ended with an error in the baseline but not in method=gemma4_mtp"
    ]
    wrong = judge(requests, both((1, 9), (3, 4), (5,)), theirs, FakeEngine(), synthetic=False)
    assert wrong["verdict"] == "diverged"


def test_requests_that_fail_on_both_sides_or_sample_decide_nothing() -> None:
    ours = {0: completion(0, 1), 1: completion(1, **FAILED), 2: completion(2, **FAILED)}
    theirs = {0: completion(0, 1), 1: completion(1, **FAILED), 2: completion(2, 7)}
    requests = [request(0), request(1), request(2, 0.5)]
    result = judge(requests, ours, theirs, FakeEngine(), synthetic=False)
    assert (result["verdict"], result["num_failed_with_method_only"]) == ("identical", 1)
    assert len(verdict_warnings(result, make_info())) == 1
    synthetic = judge(requests, ours, theirs, FakeEngine(), synthetic=True)
    assert (synthetic["verdict"], synthetic["num_failed_with_method_only"]) == ("not_checked", 1)


@pytest.mark.parametrize("exact", [True, False])
def test_a_tie_where_equality_is_expected_is_pointed_out(exact: bool) -> None:
    engine = FakeEngine(Behaviour(margin=0.0), greedy_is_exact=exact)
    result = judge([request(0)], both((1, 2)), both((1, 3)), engine, synthetic=False)
    assert result["verdict"] == "numerical"
    found = verdict_warnings(result, engine.info)
    assert [("float32" in text, "identical" in text) for text in found] == [(True, True)] * exact


class Broken(FakeEngine):
    """A target whose logits overflowed; argmax of them is token 0, with drafts and without."""

    def next_token_logits(self, token_ids, spans=(), images=()):  # type: ignore[no-untyped-def]
        return super().next_token_logits(token_ids) * np.nan


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_equal_outputs_of_logits_that_are_not_finite_are_no_proof(value: float) -> None:
    asked: list[list[int]] = []

    class Overflowing(FakeEngine):
        def next_token_logits(self, token_ids, spans=(), images=()):  # type: ignore[no-untyped-def]
            asked.append(list(token_ids))
            return super().next_token_logits(token_ids) + value

    outputs = both((0, 0, 0), (0, 0))
    result = judge([request(0), request(1)], outputs, outputs, Overflowing(), synthetic=False)
    assert (result["verdict"], result["not_finite_in"]) == ("not_checked", "r0")
    assert asked == [[1, 2, 0, 0]]  # the last token's
    assert result["reason"] == "the target's logits are NaN or infinite"
    (remark,) = verdict_warnings(result, make_info())
    assert "'r0' are NaN or infinite" in remark


def test_other_outputs_of_logits_that_are_not_finite_are_beyond_rounding() -> None:
    result = judge([request(0)], both((1, 2)), both((1, 3)), Broken(), synthetic=False)
    assert (result["verdict"], result["not_finite_in"]) == ("diverged", "r0")
    assert len(verdict_warnings(result, make_info())) == 1


def test_sampled_outputs_of_such_logits_are_remarked_upon() -> None:
    outputs = both((0, 0))
    result = judge([request(0, 0.5)], outputs, outputs, Broken(), synthetic=False)
    assert (result["verdict"], result["not_finite_in"]) == ("not_checked", "r0")


def test_suppressed_tokens_do_not_widen_the_margin() -> None:
    """Catches minus infinity as the largest logit: rounding would then allow anything."""

    class Suppressing(FakeEngine):
        def next_token_logits(self, token_ids, spans=(), images=()):  # type: ignore[no-untyped-def]
            logits = super().next_token_logits(token_ids)
            logits[np.argmin(logits)] = -np.inf
            return logits

    engine = Suppressing(Behaviour(margin=1.1 * ALLOWED))
    result = judge([request(0)], both((1, 2)), both((1, 3)), engine, synthetic=False)
    assert result["verdict"] == "diverged"
    assert result["first_divergence"] is not None
    assert result["first_divergence"]["allowed_margin"] == pytest.approx(ALLOWED)
    same = judge([request(0)], both((1, 2)), both((1, 2)), engine, synthetic=False)
    assert (same["verdict"], same["not_finite_in"]) == ("identical", None)


def test_only_greedy_requests_of_a_mixed_workload_are_compared() -> None:
    ours, theirs = both((1,), (2,)), both((1,), (3,))
    result = judge([request(0), request(1, 0.5)], ours, theirs, FakeEngine(), synthetic=False)
    assert (result["verdict"], result["num_requests_checked"]) == ("identical", 1)
    assert result["num_requests_sampled"] == 1


def turns_of(*prompts: int) -> dict[int, Completion]:
    """Three turns; the prompts of later ones begin with these tokens."""
    return {
        i: replace(completion(i, 1, 2), prompt_token_ids=[prompt, 5])
        for i, prompt in enumerate(prompts)
    }


def test_turns_after_answers_that_differ_are_counted_and_not_compared() -> None:
    """The second turn's answers part at a tie, so that the third turn has another prompt."""
    requests = [replace(request(i), after=i - 1 if i else None) for i in range(3)]
    ours, theirs = turns_of(3, 3, 3), turns_of(3, 3, 4)
    theirs[1] = replace(theirs[1], output_token_ids=[1, 9])
    theirs[2] = replace(theirs[2], output_token_ids=[8, 8])
    engine = FakeEngine(Behaviour(margin=0.5 * ALLOWED))
    result = judge(requests, ours, theirs, engine, synthetic=False)
    assert result["verdict"] == "numerical"
    assert (result["num_requests_checked"], result["num_requests_diverged"]) == (2, 1)
    assert result["num_turns_not_checked"] == 1
    assert "; 1 later turn is not checked (an answer before differs" in verdict_words(result)


def test_a_turn_that_fails_after_another_answer_is_no_divergence() -> None:
    requests = [replace(request(i), after=i - 1 if i else None) for i in range(3)]
    ours, theirs = turns_of(3, 3, 3), turns_of(3, 3, 4)
    theirs[1] = replace(theirs[1], output_token_ids=[1, 9])
    ours[2] = replace(ours[2], finish_reason="error", error="too long")
    engine = FakeEngine(Behaviour(margin=0.5 * ALLOWED))
    result = judge(requests, ours, theirs, engine, synthetic=False)
    assert (result["verdict"], result["num_failed_with_method_only"]) == ("numerical", 0)
