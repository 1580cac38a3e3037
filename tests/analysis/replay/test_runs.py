"""Replays of recorded runs, against the runs themselves."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted_faults import PAIRS

import hydraspec
from hydraspec.analysis.replay.run import replayed
from hydraspec.metrics.files import write_json_lines
from hydraspec.metrics.statistics import leading
from hydraspec.replay import main

POSITIONS, TRACE, SUMMARY = "positions.jsonl", "trace.jsonl", "summary.json"
RECORDING = ["metrics.trace=true", "metrics.all_positions=true"]
COUNTS = ("num_drafts", "drafted_per_position", "accepted_per_position")
RECORDED = 3  # drafts of the slice


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(folder: Path, pair: tuple[str, str], k: int, *typed: str) -> list[dict[str, Any]]:
    target, method = pair
    fixed = ["tracker=none", "baseline=false", "engine.device=cpu", "target.dtype=float32"]
    chosen = [f"target={target}", f"method={method}", f"method.num_speculative_tokens={k}"]
    hydraspec.run([*fixed, *chosen, *typed, f"hydra.run.dir={folder}"], quiet=True)
    return read(folder / "requests.jsonl")


def check_against_runs(
    pair: tuple[str, str], k: int, fewer: range, folder: Path, *typed: str
) -> None:
    """Every request has the drafts, the accepted counts and the steps of a run with that K."""
    run(folder / "recorded", pair, k, *RECORDING, *typed)
    result = replayed(folder / "recorded", [])
    assert (result["kind"], result["why_estimate"]) == ("exact", [])
    assert result["check"]["num_requests_different"] == 0
    by_k = {row["rule"]["num_speculative_tokens"]: row for row in result["replays"]}
    assert list(by_k) == list(range(1, k + 1))
    for other in fewer:
        check_same(
            by_k[other], run(folder / f"k{other}", pair, other, "metrics.trace=true", *typed)
        )
        steps = read(folder / f"k{other}" / TRACE)
        assert by_k[other]["num_steps"] == len(steps)


def check_same(replay: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    assert [row["id"] for row in replay["requests"]] == [row["id"] for row in rows]
    found = [{key: row[key] for key in COUNTS} for row in replay["requests"]]
    assert found == [{key: row[key] for key in COUNTS} for row in rows]
    assert replay["num_drafts"] == sum(row["num_drafts"] for row in rows) > 0


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two requests of a drafter with its own vocabulary."""
    folder = tmp_path_factory.mktemp("recorded")
    run(folder, ("tiny_qwen3", "eagle3"), RECORDED, *RECORDING, "workload.limit=2")
    return folder


def test_a_replay_is_the_run_that_it_stands_for(recorded: Path, tmp_path: Path) -> None:
    """The other pairs and numbers of drafts are in the slow test."""
    result = replayed(recorded, ["K=2"])
    rows = run(tmp_path, ("tiny_qwen3", "eagle3"), 2, "workload.limit=2")
    assert result["kind"] == "exact"
    check_same(result["replays"][0], rows)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_every_pair_and_number_of_drafts(pair: tuple[str, str], tmp_path: Path) -> None:
    """Catches drafts that depend on K: caches that a longer chain wrote,
    masks that see later ones, layers that serve other steps."""
    check_against_runs(pair, 5, range(1, 5), tmp_path, "workload.limit=24")


@pytest.mark.slow
@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[5]], ids="-".join)
def test_where_the_model_length_ends_outputs(pair: tuple[str, str], tmp_path: Path) -> None:
    """The last steps have fewer drafts, and the target cannot go on after the end."""
    typed = ["target.max_model_len=96", "sampling.ignore_eos=true", "sampling.max_tokens=200"]
    check_against_runs(pair, 4, range(1, 4), tmp_path, *typed, "workload.limit=6")


def test_an_estimate_says_so_and_repeats_its_own_run(recorded: Path, tmp_path: Path) -> None:
    """From a trace alone. Fewer drafts need more steps, and never accept more in one."""
    folder = shutil.copytree(recorded, tmp_path / "run")
    (folder / POSITIONS).unlink()
    result = replayed(folder, [])
    assert result["kind"] == "estimate"
    assert "ordinary trace" in result["why_estimate"][0]
    assert result["check"] == {
        "num_requests_equal": 2,
        "num_requests_different": 0,
        "num_preemptions": 0,
    }
    one, two, three = (row["acceptance_length"]["mean"] for row in result["replays"])
    assert 1 < one < two < three
    exact = [row["acceptance_length"]["mean"] for row in replayed(recorded, [])["replays"]]
    assert one == pytest.approx(exact[0], abs=0.15)


