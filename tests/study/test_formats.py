"""One model in several number formats: agreement of outputs, the answer, and what is pooled."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from checked_pages import check_page
from rich.console import Console
from studied_runs import configure, copied, edit, edit_rows, summary_of

from hydraspec.errors import ConfigurationError
from hydraspec.study import baseline, contents, formats, groups
from hydraspec.study.compare import compared
from hydraspec.study.jobs import baseline_keys, check_alike, pool
from hydraspec.study.runs import read_run
from hydraspec.study.sweep import compare, read

FP8 = {"q_proj": "fp8 per channel, inputs per token", "down_proj": "fp8 per channel"}
FLOAT: dict[str, Any] = {"target": None, "drafter": None}
DRAFTERS = {"0": "eagle3", "1": "gemma4_mtp"}


def in_format(run: Path, target: str, weights: int, time: float = 1.0) -> None:
    """A run as one of another target: its name, format, memory, and all times of both sides."""
    kinds = FP8 if "fp8" in target else None
    configure(run, metrics__compare_formats=True, target__name=target, target__checkpoint=target)
    summary = summary_of(run)
    memory = {"weights": weights, "draft_weights": 1_000_000}
    for side in (summary, summary["baseline"]):
        side["output_tokens_per_second"] /= time
    changes = {"target": target, "target_checkpoint": target, "memory_bytes": memory}
    edit(run, **summary | changes | {"quantization": {"target": kinds, "drafter": None}})
    names = [f"target={target}", f"method={DRAFTERS[run.name[-1]]}", "experiment=formats"]
    (run / "overrides.yaml").write_text("".join(f"- {name}\n" for name in names))


@pytest.fixture
def sweep(studied: Path) -> Path:
    """Two drafters on a target in float and on its twin in FP8, 1.5 times as slow."""
    shutil.rmtree(studied / "2")
    for number in DRAFTERS:
        copied(studied / number, f"1{number}")
        in_format(studied / number, "tiny_x", 4_000_000)
        in_format(studied / f"1{number}", "tiny_x_fp8", 2_000_000, time=1.5)
    return studied


def change_outputs(run: Path, first: dict[str, int]) -> None:
    """Other outputs from the given places, counted from 1."""

    def change(row: dict[str, Any]) -> None:
        if row["id"] in first:
            tokens = row["output_token_ids"]
            place = first[row["id"]] - 1
            row["output_token_ids"] = [*tokens[:place], 99, *tokens[place + 1 :]]

    edit_rows(run, change)


def found(sweep: Path) -> formats.Formats:
    (one,) = formats.found_in(groups.read([sweep]).groups)
    return one


def test_agreement_is_over_outputs_of_both(sweep: Path) -> None:
    """Catches places counted from 0, and a request that one side did not finish."""
    change_outputs(sweep / "10", {"task-0": 1, "task-1": 4})
    failed = {"task-5": "error"}
    edit_rows(sweep / "10", lambda row: row.update(finish_reason=failed.get(row["id"], "stop")))
    both = [pool([read_run(sweep / name)])[0] for name in ("10", "0")]
    agreed = formats.agreement(*both)
    assert agreed is not None
    assert (agreed.num_requests, agreed.first_difference) == (5, 2.5)
    assert agreed.equal == pytest.approx(3 / 5)
    edit(sweep / "10", temperature=0.7)
    sampled = pool([read_run(sweep / "10")])[0]
    assert formats.agreement(sampled, both[1]) is None


def test_a_shorter_output_differs_after_its_end(sweep: Path) -> None:
    edit_rows(sweep / "10", lambda row: row["output_token_ids"].pop())
    jobs = [pool([read_run(sweep / name)])[0] for name in ("10", "0")]
    agreed = formats.agreement(*jobs)
    lengths = [len(row["output_token_ids"]) for row in jobs[1].runs[0].rows]
    assert agreed is not None
    assert agreed.equal == 0
    assert agreed.first_difference == pytest.approx(sum(lengths) / len(lengths))


def test_the_answer_is_the_fastest_of_all_formats(sweep: Path) -> None:
    made = found(sweep)
    assert made.best.title == "tiny_x with gemma4_mtp, K=3"
    assert made.rivals == []
    fp8 = next(one for one in made.jobs if one.title == "tiny_x_fp8 with gemma4_mtp, K=3")
    assert fp8.tokens_per_second == pytest.approx(made.best.tokens_per_second / 1.5)
    said = formats.verdict(made)
    assert said.kind == "good"
    assert said.sentence.startswith("Use tiny_x with gemma4_mtp, K=3: ")
    assert "tiny_x_fp8 (fp8 per channel, inputs per token (q_proj); fp8 per channel" in said.text
    assert "0.67x the speed of tiny_x, 2.00 MB of weights beside 4.00" in said.text
    assert "all 6 outputs equal" in said.text
    assert said.to_do == [
        "python -m hydraspec target=tiny_x method=gemma4_mtp target.dtype=float32"
    ]


def test_a_drafter_without_weights_has_no_format(sweep: Path) -> None:
    summary = summary_of(sweep / "10")
    edit(sweep / "10", memory_bytes=summary["memory_bytes"] | {"draft_weights": 0})
    shown = {one.job.name: one.drafter_format for one in found(sweep).jobs}
    assert shown == {"0": "float32", "1": "float32", "10": None, "11": "float32"}


def test_a_machine_that_changed_more_than_formats_differ(sweep: Path) -> None:
    """The baseline of one target ran four times as fast in one job: 1.5 x 2.5 tells nothing."""
    summary = summary_of(sweep / "0")
    for side in (summary, summary["baseline"]):
        side["output_tokens_per_second"] *= 4
    edit(sweep / "0", **summary)
    made = found(sweep)
    assert made.spread == pytest.approx(4)
    assert [one.target for one in made.rivals] == ["tiny_x_fp8"]
    said = formats.verdict(made)
    assert said.kind == ""
    assert "It cannot be told which format is the fastest" in said.sentence
    assert "differed by a factor of 4.00" in said.text


def test_a_sweep_ends_with_one_answer_and_one_page(sweep: Path) -> None:
    change_outputs(sweep / "10", {"task-0": 2})
    console = Console(record=True, width=300)
    compare(sweep, console=console)
    text = console.export_text()
    assert text.count("Use tiny_x with gemma4_mtp") == 1
    assert text.count("Next: ") == 1
    assert "One model in several number formats" in text
    assert "83.3 %" in text
    page = (sweep / "compare.html").read_text(encoding="utf-8")
    check_page(page)
    assert page.count("Use tiny_x with gemma4_mtp") == 1
    written = json.loads((sweep / "compare.json").read_text(encoding="utf-8"))
    (record,) = written["formats"]
    assert (record["reference"], record["best"], record["as_good"]) == ("1", "1", [])
    by_job = {one["job"]: one for one in record["jobs"]}
    assert by_job["10"]["agreement"]["first_difference"] == 2
    assert by_job["10"]["target_bytes"] == 2_000_000


def test_the_report_has_the_same_answer(sweep: Path) -> None:
    made = contents.study(groups.read([sweep]))
    assert [one.sentence for one in made.verdicts] == [formats.verdict(found(sweep)).sentence]


def test_without_the_key_targets_stay_apart(sweep: Path) -> None:
    for number in DRAFTERS:
        configure(sweep / number, metrics__compare_formats=False)
    assert read(sweep).formats == []


# ------------------------------------------------------------------ what is pooled and compared


def test_the_same_folder_in_two_formats_is_two_targets(studied: Path) -> None:
    """A folder that was quantised between two runs: neither pooled, nor ranked, nor compared."""
    again = copied(studied / "0", "again")
    edit(studied / "0", quantization=FLOAT)
    edit(again, quantization={"target": FP8, "drafter": None})
    runs = [read_run(folder) for folder in (studied / "0", again)]
    assert len(pool(runs)) == 2
    assert len(set(baseline_keys(runs))) == 2
    families = groups.families_of(runs)
    assert len(families) == 2
    assert "format fp8 per channel, inputs per token (q_proj)" in families[1].title
    with pytest.raises(
        ConfigurationError, match="other number format of the target: float and fp8"
    ):
        compared([studied / "0", again])


def test_a_run_that_does_not_say_is_compared(studied: Path) -> None:
    """Summaries of earlier versions lack the key."""
    again = copied(studied / "1", "again")
    edit(again, quantization={"target": FP8, "drafter": None})
    summary = summary_of(studied / "0")
    del summary["quantization"]
    (studied / "0" / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    assert read_run(studied / "0").formats is None
    assert compared([studied / "0", again]).reference is not None


def test_drafters_of_two_formats_are_told_apart(studied: Path) -> None:
    edit(studied / "1", quantization={"target": None, "drafter": FP8})
    console = Console(record=True, width=300)
    compare(studied, console=console)
    text = console.export_text()
    assert "drafter format" in text
    assert "target format" not in text


def test_formats_that_all_jobs_share_are_said_once(studied: Path) -> None:
    one = {"q_proj": "int4 group 16"}
    for number in "012":
        edit(studied / number, quantization={"target": one, "drafter": None}, method="eagle3")
    console = Console(record=True, width=300)
    compare(studied, console=console)
    shared = "number formats: target int4 group 16, drafter float"
    assert f"All jobs have {shared}." in console.export_text()
    assert shared in contents.study(groups.read([studied])).facts


def test_a_stored_baseline_is_of_one_format(studied: Path, tmp_path: Path) -> None:
    """The gate refuses runs of a target that was quantised after its baseline was written."""
    edit(studied / "0", quantization=FLOAT)
    stored = tmp_path / "gate.json"
    baseline.write(stored, baseline.usable([studied / "0"]))
    ((kept, _),) = baseline.read(stored)
    assert str(kept.runs[0].formats) == "target float, drafter float"
    edit(studied / "0", quantization={"target": FP8, "drafter": None})
    check = [kept, *baseline.usable([studied / "0"])]
    with pytest.raises(ConfigurationError, match="other number format of the target"):
        check_alike(check)
