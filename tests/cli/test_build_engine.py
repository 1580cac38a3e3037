"""`hydraspec.build_engine`: an engine that Python code drives itself."""

from __future__ import annotations

import pytest
from fake_engine import NotingEngine

import hydraspec
from hydraspec.cli.own_engine import OwnEngine
from hydraspec.engine import notes
from hydraspec.engine.base import Engine
from hydraspec.errors import ConfigurationError
from hydraspec.types import Completion, Request, SamplingParams


def test_a_request_is_ended_between_two_events() -> None:
    engine = hydraspec.build_engine(["target=tiny_qwen3", "method=eagle3", "engine.device=cpu"])
    try:
        requests = [
            Request(
                index=index,
                id=str(index),
                prompt_token_ids=[5, 6, 7, 8 + index],
                sampling=SamplingParams(max_tokens=24, ignore_eos=True),
            )
            for index in range(2)
        ]
        engine.tokenize(requests)
        ended: dict[int, Completion] = {}
        for number, event in enumerate(engine.run(requests, concurrency=None)):
            if isinstance(event, Completion):
                ended[event.index] = event
            elif number == 1:
                engine.cancel(0)
        assert ended[0].error == "cancelled"
        assert len(ended[0].output_token_ids) < 24
        assert len(ended[1].output_token_ids) == 24
    finally:
        engine.close()


def test_a_mistaken_call_is_one_error() -> None:
    """Catches AssertionError and AttributeError from within, and a number that is silently no
    request's."""
    engine = hydraspec.build_engine(["method=none", "engine.device=cpu"])
    text = Request(index=0, id="a", prompt="4 + 5", sampling=SamplingParams(max_tokens=2))
    with pytest.raises(ConfigurationError, match="run: request 'a' has no token ids"):
        engine.run([text], concurrency=1)
    with pytest.raises(ConfigurationError, match="cancel: 'x' is no number of a request"):
        engine.cancel("x")  # type: ignore[arg-type]
    assert isinstance(engine, Engine)
    engine.tokenize([text])
    plain = engine.baseline()
    for each in (engine, plain):
        assert isinstance(list(each.run([text], concurrency=1))[-1], Completion)
    plain.close()
    engine.close()
    engine.close()
    for call in (lambda: engine.run([text], concurrency=1), lambda: engine.info):
        with pytest.raises(ConfigurationError, match="the engine is closed"):
            call()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("method=none", "a list of strings"),
        (["method=none,eagle3"], "several values"),
        (["parallelism=tp2", "engine.device=cpu"], "several devices"),
        (["method=eagle9"], "eagle9"),
    ],
)
def test_what_is_no_engine_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        hydraspec.build_engine(overrides)


def test_an_engine_that_ends_no_request_says_so() -> None:
    engine = hydraspec.build_engine(
        ["engine=transformers", "workload.concurrency=1", "target=tiny_qwen3", "method=none"]
    )
    try:
        with pytest.raises(ConfigurationError, match="ends no request"):
            engine.cancel(0)
    finally:
        engine.close()


def test_notes_are_logged_as_they_come(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches graphs that a run could not capture, of which no summary tells here."""
    monkeypatch.setattr(notes, "_logged", set())
    engine = OwnEngine(NotingEngine())
    assert caplog.messages == ["a note of both"]
    request = Request(index=0, id="a", prompt_token_ids=[1], sampling=SamplingParams(max_tokens=2))
    list(engine.run([request], concurrency=1))
    assert caplog.messages == ["a note of both", "a late note"]
    engine.baseline()
    engine._open("info").info.warnings.append("a last note")
    engine.close()
    assert caplog.messages[2:] == ["a baseline's note", "a last note"]
