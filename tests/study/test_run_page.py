"""report.html: whole, self-contained, and safe from what users write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checked_pages import Checker, check_page
from fake_engine import Behaviour, FakeEngine

from hydraspec.config.schema import GoodputConfig, MethodConfig, RunConfig
from hydraspec.types import PrefixCaching

Use = Callable[[FakeEngine], FakeEngine]
Run = Callable[[], dict[str, Any]]


def report(tmp_path: Path) -> Checker:
    return check_page((tmp_path / "run" / "report.html").read_text(encoding="utf-8"))


def test_the_report_shows_the_verdict_and_escapes_prompts(
    use_engine: Use, run_config: Run, tmp_path: Path
) -> None:
    """Catches a prompt that becomes markup: the workload's prompts hold <b>."""
    use_engine(FakeEngine(warnings=["beware of <i>this</i>"]))
    run_config()
    page = report(tmp_path)
    for text in (
        "Identical",
        "Speedup",
        "1.33",
        "Acceptance length by category",
        "Exact match",
        "rows that verify drafts are not free",
        "beware of <i>this</i>",
        "2 + 3 = <b>?</b>",
        "device is cpu",
    ):
        assert text in page.text


def test_the_report_shows_the_prefix_cache_and_peaks_by_group(
    use_engine: Use, run_config: Run, tmp_path: Path
) -> None:
    """Six prompts of 16 to 21 tokens, of which each takes 8; the baseline has no such cache."""
    caching = PrefixCaching(block_size=4)
    use_engine(FakeEngine(Behaviour(num_cached=8), prefix_caching=caching))
    found = run_config()["prefix_cache"]
    assert (found["hit_tokens"], found["queried_tokens"]) == (48, 111)
    text = report(tmp_path).text
    for part in ("Prefix cache", "43.2 %", "taken from the cache", "<full>", "37.5 %"):
        assert part in text


def test_the_report_shows_latencies_goodput_and_the_load(
    config: RunConfig, use_engine: Use, run_config: Run, tmp_path: Path
) -> None:
    """Of both sides; the header says how requests came."""
    config.workload.request_rate, config.workload.burstiness = 250.0, 0.5
    config.workload.goodput = GoodputConfig(ttft_ms=60000.0)
    use_engine(FakeEngine())
    found = run_config()
    share = found["goodput"]["share"]
    assert share == found["baseline"]["goodput"]["share"] == 1.0
    text = report(tmp_path).text
    rows = [line for line in text.splitlines() if "time to first token" in line]
    assert any(line.count(" / ") == 4 for line in rows), "three percentiles of two sides"
    for part in (
        "arriving at 250 a second (burstiness 0.5), at most 2 at once",
        "goodput: first token within 60000 ms",
        "100.0 %",
        "queue: until it has a slot",
    ):
        assert part in text


def test_reports_of_runs_with_little_to_show(
    config: RunConfig, use_engine: Use, run_config: Run, tmp_path: Path
) -> None:
    use_engine(FakeEngine(Behaviour(error_indices=set(range(6)))))
    run_config()
    assert "failed" in report(tmp_path).text
    config.method = MethodConfig(name="none", num_speculative_tokens=0)
    use_engine(FakeEngine(method="none", num_speculative_tokens=0))
    run_config()
    assert "no speculation" in report(tmp_path).text
    config.method = MethodConfig(name="gemma4_mtp", num_speculative_tokens=3)
    use_engine(FakeEngine(Behaviour(raise_at_step={2: KeyboardInterrupt()})))
    with pytest.raises(KeyboardInterrupt):
        run_config()
    assert "interrupted" in report(tmp_path).text


def test_what_to_do_stands_first_and_missing_intervals_are_said_once(
    use_engine: Use, run_config: Run, tmp_path: Path
) -> None:
    """Three requests in each category: catches "n < 5, no interval" in every cell."""
    use_engine(FakeEngine())
    says = run_config()["assessment"]["says"]
    text = report(tmp_path).text
    assert text.count("fewer than 5 requests") == 1
    assert "n < 5" not in text
    kind = {"worth_it": "good", "slower": "bad", "cannot_tell": ""}[says]
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    first, second, third = ('class="card answer', "To do", '<div class="cards">')
    assert f'{first} {kind}"' in page
    assert page.index(first) < page.index(second) < page.index(third)


def test_a_report_of_a_divergence(use_engine: Use, run_config: Run, tmp_path: Path) -> None:
    use_engine(FakeEngine(Behaviour(wrong_from={2: 1})))
    run_config()
    text = report(tmp_path).text
    assert "Diverged" in text
    assert "task-2, 1" in text


def test_accepted_drafts_are_marked(use_engine: Use, run_config: Run, tmp_path: Path) -> None:
    """The fake drafter has 3, 0 and 2 of its drafts accepted in each of six requests."""
    use_engine(FakeEngine())
    run_config()
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert page.count("class=accepted") == 6 * (3 + 0 + 2)
    assert page.count('<b title="token') == 6 * 9
