"""The chart of speedups and the colours of jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
from studied_runs import copied, edit, slow_down

from hydraspec.study.blocks import Block
from hydraspec.study.charts import Chart
from hydraspec.study.contents import study
from hydraspec.study.groups import read
from hydraspec.study.html import study_page


def block(folder: Path, title: str) -> Block:
    blocks = [each for section in study(read([folder])).sections for each in section.blocks]
    return next(each for each in blocks if each.title == title)


def speedup_chart(folder: Path) -> Chart:
    chart = block(folder, "Speedup over decoding without drafts").chart
    assert chart
    return chart


def points(chart: Chart) -> list[tuple[str, float, float]]:
    """Colour and place of each point, left to right."""
    found = [m.attributes for m in chart.marks if m.tag == "circle"]
    made = [(str(a["fill"]), float(str(a["cx"])), float(str(a["cy"]))) for a in found]
    return sorted(made, key=lambda point: point[1])


def test_a_line_over_k_for_each_drafter_with_intervals(studied: Path) -> None:
    """Two drafters, one of them at two Ks and at one chosen per step, which stands at its mean."""
    for k in ("5", "auto"):
        job = copied(studied / "1", k, method__num_speculative_tokens=k)
        edit(job, num_speculative_tokens=5)
    used = {"mean": 4.0, "histogram": [0, 0, 0, 1, 0, 1]}
    edit(studied / "auto", num_speculative_tokens_used=used)
    chart = speedup_chart(studied)
    (eagle, left, _), (mtp, three, _), (_, middle, _), (_, five, _) = points(chart)
    assert eagle != mtp
    assert left < three, "drawn apart"
    assert middle == pytest.approx((three + five) / 2, abs=0.2)
    assert dict(chart.legend) == {"eagle3": eagle, "gemma4_mtp": mtp}
    lines = [m for m in chart.marks if m.tag == "path" and "stroke-width" not in m.attributes]
    whiskers = [m for m in chart.marks if "stroke-width" in m.attributes]
    assert (len(lines), len(whiskers)) == (1, 4)
    assert [m.text for m in chart.marks if m.text in ("3", "5", "auto")] == ["3", "5", "auto"]
    assert "front" in [m.attributes.get("class") for m in chart.marks], "the speed of no drafts"


def test_bars_and_rows_in_the_colours_of_their_jobs(studied: Path) -> None:
    """The winner is green, a tie neutral, a slower job red and plain decoding grey; bars, as K does
    not vary."""
    tied = copied(studied / "1", "3", method__draft_sampling="probabilistic")
    for job, factor in ((studied / "1", 0.4), (tied, 0.401), (studied / "0", 2.5)):
        slow_down(job, factor)
    table, chart = block(studied, "Jobs").table, speedup_chart(studied)
    assert table
    assert [line.kind for line in table.lines] == ["good", "", "plain", "bad"]
    assert table.lines[2].cells[0] == "none"
    bars = [mark.attributes["fill"] for mark in chart.marks if mark.tag == "rect"]
    colors = ("var(--good)", "var(--method)", "var(--baseline)", "var(--bad)")
    assert bars == [*colors]
    page = study_page(study(read([studied])), studied)
    for kind in ("good", "plain", "bad"):
        assert f'<tr class="{kind}">' in page
    assert '<div class="card answer good">' in page
    assert "none (job 2) against" in page, "the sentences are folded"
