"""The doctor's and the prediction's commands: help, refusals with their status, and interrupts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine

from hydraspec import doctor, predict
from hydraspec.analysis.doctor import run as examination
from hydraspec.analysis.predict import prediction
from hydraspec.analysis.predict.measure import Answers
from hydraspec.analysis.predict.model import assumed_acceptance
from hydraspec.analysis.predict.prediction import Prediction, Wanted
from hydraspec.cli.compose import plan
from hydraspec.cli.predict import concurrencies_of
from hydraspec.config.schema import RunConfig
from hydraspec.errors import ConfigurationError
from hydraspec.types import Request, SamplingParams

Main = Callable[[Sequence[str]], int]
COMMANDS: dict[str, tuple[Main, list[str]]] = {
    "doctor": (doctor.main, ["target=tiny_mistral", "method=eagle"]),
    "predict": (predict.main, ["target=tiny_gemma4", "method=gemma4_mtp"]),
}
SYNTHETIC = ("method.verification=synthetic", "method.synthetic_acceptance_length=3")


def run(command: str, folder: Path, *typed: str) -> int:
    main, pair = COMMANDS[command]
    return main([*pair, "engine.device=cpu", "tracker=none", f"hydra.run.dir={folder}/run", *typed])


@pytest.mark.parametrize(("command", "said"), [("doctor", "docs/doctor"), ("predict", "--drafts")])
def test_help_says_what_it_does(
    command: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = COMMANDS[command][0](["--help"])
    except SystemExit as ended:
        status = ended.code
    assert status == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "typed", "status", "said"),
    [
        ("doctor", ["method=none"], 2, "has no drafter to examine"),
        ("doctor", ["engine=transformers"], 2, "engine=transformers"),
        ("doctor", ["parallelism=tp2"], 2, "parallelism"),
        ("doctor", ["-m", "seed=1,2"], 2, "of one drafter"),
        ("doctor", ["method.chekpoint=x"], 2, "method.chekpoint"),
        ("doctor", ["method.checkpoint=/nowhere/at/all"], 3, "/nowhere/at/all"),
        ("doctor", ["workload=jsonl", "workload.path=/nowhere.jsonl"], 3, "/nowhere.jsonl"),
        ("predict", ["method=none"], 2, "method=none"),
        ("predict", ["engine=transformers"], 2, "engine=transformers"),
        ("predict", ["--concurrency", "32"], 2, "add engine.max_num_seqs=32"),
        ("predict", ["workload.request_rate=2"], 2, "workload.request_rate=2"),
        ("predict", ["--drafts", "0,2"], 2, "--drafts 0,2"),
        ("predict", ["--contexts", "512,1"], 2, "whole numbers from 2"),
        ("predict", [*SYNTHETIC, "--drafts", "1,3"], 2, SYNTHETIC[1]),
        ("predict", ["--acceptance", "1.2"], 2, "--acceptance 1.2"),
        ("predict", ["--check", "--acceptance", "0.5"], 2, "leave --acceptance out"),
        ("predict", ["--cfg", "job"], 2, "this is a prediction"),
        ("predict", ["workload=jsonl", "workload.path=/nowhere.jsonl"], 3, "/nowhere.jsonl"),
    ],
)
def test_refusals_are_one_message(
    command: str,
    typed: list[str],
    status: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(command, tmp_path, *typed) == status
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert not list(tmp_path.glob("run/*.json"))


@pytest.mark.parametrize(
    ("command", "place"),
    [
        ("doctor", "hydraspec.analysis.doctor.run.loaded"),
        ("predict", "hydraspec.analysis.predict.run.Prediction.begin"),
    ],
)
def test_an_interrupt_that_breaks_something_is_an_interrupt(
    command: str,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is torn down in the middle of a step may fail: Ctrl-C once ended with an IndexError."""

    def interrupted(*_: object) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            [].pop()

    monkeypatch.setattr(place, interrupted)
    assert run(command, tmp_path) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_drafter_that_the_target_names_says_its_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """method=auto has no K until its drafter is read: catches a prediction of none."""
    found: list[list[int]] = []

    def told(config: RunConfig, wanted: Wanted, **_: object) -> None:
        found.append(list(wanted.drafts))
        raise ConfigurationError("seen")

    monkeypatch.setattr("hydraspec.analysis.predict.run.predict", told)
    assert run("predict", tmp_path, "target=tiny_qwen3", "method=auto") == 2
    assert found == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ((), [1, 4, 16]),
        (("engine.max_num_seqs=8",), [1, 4]),
        (("workload.concurrency=6",), [6]),
        (("workload.concurrency=null",), [16]),
    ],
)
def test_the_concurrency_is_the_runs_where_it_is_typed(
    typed: tuple[str, ...], found: list[int]
) -> None:
    (job,) = plan(["target=tiny_gemma4", *typed]).jobs
    assert concurrencies_of(job) == found


def test_the_doctor_warns_of_random_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a run does: what is accepted then says nothing about the drafter."""
    engine = SimpleNamespace(tokenize=lambda requests: None, info=None)
    config = SimpleNamespace(method=SimpleNamespace(name="of_a_package", needs_checkpoint=True))
    target = SimpleNamespace(vocab_size=8)
    patient = SimpleNamespace(target=target, engine=engine, config=config)
    monkeypatch.setattr(examination, "loaded", lambda config: nullcontext(patient))
    monkeypatch.setattr(examination.environment, "describe", lambda info: {})
    monkeypatch.setattr(examination, "_examined", lambda *_: None)
    monkeypatch.setattr(examination, "as_json", lambda found: {})
    monkeypatch.setattr(examination.page, "page_of", lambda result: "")
    monkeypatch.setattr(examination.console, "show", lambda *_, **__: None)
    assert run("doctor", tmp_path, "workload=random") == 0
    (warning,) = json.loads((tmp_path / "run" / "doctor.json").read_text())["warnings"]
    assert warning.startswith("workload=random has prompts of random tokens")
    assert warning in capsys.readouterr().err


@pytest.mark.parametrize(("rates", "count"), [(None, 1), ([0.5], 0)], ids=["measured", "assumed"])
def test_a_prediction_warns_of_random_prompts(
    rates: list[float] | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = plan(["target=tiny_gemma4", "method=gemma4_mtp", "workload=random"]).jobs[0].config
    request = Request(index=0, id="0", sampling=SamplingParams(), prompt_token_ids=[1])
    found = Answers([request], {}, assumed_acceptance([0.5], 3, 1))
    monkeypatch.setattr(prediction, "warm_up", lambda *_: None)
    monkeypatch.setattr(prediction, "read_answers", lambda *_, **__: found)
    wanted = Wanted(drafts=[1], concurrencies=[1], rates=rates)
    made = Prediction.begin(config, wanted, FakeEngine(), None, lambda text: None)
    assert len([note for note in made.notes if "prompts of random tokens" in note]) == count
