"""What a prediction says in sentences and cells."""

from __future__ import annotations

from typing import Any

from hydraspec.analysis.predict.words import (
    best_of_all,
    cells,
    context_map,
    header,
    page_of,
    sentences,
)


def row(k: int, at_once: int, speedup: float, *, measured: float | None = None) -> dict[str, Any]:
    run = None
    if measured is not None:
        run = {"speedup": {"mean": measured, "ci95": None}, "acceptance_length": 2.0}
    return {
        "num_speculative_tokens": k,
        "concurrency": at_once,
        "acceptance_length": 2.0,
        "speedup": speedup,
        "break_even_acceptance_length": 3.5,
        "break_even_acceptance_rate": None if k == 1 else 0.7,
        "step_ms": 4.0,
        "draft_ms": None,
        "verify_ms": None,
        "plain_step_ms": 2.0,
        "measured": run,
        "error": None if measured is None else speedup / measured - 1,
    }


def result(method: str, *rows: dict[str, Any], best: tuple[int, float]) -> dict[str, Any]:
    return {
        "target": "<t>",
        "method": method,
        "device": "cpu",
        "dtype": "float32",
        "num_requests": 32,
        "acceptance": {
            "source": "measured",
            "num_speculative_tokens": 2,
            "conditional_rate_per_position": [0.8, 0.25],
        },
        "predictions": [*rows],
        "best": [{"concurrency": 4, "num_speculative_tokens": best[0], "speedup": best[1]}],
        "map": [],
        "auto": [{"concurrency": 4, "context": None, "speedup": 1.6}],
        "warnings": [f"warning {i}" for i in range(8)],
        "mean_absolute_error": None if rows[0]["measured"] is None else 0.123,
    }


LOSING = result("eagle", row(1, 4, 0.9), best=(0, 1.0))
WINNING = result("mtp", row(2, 4, 1.5, measured=1.2), row(1, 4, 1.1), best=(2, 1.5))


def test_a_table_has_columns_of_measurements_where_there_are_some() -> None:
    assert cells(LOSING)(LOSING["predictions"][0]) == [
        *("4", "1", "0.90x", "2.00", "3.50", "never", "4.00", "-", "2.00")
    ]
    assert len(header(LOSING)) == 9
    first, second = map(cells(WINNING), WINNING["predictions"])
    assert first[-3:] == ["1.20x", "-", "+25.0%"]
    assert second[-3:] == ["-", "-", "-"]
    assert len(header(WINNING)) == len(first) == len(second)


def test_sentences_say_what_wins_what_loses_and_what_is_assumed() -> None:
    said = list(sentences(LOSING))
    assert said[0] == "4 at once: no K is faster than no drafts"
    assert said[1:8] == [
        *(f"Warning: warning {i}" for i in range(6)),
        "and 2 more such warnings in predict.json",
    ]
    assert "smaller K is assumed to accept as much" in said[-1]
    assert any("12.3%" in text for text in sentences(WINNING))


def test_the_best_of_several_methods_is_named() -> None:
    assert list(best_of_all([LOSING, WINNING])) == ["<t>, 4 at once: mtp with K=2, 1.50x"]
    assert list(best_of_all([LOSING])) == ["<t>, 4 at once: no drafts"]


def cell(k: int, at_once: int, context: int, speedup: float) -> dict[str, Any]:
    return {
        "num_speculative_tokens": k,
        "concurrency": at_once,
        "context": context,
        "speedup": speedup,
    }


def test_the_map_has_the_best_k_of_each_cell_and_says_where_none_wins() -> None:
    cells = [
        cell(1, 4, 512, 1.2),
        cell(3, 4, 512, 1.4),
        cell(1, 4, 4096, 0.9),
        cell(1, 1, 512, 1.1),
    ]
    auto = [
        {"concurrency": c["concurrency"], "context": c["context"], "speedup": c["speedup"] + 0.05}
        for c in cells
        if c["speedup"] != 1.2
    ]
    mapped = {**WINNING, "map": cells, "auto": [*WINNING["auto"], *auto]}
    (block,) = context_map(mapped)
    assert block.table is not None
    assert block.table.cells == [
        ["context", "1 at once", "4 at once"],
        ["512", "K=1 1.10x, auto 1.15x", "K=3 1.40x, auto 1.45x"],
        ["4,096", "does not fit", "K=1 0.90x, auto 0.95x"],
    ]
    assert block.sentences == ["No K is faster than none at 4 at once with 4,096 tokens each."]
    assert not list(context_map(WINNING))
    page = page_of(mapped)
    assert '<td class="up3">K=3 1.40x, auto 1.45x</td>' in page
    assert '<td class="name">auto</td>' in page


def test_the_page_escapes_names() -> None:
    page = page_of(WINNING)
    assert "&lt;t&gt;" in page
    assert "<t>" not in page
    assert '<tr class="good">' in page
    assert '<div class="card answer good">' in page
    losing = page_of(LOSING)
    assert '<tr class="good">' not in losing
    assert '<tr class="bad">' in losing
    assert "Decode without drafts" in losing