def test_ranks_say_what_a_run_accepted(recorded: Path) -> None:
    """Catches scores of a neighbouring place, of the wrong draft step, of draft ids in place of
    target ids (d2t), and outputs that are not continued past their end.
    """
    places = {(p["request"], p["num_computed_tokens"]): p for p in read(recorded / POSITIONS)}
    trace = read(recorded / TRACE)
    assert len(trace) > 10
    for line in trace:
        ranks = line["target_ranks"]
        assert len(ranks) == len(line["draft_token_ids"]) == 3  # also past the end of an output
        assert leading(np.array([ranks]) == 1)[0] == line["num_accepted"]
        place = places[line["request"], line["num_computed_tokens"]]
        assert (place["target_ranks"], place["target_probabilities"]) == (
            ranks,
            line["target_probabilities"],
        )
        so_far = line["num_accepted"] + 1  # the rejected draft included
        assert place["draft_token_ids"][:so_far] == line["draft_token_ids"][:so_far]
        cut = len(line["output_token_ids"])
        assert place["target_token_ids"][:cut] == line["output_token_ids"][:3]
    for row in read(recorded / "requests.jsonl"):
        found = [place for name, place in places if name == row["id"]]
        first = len(row["prompt_token_ids"])
        assert found == list(range(first, first + len(row["output_token_ids"]) - 1))
    for place in places.values():
        pairs = zip(
            *(place[key] for key in ("target_ranks", "target_token_ids", "draft_token_ids")),
            strict=True,
        )
        assert all((rank == 1) == (theirs == own) for rank, theirs, own in pairs)


def test_the_summary_says_how_the_drafter_ranks(recorded: Path) -> None:
    """Over the same places as the replay: acceptance over the steps of a run is the run's own."""
    summary = json.loads((recorded / SUMMARY).read_text(encoding="utf-8"))
    found = summary["teacher_forced"]
    assert found["num_places"] == len(read(recorded / POSITIONS))
    mean = summary["acceptance_length"]["mean"]
    assert found["ceilings"]["acceptance"] == pytest.approx(mean)
    for mine, theirs in zip(
        found["by_step"], replayed(recorded, [])["figures"]["by_step"], strict=True
    ):
        assert mine == pytest.approx(theirs, rel=1e-5)  # which has six digits
    figures = replayed(recorded, [])["figures"]
    assert found["by_context"] == figures["by_context"]
    assert found["by_target_entropy"] == figures["by_target_entropy"]
    classes = found["by_token_class"]
    assert sum(of["num_starts"] for of in classes.values()) == found["num_places"]
    assert len(classes) > 1, "the run's tokenizer gives tokens their class"


def test_the_page_says_so_too(recorded: Path) -> None:
    page = (recorded / "report.html").read_text(encoding="utf-8")
    found = json.loads((recorded / SUMMARY).read_text(encoding="utf-8"))["teacher_forced"]
    assert "Drafts over the target&#39;s own tokens" in page
    assert page.count("<td>draft ") >= len(found["by_step"])
    assert f"{found['ceilings']['oracle_features']:.2f}" in page
    for title in ("By tokens before the draft", "By what the target&#39;s next token is"):
        assert title in page
    assert re.search(r"\d+: \d+ &#39;[^<]+&#39; → \d+", page), "tokens have their texts"
    assert "share of drafting (propose)" in page


def changed_summary(folder: Path, **values: object) -> None:
    summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    (folder / SUMMARY).write_text(json.dumps({**summary, **values}), encoding="utf-8")


