"""`python -m hydraspec.gate`: planted regressions are named, honest reruns pass, wrong input is one
message."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import Behaviour, FakeEngine
from scipy import stats

import hydraspec
from hydraspec.config.schema import RunConfig
from hydraspec.gate import main
from hydraspec.lab import run as run_module
from hydraspec.metrics.paired import sign_flip_test

# Conditional acceptance by position, of the default run's categories.
RATES = {"code": (0.97, 0.99, 0.96), "extract": (0.87, 0.89, 0.74), "math": (0.87, 0.94, 0.9)}
Rows = list[dict[str, Any]]


def some_rows(seed: int = 0, *, per_category: int = 24) -> Rows:
    """Requests with some 14 verifications each, accepted as RATES says."""
    rng = np.random.default_rng(seed)
    rows = []
    for category, rates in RATES.items():
        for i in range(per_category):
            num_drafts = int(rng.integers(8, 20))
            reached, accepted = [], []
            count = num_drafts
            for rate in rates:
                reached.append(count)
                count = int(rng.binomial(count, rate))
                accepted.append(count)
            row = {
                "id": f"{category}-{i}",
                "category": category,
                "prompt_token_ids": [len(rows), 1],
                "finish_reason": "stop",
                "num_drafts": num_drafts,
                "accepted_per_position": accepted,
                "reached_per_position": reached,
                "decode_tokens": 50,
                "decode_ms": 20.0 * rng.lognormal(0, 0.05),
                "correct": True,
                "baseline": {
                    "finish_reason": "stop",
                    "decode_tokens": 50,
                    "decode_ms": 40.0 * rng.lognormal(0, 0.05),
                    "correct": True,
                },
            }
            rows.append(row)
    return rows


def lower(rows: Rows, category: str, position: int, drop: float, seed: int = 1) -> None:
    """Take accepted drafts of a category away at random, so that the share of all drafts that is
    accepted at `position` (from 1) falls by `drop`; later positions lose what stood on them."""
    rng = np.random.default_rng(seed)
    chosen = [row for row in rows if row["category"] == category]
    at = position - 1
    count = round(drop * sum(row["num_drafts"] for row in chosen))
    taken = rng.multivariate_hypergeometric(
        [row["accepted_per_position"][at] for row in chosen], count
    )
    for row, number in zip(chosen, taken, strict=True):
        accepted = row["accepted_per_position"]
        before, lost = accepted[at], int(number)
        for i in range(at, len(accepted)):
            if i > at:
                drawn = rng.hypergeometric(lost, before - lost, accepted[i]) if before else 0
                before, lost = accepted[i], int(drawn)
            accepted[i] -= lost
        row["reached_per_position"] = [row["num_drafts"], *accepted[:-1]]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gated")


@pytest.fixture
def make(
    config: RunConfig, use_engine: Callable[[FakeEngine], FakeEngine], kept: Path, tmp_path: Path
) -> Callable[..., Path]:
    """Writes the folder of a run with these requests; `changes` are of its summary."""
    if not (kept / "run").exists():
        use_engine(FakeEngine(Behaviour()))
        run_module.run(config, run_dir=kept / "run", overrides=[], quiet=True)

    def run(name: str, rows: Rows | None = None, **changes: object) -> Path:
        rows = some_rows() if rows is None else rows
        folder = Path(shutil.copytree(kept / "run", tmp_path / name))
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "requests.jsonl").write_text(lines, encoding="utf-8")
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        summary |= {"num_requests": len(rows), "num_requests_in_workload": len(rows), **changes}
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
        return folder

    return run


@pytest.fixture
def stored(make: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A baseline of one run."""
    assert main(["--write", str(tmp_path / "gate.json"), str(make("stored"))]) == 0
    capsys.readouterr()
    return tmp_path / "gate.json"


def gated(
    stored: Path, folders: Sequence[Path], capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[str]]:
    """The exit status, and the regressions that are named."""
    status = main([str(stored), *map(str, folders)])
    lines = capsys.readouterr().out.splitlines()
    return status, [line.strip() for line in lines if line.startswith("  worse: ")]


