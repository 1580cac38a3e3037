"""Reports with predictions at another target's step costs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from studied_runs import copied, edit, edit_rows

from hydraspec.analysis.predict.other_target import by_request, predicted, read
from hydraspec.engine.costs import CostTable, over_contexts
from hydraspec.errors import ConfigurationError
from hydraspec.report import main
from hydraspec.study.groups import read as read_runs
from hydraspec.study.pairs import ALL

STEP_MS = {"gemma4_mtp": (10.0, 16.0), "eagle3": (12.0, 20.0)}  # with 0 and 3 drafts


def save_costs(run: Path, method: str, step_ms: Sequence[float], *, first: int = 0) -> Path:
    """A run whose K was chosen per step, of a target with other costs."""
    edit(run, target="large", method=method, num_speculative_tokens="auto")
    table = CostTable(batches=(1, 4), drafts=(first, 3), step_ms=(tuple(step_ms),) * 2)
    (run / "costs.json").write_text(json.dumps(table.as_json()), encoding="utf-8")
    return run


@pytest.fixture
def costs(studied: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "costs"
    folder.mkdir()
    for name, step_ms in STEP_MS.items():
        save_costs(copied(studied / "1", name), name, step_ms).rename(folder / name)
    return folder


def ratios_of(sweep: Path, costs: Path) -> Mapping[str, Mapping[str, float | None]]:
    jobs, found = read_runs([sweep]).jobs, read(costs)
    return {
        job.runs[0].summary["method"]: {scope: ratio.ratio for scope, ratio in ratios.items()}
        for job in jobs
        if (ratios := predicted(job, found)) is not None
    }


def test_speedups_are_tokens_per_step_over_the_ratio_of_costs(studied: Path, costs: Path) -> None:
    """K=0 steps without the drafter's own cache are those without drafts: 10 ms, not 12."""
    found = ratios_of(studied, costs)
    assert set(found) == {"eagle3", "gemma4_mtp"}
    for number, method in (("0", "eagle3"), ("1", "gemma4_mtp")):
        lines = (studied / number / "requests.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        for scope, of in ((ALL, rows), ("math", [r for r in rows if r["category"] == "math"])):
            per_step = sum(r["decode_tokens"] for r in of) / sum(r["decode_steps"] for r in of)
            assert found[method][scope] == pytest.approx(per_step * 10.0 / STEP_MS[method][1])
    assert found["eagle3"][ALL] == pytest.approx(0.5)
    assert found["gemma4_mtp"][ALL] > 1.2


def test_where_drafting_is_timed_each_drafter_is_beside_its_own_steps(costs: Path) -> None:
    """Catches a machine that was slower in one run than in the other, taken for a slow drafter."""
    found = read(costs)
    table = CostTable(batches=(1,), drafts=(0, 3), step_ms=((30.0, 48.0),), draft_ms=((2.0, 9.0),))
    assert found.plain_ms(table, 1, 100) == 28.0
    assert found.plain_ms(found.tables["eagle3"], 1, 100) == 10.0


def test_costs_by_context_count_at_the_requests_own(studied: Path, costs: Path) -> None:
    """Drafts that pay at short contexts and lose at long ones; the runs' requests are short."""
    short = {method: ratios[ALL] for method, ratios in ratios_of(studied, costs).items()}
    for method, step_ms in STEP_MS.items():
        own = CostTable(batches=(1, 4), drafts=(0, 3), step_ms=(step_ms,) * 2)
        dear = CostTable(batches=(1, 4), drafts=(0, 3), step_ms=((50.0, 500.0),) * 2)
        table = over_contexts({10_000: own, 90_000: dear})
        (costs / method / "costs.json").write_text(json.dumps(table.as_json()), encoding="utf-8")
    found = ratios_of(studied, costs)
    assert {method: ratios[ALL] for method, ratios in found.items()} == short
    for rows in studied.glob("*/requests.jsonl"):
        edit_rows(rows.parent, lambda row: row.update(prompt_token_ids=[0] * 95_000))
    for method, ratios in ratios_of(studied, costs).items():
        before, ratio = short[method], ratios[ALL]
        assert before is not None
        plain, drafting = 10.0, STEP_MS[method][1]
        assert ratio == pytest.approx(before * (50.0 / 500.0) / (plain / drafting))


def test_drafts_by_request_are_at_least_as_fast_as_k_for_all(studied: Path, costs: Path) -> None:
    """Half of the requests accept nothing: they get no drafts, the others the job's three."""
    (job,) = (job for job in read_runs([studied]).jobs if "gemma4_mtp" in job.title)
    for number, row in enumerate(job.runs[0].rows):
        row |= {"num_drafts": 4, "accepted_per_position": [0, 0, 0] if number % 2 else [4, 4, 4]}
        row |= {"decode_steps": 12 if number % 2 else 3, "decode_tokens": 12}
    found = read(costs)
    equal, chosen = (of(job, found) for of in (predicted, by_request))
    assert equal is not None
    assert chosen is not None
    assert set(chosen) == set(equal)
    faster, fast = chosen[ALL].ratio, equal[ALL].ratio
    assert faster is not None
    assert fast is not None
    assert faster > fast


def test_suffix_decoding_takes_the_rows_of_its_drafts(studied: Path, costs: Path) -> None:
    """A request of 4 steps: one with 3 drafts, one with 1, two without."""
    (costs / "gemma4_mtp").rename(costs / "ngram")
    edit(costs / "ngram", method="ngram")
    edit(studied / "1", method="suffix")

    def change(row: dict[str, object]) -> None:
        row |= {"decode_steps": 4, "decode_tokens": 6, "drafted_per_position": [2, 1, 1]}

    edit_rows(studied / "1", change)
    table = read(costs).of("suffix")
    assert table is not None
    milliseconds = 2 * 10.0 + table.at(2, 1).step_ms + 16.0
    assert ratios_of(studied, costs)["suffix"][ALL] == pytest.approx(6 * 10.0 / milliseconds)


def test_the_report_says_which_drafter_at_these_costs(
    studied: Path, costs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(studied), "--costs", str(costs)]) == 0
    printed = capsys.readouterr().out
    assert "At the step costs of large: Predicted to be the fastest: gemma4_mtp, K=3" in printed
    assert " math: gemma4_mtp, K=3" in printed
    page = (studied / "study.html").read_text(encoding="utf-8")
    assert "Predicted speedup by category" in page
    assert "gemma4_mtp, by request" in page
    (costs / "eagle3" / "costs.json").unlink()
    save_costs(costs / "gemma4_mtp", "gemma4_mtp", (10.0, 40.0))
    assert main([str(studied), "--costs", str(costs)]) == 0
    printed = capsys.readouterr().out
    assert "Predicted to be the fastest: no drafts. code: no drafts. math: no drafts." in printed
    assert "No step costs of large with eagle3." in printed


def test_folders_without_such_costs_are_refused(
    studied: Path, costs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (studied, tmp_path / "nowhere"):
        assert main([str(studied), "--costs", str(folder)]) == 2
        said = capsys.readouterr().err
        assert "holds no run with costs.json" in said
        assert "method.num_speculative_tokens=auto" in said
    edit(costs / "eagle3", target="another")
    with pytest.raises(ConfigurationError, match="has costs of another and large"):
        read(costs)
    save_costs(costs / "eagle3", "eagle3", (12.0, 20.0), first=1)
    with pytest.raises(ConfigurationError, match="no steps with K=0"):
        read(costs)
    (costs / "eagle3" / "summary.json").unlink()
    with pytest.raises(ConfigurationError, match="has not ended"):
        read(costs)
