"""What becomes of requests that fail, of ids that cannot be, and of a folder that is used again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Behaviour, FakeEngine
from records import completion, json_lines

from hydraspec.config.schema import RunConfig
from hydraspec.lab import recorder
from hydraspec.lab.folder import RunFolder
from hydraspec.lab.run_warnings import failure_warnings
from hydraspec.metrics.sinks import Side
from hydraspec.types import Completion, NotFiniteError

Use = Callable[[FakeEngine], FakeEngine]
Run = Callable[[], dict[str, Any]]


def failed(index: int, error: str | None) -> Completion:
    return completion(index, finish_reason="length" if error is None else "error", error=error)


def test_three_kinds_of_error_are_spelt_out_with_their_counts() -> None:
    method = {i: failed(i, error) for i, error in enumerate("abbcccdde")}
    baseline = {0: failed(0, "a"), 9: failed(9, "x"), 10: failed(10, None)}
    assert failure_warnings(method, baseline) == [
        "3 requests ended with an error: c",
        "2 requests ended with an error: b",
        "2 requests ended with an error: d",
        "and 2 more kinds of error: see requests.jsonl",
        "baseline: 1 request ended with an error: x",
    ]


def test_errors_that_differ_in_a_number_are_of_one_kind() -> None:
    texts = ["90 tokens, 64 fit", "b", "91 tokens, 64 fit", "c", "92 tokens, 64 fit", "d"]
    assert failure_warnings({i: failed(i, text) for i, text in enumerate(texts)}, {}) == [
        "3 requests ended with an error: such as 90 tokens, 64 fit",
        "1 request ended with an error: b",
        "1 request ended with an error: c",
        "and 1 more kind of error: see requests.jsonl",
    ]


def test_counts_by_position_have_k_places_whatever_was_drafted(
    use_engine: Use, run_config: Run, tmp_path: Path
) -> None:
    use_engine(FakeEngine(Behaviour(error_indices={2})))
    run_config()
    rows = json_lines(tmp_path / "run" / "requests.jsonl")
    assert rows[2]["finish_reason"] == "error"
    assert rows[2]["drafted_per_position"] == rows[2]["accepted_per_position"] == [0, 0, 0]
    assert {len(row["drafted_per_position"]) for row in rows} == {3}


@pytest.mark.parametrize("baseline", [True, False])
@pytest.mark.parametrize("wrong_from", [{}, {2: 1}], ids=["equal", "other outputs"])
def test_a_run_of_broken_logits_fails(
    baseline: bool,
    wrong_from: dict[int, int],
    config: RunConfig,
    use_engine: Use,
    run_config: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An engine that does not look at its logits: one request is looked at after the run, also
    without a baseline, and also where outputs differ. Margins that are not finite become null."""

    class Broken(FakeEngine):
        def next_token_logits(self, token_ids, spans=(), images=()):  # type: ignore[no-untyped-def]
            return super().next_token_logits(token_ids) * float("nan")

    config.baseline = baseline
    use_engine(Broken(Behaviour(wrong_from=wrong_from)))
    with pytest.raises(NotFiniteError) as caught:
        run_config()
    differs = baseline and bool(wrong_from)
    place = ("task-2", 1) if differs else ("task-0", 8)
    assert (caught.value.request_id, caught.value.position) == place
    assert caught.value.exit_code == 1
    folder = tmp_path / "run"
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert (summary["status"], summary["num_requests"]) == ("failed", 6)
    assert summary["lossless"]["not_finite_in"] == place[0]
    assert summary["lossless"]["verdict"] == ("diverged" if differs else "not_checked")
    assert len(json_lines(folder / "requests.jsonl")) == 6
    page = (folder / "report.html").read_text(encoding="utf-8")
    for text in (summary["warnings"][0], capsys.readouterr().out, page):
        assert "NaN or infinite" in text


def test_an_engine_that_checks_its_logits_is_not_checked_again(
    config: RunConfig, use_engine: Use, run_config: Run, tmp_path: Path
) -> None:
    """Its error ends the run, and what had finished is saved with the request's name."""
    error = NotFiniteError("task-3", 5, "float16")

    class Looking(FakeEngine):
        def next_token_logits(self, token_ids, spans=(), images=()):  # type: ignore[no-untyped-def]
            raise AssertionError("a prefill for nothing")

    engine = use_engine(Looking(checks_logits=True))
    assert run_config()["status"] == "ok"
    late = engine.num_steps - 2
    use_engine(Looking(Behaviour(raise_at_step={late: error}), checks_logits=True))
    with pytest.raises(NotFiniteError):
        run_config()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert (summary["status"], summary["lossless"]["not_finite_in"]) == ("failed", "task-3")
    assert 0 < summary["num_requests"] < 6
    assert f"the run ended early: {error.finding}" in summary["warnings"]