def test_the_same_counts_pass_whatever_the_clock_did(
    make: Callable[..., Path], stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(4):
        rows, noise = some_rows(), some_rows(seed)
        for row, other in zip(rows, noise, strict=True):
            row["decode_ms"] = other["decode_ms"]
            row["baseline"]["decode_ms"] = other["baseline"]["decode_ms"]
        assert gated(stored, [make(f"again{seed}", rows)], capsys) == (0, [])


@pytest.mark.parametrize("category", RATES)
def test_a_drop_at_position_2_in_one_category_is_named(
    category: str, make: Callable[..., Path], stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches tests on unconditional rates, which name position 3 too, and pooled rates, which
    name positions where only the mix of requests changed."""
    rows = some_rows()
    lower(rows, category, 2, 0.1)
    status, worse = gated(stored, [make("worse", rows)], capsys)
    assert status == 4
    assert any(line.startswith(f"worse: acceptance at position 2 in {category}:") for line in worse)
    assert all("position 2" in line for line in worse)
    others = {name for name in RATES if name != category}
    assert not [line for line in worse if any(f"in {name}:" in line for name in others)]


def test_a_position_that_is_never_accepted_any_more_is_named(
    make: Callable[..., Path], stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a ratio that has no logarithm, and so no test."""
    rows = some_rows()
    for row in rows:
        row["accepted_per_position"] = [row["accepted_per_position"][0], 0, 0]
        row["reached_per_position"] = [*row["reached_per_position"][:2], 0]
    status, worse = gated(stored, [make("worse", rows)], capsys)
    assert status == 4
    assert len(worse) == 4
    assert all("acceptance at position 2" in line for line in worse)


def test_slow_drafts_wrong_answers_errors_and_a_verdict_are_named(
    make: Callable[..., Path], stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow, wrong = some_rows(), some_rows()
    for row in slow:
        row["decode_ms"] *= 2
    assert "speedup: " in gated(stored, [make("slow", slow)], capsys)[1][0]
    for row in wrong[:20]:
        row["correct"] = False
    _, worse = gated(stored, [make("wrong", wrong)], capsys)
    assert [line.split(":")[1] for line in worse] == [" exact match", " exact match in code"]
    failed = some_rows()
    for row in failed[3:5]:
        row["finish_reason"] = "error"
    status, worse = gated(stored, [make("failed", failed, num_errors=2)], capsys)
    assert status == 4
    assert "errors in code: 2 requests" in worse[0]
    for verdict, says in (("diverged", "diverged"), ("not_checked", "not checked any more")):
        lossless = {"verdict": verdict}
        status, worse = gated(stored, [make(verdict, lossless=lossless)], capsys)
        assert (status, len(worse)) == (4, 1)
        assert says in worse[0]


def test_another_distribution_of_sampled_outputs_is_named(
    make: Callable[..., Path], stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The test's own level of 1 %, shared by the runs of a job: catches one that each run has."""

    def sampled(name: str, p: float | None) -> Path:
        test = None if p is None else {"says": "different" if p <= 0.01 else "same", "p": p}
        return make(name, lossless={"verdict": "not_checked", "distribution": test})

    file = tmp_path / "sampled.json"
    assert main(["--write", str(file), str(sampled("old", 0.4))]) == 0
    assert gated(file, [sampled("again", 0.02)], capsys) == (0, [])
    assert gated(file, [sampled("one", 0.008), sampled("two", 0.6)], capsys) == (0, [])
    status, worse = gated(file, [sampled("other", 0.0005)], capsys)
    says = "worse: distribution of sampled outputs: not the target's, p = 0.0005, had p = 0.4"
    assert (status, worse) == (4, [says])
    status, worse = gated(file, [sampled("off", None)], capsys)
    assert (status, worse) == (4, [worse[0]])
    assert "not tested any more" in worse[0]
    assert main(["--write", str(file), str(tmp_path / "other")]) == 0
    assert gated(file, [sampled("as before", 0.0005)], capsys) == (0, [])
    damaged = {"says": "same", "p": "low"}
    edited(file, lambda f: summary_of(f)["lossless"].update(distribution=damaged))
    assert main([str(file), str(tmp_path / "other")]) == 2
    assert_one_message(capsys.readouterr().err, "lossless.distribution.p is 'low'")


def test_repeats_tell_a_loss_of_speed_that_single_runs_do_not(
    make: Callable[..., Path], stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run's noise is taken as 10 % until repeats show less: 25 % slower is noise of two runs."""

    def runs(name: str, slower: float, count: int) -> list[Path]:
        found = []
        for i in range(count):
            rows = some_rows()
            for row in rows:
                row["decode_ms"] *= slower * (1 + 0.005 * i)
            found.append(make(f"{name}{i}", rows))
        return found

    assert gated(stored, runs("one", 1.25, 1), capsys) == (0, [])
    several = tmp_path / "several.json"
    assert main(["--write", str(several), *map(str, runs("old", 1.0, 4))]) == 0
    status, worse = gated(several, runs("new", 1.25, 4), capsys)
    assert status == 4
    assert [line.split(":")[1] for line in worse] == [" speedup"]
    assert gated(several, runs("same", 1.01, 4), capsys) == (0, [])


def test_speed_is_not_compared_across_machines(
    make: Callable[..., Path], stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = some_rows()
    for row in rows:
        row["decode_ms"] *= 2
    folder = make("elsewhere", rows)
    environment = json.loads((folder / "env.json").read_text(encoding="utf-8"))
    environment["cpu"] = {"model": "another", "cores": 3}
    (folder / "env.json").write_text(json.dumps(environment), encoding="utf-8")
    assert main([str(stored), str(folder)]) == 0
    assert "speed is not compared: cpu was" in capsys.readouterr().out


def test_repeats_are_pooled_and_sampled_noise_is_no_regression(
    make: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs with other seeds accept other drafts of the same prompts."""
    old = [make(f"old{i}", some_rows(i)) for i in range(3)]
    assert main(["--write", str(tmp_path / "b.json"), *map(str, old)]) == 0
    assert "3 runs, 72 requests" in capsys.readouterr().out
    for seed in range(3, 6):
        assert gated(tmp_path / "b.json", [make(f"new{seed}", some_rows(seed))], capsys) == (0, [])


def edited(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    found = json.loads(file.read_text(encoding="utf-8"))
    change(found)
    file.write_text(json.dumps(found), encoding="utf-8")


def summary_of(found: dict[str, Any]) -> dict[str, Any]:
    summary: dict[str, Any] = found["jobs"][0]["runs"][0]["summary"]
    return summary


def requests_of(found: dict[str, Any]) -> Rows:
    rows: Rows = found["jobs"][0]["runs"][0]["requests"]
    return rows


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another file": (lambda f: f.pop("kind"), "kind is not"),
    "a later version": (lambda f: f.update(schema_version=2), "schema_version is 2, not 1"),
    "no job": (lambda f: f.update(jobs=[]), "has no jobs"),
    "a missing key": (lambda f: requests_of(f)[3].pop("num_drafts"), "[3].num_drafts is missing"),
    "a text": (lambda f: requests_of(f)[3].update(num_drafts="9"), "[3].num_drafts is '9'"),
    "a boolean": (lambda f: requests_of(f)[3].update(decode_ms=True), "[3].decode_ms is True"),
    "a negative count": (
        lambda f: requests_of(f)[0].update(reached_per_position=[1, -1, 0]),
        "[0].reached_per_position is not 3 counts",
    ),
    "more accepted than reached": (
        lambda f: requests_of(f)[0].update(
            reached_per_position=[1, 1, 1], accepted_per_position=[1, 2, 0]
        ),
        "[0].accepted_per_position is above",
    ),
    "a prompt": (lambda f: requests_of(f)[0].update(prompt="x"), "[0].prompt is no digest"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_baseline_is_one_message(
    case: str, make: Callable[..., Path], stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, says = DAMAGES[case]
    edited(stored, damage)
    assert main([str(stored), str(make("run"))]) == 2
    assert_one_message(capsys.readouterr().err, says)


def assert_one_message(said: str, says: str) -> None:
    assert says in said
    starts = [line.split(":")[0] for line in said.splitlines()]
    assert starts == ["hydraspec.gate", "  allowed", "  to do"]


def test_what_cannot_be_gated_is_one_message(
    make: Callable[..., Path], stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make("run")
    other_prompts = some_rows()
    other_prompts[0]["prompt_token_ids"] = [7]
    old_rows = [{k: v for k, v in row.items() if "reached" not in k} for row in some_rows()]
    cases = [
        ([stored, tmp_path / "nowhere"], "nowhere: does not exist"),
        ([tmp_path / "nowhere.json", run], "nowhere.json: cannot be read"),
        ([run / "requests.jsonl", run], "is no JSON"),
        ([stored, make("cut", status="interrupted")], "its status is interrupted"),
        ([stored, make("alone", baseline=None)], "has no baseline"),
        ([stored, make("number", method=5)], "number: summary.json: method is 5: damaged"),
        ([stored, make("older", old_rows)], "an older hydraspec"),
        ([stored, make("prompts", other_prompts)], "other prompts: request 'code-0'"),
        ([stored, make("k5", num_speculative_tokens=5)], "has no job tiny_fake, gemma4_mtp, K=5"),
        ([stored, make("target", target="other")], "the baseline has no job other"),
    ]
    for arguments, says in cases:
        assert main([str(each) for each in arguments]) == 2
        assert_one_message(capsys.readouterr().err, says)
    assert main(["--write", str(tmp_path / "no" / "b.json"), str(run)]) == 1
    assert "cannot write" in capsys.readouterr().err
    for arguments in (["--looks", "0"], ["--speed-margin", "1"], ["--acceptance-margin", "x"]):
        assert main([str(stored), str(run), *arguments]) == 2
        assert_one_message(capsys.readouterr().err, f"argument {arguments[0]}: ")
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "exit status" in capsys.readouterr().out.lower()


def test_the_baseline_has_a_line_for_each_request(stored: Path) -> None:
    lines = [line for line in stored.read_text(encoding="utf-8").splitlines() if '"id"' in line]
    assert len(lines) == 72
    assert json.loads(lines[0].strip().rstrip(","))["id"] == "code-0"


def test_sign_flips_are_counted_and_extrapolated() -> None:
    """Exact up to 14 requests; more that all changed alike are less likely than 1e-4."""
    assert sign_flip_test(np.zeros(9)) is None
    assert sign_flip_test(-np.ones(5)) == 1 / 32
    assert sign_flip_test(np.array([-1.0, -1, -1, 3])) == 9 / 16
    assert sign_flip_test(-np.ones(10)) == 2**-10
    assert (sign_flip_test(-np.ones(40)) or 1) < 1e-6
    drawn = np.random.default_rng(0).normal(-0.3, 1, 60)
    normal = stats.norm.cdf(drawn.sum() / np.sqrt((drawn**2).sum()))
    assert sign_flip_test(drawn) == pytest.approx(normal, abs=0.01)


@pytest.mark.slow
def test_honest_reruns_of_the_default_run_pass_and_a_planted_drop_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / str(i) for i in range(3)]
    for folder in folders:
        hydraspec.run(["tracker=none", f"hydra.run.dir={folder}"], quiet=True)
    stored = tmp_path / "gate.json"
    assert main(["--write", str(stored), str(folders[0])]) == 0
    for folder in folders[1:]:
        assert gated(stored, [folder], capsys)[0] == 0
    path = folders[2] / "requests.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lower(rows, "rewrite", 2, 0.1)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    status, worse = gated(stored, [folders[2]], capsys)
    assert status == 4
    assert any("acceptance at position 2 in rewrite" in line for line in worse)
