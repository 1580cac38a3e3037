"""What a report over runs calls K that was chosen per step, and the warnings it repeats."""

from __future__ import annotations

from pathlib import Path

import pytest
from checked_pages import check_page
from studied_runs import configure, copied, edit, summary_of

from hydraspec.gate import main as gate
from hydraspec.report import main
from hydraspec.study.answers import COLUMNS, job_table, question
from hydraspec.study.contents import study
from hydraspec.study.groups import read


def test_the_question_of_a_run_that_chose_k(studied: Path) -> None:
    """Catches its maximum taken for what it drafted."""
    used = {"mean": 2.0, "histogram": [0, 10, 0, 10]}
    edit(studied / "1", num_speculative_tokens_used=used)
    asked = study(read([studied / "1"])).question
    assert asked == "Is gemma4_mtp with K=auto (0 to 3) worth it for tiny_fake on workload jsonl?"
    fixed = edit(copied(studied / "1", "fixed"), num_speculative_tokens_used=None)
    configure(studied / "1", method__num_speculative_tokens="auto")
    runs = read([studied / "1", fixed])
    assert question(runs).startswith("Which number of draft tokens for tiny_fake")
    column = COLUMNS.index("num_speculative_tokens")
    assert {row[column] for row in job_table(runs).rows} == {"auto", "3"}


def test_each_warning_once_with_its_jobs(studied: Path) -> None:
    """Catches a report of runs with an acceptance of 1.02 that does not say "doctor"."""
    hint = "shows: python -m hydraspec.doctor target=tiny_gemma4 method=eagle3"
    edit(studied / "0", warnings=["the same", hint])
    edit(studied / "1", warnings=["the same"])
    edit(studied / "2", warnings=["everywhere"])
    for job in ("0", "1"):
        edit(studied / job, warnings=[*summary_of(studied / job)["warnings"], "everywhere"])
    made = study(read([studied]))
    (block,) = [b for section in made.sections for b in section.blocks if b.title == "Warnings"]
    first, second = "gemma4_mtp, K=3 (job 1)", "eagle3, K=3 (job 0)"
    assert sorted(block.sentences) == sorted(
        [f"{first}; {second}: the same", f"{second}: {hint}", "All jobs: everywhere"]
    )
    assert main([str(studied)]) == 0
    page = check_page((studied / "study.html").read_text(encoding="utf-8"))
    assert f"{second}: {hint}" in page.text
    for job in ("0", "1", "2"):
        edit(studied / job, warnings=[])
    assert not [
        b for s in study(read([studied])).sections for b in s.blocks if b.title == "Warnings"
    ]


def test_the_gate_takes_a_run_that_chose_k_for_another_job(
    studied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches `auto` taken for its maximum: compared as "other setting", both named K=3."""
    chosen = copied(studied / "1", "chosen")
    edit(chosen, num_speculative_tokens_used={"mean": 2.0, "histogram": [0, 10, 0, 10]})
    configure(chosen, method__num_speculative_tokens="auto", method__max_speculative_tokens=3)
    fixed, stored = str(studied / "1"), str(studied / "gate.json")
    assert gate(["--write", stored, fixed]) == 0
    assert gate([stored, str(chosen)]) == 2
    said = capsys.readouterr().err
    assert "the baseline has no job tiny_fake, gemma4_mtp, K=auto (0 to 3), fake\n" in said
    assert gate(["--write", stored, fixed, str(chosen)]) == 0
    printed = capsys.readouterr().out
    assert "K=auto (0 to 3), fake: 1 run" in printed
    assert "K=3, fake: 1 run" in printed
    assert gate([stored, fixed, str(chosen)]) == 0
    assert gate([stored, str(chosen)]) == 2
    said = capsys.readouterr().err
    assert "the folders have no job tiny_fake, gemma4_mtp, K=3, fake\n" in said
    assert "allowed: the same jobs on both sides: tiny_fake, gemma4_mtp, K=auto (0 to 3)" in said