REFUSED = {
    "K=4": ["method.num_speculative_tokens=4: cannot", "1 to 3", "more drafts"],
    "K=x": ["=x: cannot be replayed", "1 to 3"],
    "candidates=0": ["candidates=0: is out of range", "1 or more"],
    "min_probability=2": ["=2: is out of range", "0 to 1"],
    "method.verification=synthetic": ["=synthetic: cannot be replayed", "block"],
    "sampling.temperature=1": ["sampling.temperature=1: cannot be replayed", "run it"],
    "method.num_speculative_token=1": ["did you mean method.num_speculative_tokens?"],
    "two": ["two: is no key=value"],
}


@pytest.mark.parametrize("typed", REFUSED)
def test_rules_that_a_record_does_not_answer_for(
    typed: str, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(recorded), typed]) == 2
    said = " ".join(capsys.readouterr().err.split())
    for part in REFUSED[typed]:
        assert part in said
    assert not (recorded / "replay.json").exists()


def test_folders_without_a_record(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def says(folder: Path, *words: str, typed: str = "K=1") -> None:
        assert main([str(folder), typed]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert all(word in said for word in words), said
        assert "Traceback" not in said

    says(tmp_path / "nowhere", "does not exist")
    says(tmp_path, "holds no summary.json")
    folder = shutil.copytree(recorded, tmp_path / "run")
    lines = read(folder / POSITIONS)
    write_json_lines(folder / POSITIONS, lines[:-1])
    says(folder, POSITIONS, "cannot be read")
    with (folder / POSITIONS).open("a", encoding="utf-8") as file:
        file.write('{"request": "')
    says(folder, f"cannot be read: ValueError: {POSITIONS}, line {len(lines)}, column 13")
    trace = (folder / TRACE).rename(tmp_path / TRACE)
    (folder / POSITIONS).write_text("")
    says(folder, f"holds no drafts in {POSITIONS}; its summary.json says why")
    trace.rename(folder / TRACE)
    assert main([str(folder), "K=1"]) == 0, "a drafter that cannot be fed whole texts has a trace"
    (folder / POSITIONS).unlink()
    says(folder, "needs the drafter's own probabilities", typed="min_probability=0.5")
    changed_summary(folder, num_speculative_tokens_used={"mean": 1.0, "histogram": [0, 1]})
    says(folder, "=auto: its trace lacks", "metrics.all_positions=true")
    (folder / TRACE).unlink()
    changed_summary(folder, num_speculative_tokens_used=None)
    says(folder, "holds no positions.jsonl or trace.jsonl", "metrics.all_positions=true")
    lossless = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["lossless"]
    sampled = {**lossless, "num_requests_sampled": 2}
    changed_summary(folder, draft_sampling="probabilistic", lossless=sampled)
    says(folder, "2 requests were sampled", "is not recorded")
    changed_summary(folder, verification="synthetic")
    says(folder, "method.verification=synthetic")
    changed_summary(folder, num_speculative_tokens=0, method="none")
    says(folder, "method=none, which drafts nothing")
    changed_summary(folder, status="failed")
    says(folder, "is a run that failed", "run it again")


def test_a_run_that_chose_k_has_no_constant_k_to_be_checked_with(
    recorded: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(recorded, tmp_path / "run")
    changed_summary(folder, num_speculative_tokens_used={"mean": 1.0, "histogram": [0, 1]})
    found = replayed(folder, ["K=1"])
    assert (found["kind"], found["check"]) == ("exact", None)


def test_the_command_prints_and_writes(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(recorded, tmp_path / "run")
    assert main([str(folder), "K=1,3", "candidates=1,2"]) == 0
    printed = capsys.readouterr().out
    assert "Exact: " in printed
    assert "found in 2 of 2 requests" in printed
    found = json.loads((folder / "replay.json").read_text(encoding="utf-8"))
    names = ["K=1", "K=1, candidates=2", "K=3", "K=3, candidates=2"]
    assert [row["name"] for row in found["replays"]] == names
    ceilings, steps = found["figures"]["ceilings"], found["figures"]["by_step"]
    assert ceilings["acceptance"] == pytest.approx(found["replays"][2]["acceptance_length"]["mean"])
    assert ceilings["acceptance"] <= ceilings["oracle_features"] <= ceilings["draft_vocabulary"]
    assert all(0 < row["top_1"] < row["top_5"] <= 1 for row in steps)
    assert 0 < found["draft_share_of_step"] < 1
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert "docs/replay.md" in capsys.readouterr().out
