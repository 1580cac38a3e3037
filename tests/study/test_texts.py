"""Figures and intervals as text."""

from __future__ import annotations

from hydraspec.study.texts import ci_words, interval, interval_note, number, plus_minus


def test_a_missing_figure_is_a_dash_and_a_missing_interval_has_its_reason() -> None:
    assert number(None) == "-"
    assert number(1234.5, 1) == "1,234.5"
    assert interval({"mean": 2.0, "ci95": None}, "x") == "2.00x (n < 5, no interval)"
    assert interval({"mean": 2.5, "ci95": [2.25, 2.75]}) == "2.50 (2.25 to 2.75)"
    assert plus_minus({"mean": 2.5, "ci95": [2.25, 2.75]}) == "2.50 ±0.25"
    assert plus_minus({"mean": 2.5, "ci95": None}) == "2.50 ±-"
    assert plus_minus(None) == "-"


def test_an_interval_without_an_end_is_said_in_words() -> None:
    """Catches digits that stand for nothing: of few blocks a bound may be 1e21."""
    assert ci_words([0.01, 5e21]) == " (0.01 to over 1000)"
    assert interval_note([1132.4, 1340.6], 0) == "95 % interval 1,132 to 1,341; "
    assert ci_words(None) == ""