def test_a_request_lost_by_the_method_alone_is_a_divergence(
    config: RunConfig,
    use_engine: Use,
    run_config: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = FakeEngine(Behaviour(error_indices={2}))
    engine.baseline = lambda: FakeEngine(is_baseline=True, method="none", num_speculative_tokens=0)  # type: ignore[method-assign]
    use_engine(engine)
    summary = run_config()
    assert summary["lossless"]["verdict"] == "diverged"
    assert len(summary["warnings"]) == 2
    printed = capsys.readouterr().out
    assert "DIVERGED: an error in 1 of the requests that the baseline finished" in printed
    assert "prompt is too long" in printed
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Diverged" in report
    assert "with an error in the method only" in report


def test_a_run_folder_is_cleared_of_the_older_run(
    config: RunConfig, use_engine: Use, run_config: Run, tmp_path: Path
) -> None:
    """Catches the older run's steps.jsonl beside a summary that knows nothing of it."""
    config.metrics.steps = config.metrics.trace = True
    use_engine(FakeEngine())
    run_config()
    folder = tmp_path / "run"
    (folder / "wandb" / "offline-run-1").mkdir(parents=True)
    (folder / "notes.md").write_text("mine", encoding="utf-8")
    config.metrics.steps = config.metrics.trace = False
    use_engine(FakeEngine(Behaviour(raise_at_step={0: RuntimeError("a bug")})))
    with pytest.raises(RuntimeError):
        run_config()
    names = {path.name for path in folder.iterdir()}
    assert {"notes.md", "summary.json", "env.json"} <= names
    assert names.isdisjoint({"steps.jsonl", "trace.jsonl", "wandb"})


@pytest.mark.parametrize("mark", ["{", "[]", '{"versions": {"other": "1"}}'])
def test_a_folder_that_is_no_run_folder_keeps_its_files(tmp_path: Path, mark: str) -> None:
    """Catches another program's steps.jsonl or wandb/ being deleted."""
    names = ("config.yaml", "steps.jsonl", "summary.json")
    for name in names:
        (tmp_path / name).write_text("x", encoding="utf-8")
    (tmp_path / "env.json").write_text(mark, encoding="utf-8")
    (tmp_path / "wandb").mkdir()
    RunFolder(tmp_path, {}, [])
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*names, "env.json", "wandb", "overrides.yaml"}


def test_a_linked_folder_is_not_followed_when_cleared(tmp_path: Path) -> None:
    kept, folder = tmp_path / "kept", tmp_path / "run"
    kept.mkdir()
    (kept / "file").touch()
    RunFolder(folder, {}, []).write_environment({"versions": {"hydraspec": "0"}})
    (folder / "config.yaml").touch()
    (folder / "wandb").symlink_to(kept)
    (folder / "summary.json").mkdir()
    RunFolder(folder, {}, []).replace_older_run()
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["config.yaml", "overrides.yaml", "summary.json"]
    assert (kept / "file").exists()


def test_meta_travels_unchanged(
    config: RunConfig, use_engine: Use, run_config: Run, tmp_path: Path, workload_file: Path
) -> None:
    metas = [{"a": [1, {"b": None}], "é": "\x1b[2J", "big": 10**30, "half": 0.5, "": {}}]
    metas = [*metas, {}, None, [1, "a"], "text", 7, False, [], ""]
    lines = [{"prompt": "a", "meta": meta} for meta in metas]
    workload_file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    use_engine(FakeEngine())
    run_config()
    assert [row["meta"] for row in json_lines(tmp_path / "run" / "requests.jsonl")] == metas


def test_control_characters_reach_neither_page_nor_terminal(
    config: RunConfig,
    use_engine: Use,
    run_config: Run,
    tmp_path: Path,
    workload_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An id, a category or a prompt could clear the screen or hide what stands there."""
    odd = "\x1b[2J\x07\x9b31m\r"
    line = {"id": f"i{odd}", "category": f"c{odd}", "prompt": f"p{odd}", "max_tokens": 9}
    workload_file.write_text(json.dumps(line), encoding="utf-8")
    use_engine(FakeEngine(Behaviour(wrong_from={0: 3})))
    assert run_config()["lossless"]["first_divergence"]["request"] == f"i{odd}"
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    for text in (page, "".join(capsys.readouterr())):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
        assert r"i\x1b[2J\x07\x9b31m\x0d" in text


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("a device is lost")], ids=repr)
def test_a_baseline_with_fewer_turns_has_a_page(
    config: RunConfig,
    use_engine: Use,
    run_config: Run,
    tmp_path: Path,
    workload_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    """Catches a page that cannot be made, and hides what ended the run."""
    workload_file.write_text('{"turns": [[1, 2], [3], [4]], "max_tokens": 5}\n', encoding="utf-8")
    config.workload.concurrency = 1

    class Ending(recorder.ConsoleSink):
        def on_completion(self, side, completion, meter):  # type: ignore[no-untyped-def]
            if side is Side.baseline:
                raise error

    monkeypatch.setattr(recorder, "ConsoleSink", Ending)
    use_engine(FakeEngine())
    with pytest.raises(type(error)):
        run_config()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert len(summary["by_turn"]) == len(summary["baseline"]["by_turn"]) == 4
    assert [row["num_requests"] for row in summary["baseline"]["by_turn"]] == [1, 0, 0, 0]
    assert not [warning for warning in summary["warnings"] if "report.html" in warning]
    assert not (tmp_path / "run" / ".unsaved.json").exists()


@pytest.mark.parametrize("step", [None, 12], ids=["whole", "failed"])
def test_a_page_that_cannot_be_made_hides_nothing(
    use_engine: Use,
    run_config: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: int | None,
) -> None:
    """Catches a fault of the page in place of the run's own error, or of its summary."""

    def broken(*_: Any, **__: Any) -> str:
        raise ZeroDivisionError("of a chart")

    monkeypatch.setattr(recorder.run_page, "render", broken)
    faults = {} if step is None else {step: RuntimeError("a device is lost")}
    use_engine(FakeEngine(Behaviour(raise_at_step=faults)))
    with nullcontext() if step is None else pytest.raises(RuntimeError, match="device is lost"):
        run_config()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == ("ok" if step is None else "failed")
    assert "report.html could not be made: ZeroDivisionError: of a chart" in str(
        summary["warnings"]
    )
