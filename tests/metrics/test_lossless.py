"""The lossless verdict in words."""

from __future__ import annotations

from typing import Any

from hydraspec.metrics.lossless import verdict_words

IDENTICAL: dict[str, Any] = {
    "verdict": "identical",
    "reason": None,
    "num_requests_checked": 2,
    "num_requests_sampled": 0,
    "first_divergence": None,
    "first_beyond_margin": None,
    "num_failed_with_method_only": 0,
}


def words(**found: Any) -> str:
    return verdict_words(IDENTICAL | found)  # type: ignore[arg-type]


def test_a_divergence_has_its_place_or_the_number_of_errors() -> None:
    first = {"request": "r1", "position": 7}
    diverged = {"verdict": "diverged", "first_divergence": first, "num_failed_with_method_only": 2}
    assert "request r1 at output token 7" in words(**diverged, first_beyond_margin=first)
    assert "an error in 2 of the requests" in words(**diverged)


def test_sampled_requests_beside_compared_ones_are_counted() -> None:
    """Catches "all outputs equal" of a workload most of which was not compared."""
    found = words(num_requests_sampled=3)
    assert found.startswith("identical: all 2 greedy outputs equal")
    assert "; 3 sampled requests are not checked (" in found
    one = "identical: the one output equals the baseline's, token for token"
    assert words(num_requests_checked=1) == one
    alone = {"verdict": "not_checked", "reason": "sampled", "num_requests_checked": 0}
    assert words(**alone, num_requests_sampled=3) == "not checked (sampled)"
