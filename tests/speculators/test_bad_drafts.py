"""A speculator that proposes what cannot be verified ends the run with one error that names it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_runs import (
    attention_as_on_devices,
    graph_config,
    make_graph_engine,
    run_requests,
    zoo_requests,
)
from recorded_graphs import RecordedOps

from hydraspec.cli import main as cli
from hydraspec.engine.run import loading
from hydraspec.speculators.base import BaseSpeculator
from hydraspec.types import Batch, Draft, DraftError

K = 3


class BadSpeculator(BaseSpeculator):
    """Drafts zeros, and from the third call on what `make` says."""

    make: Callable[[torch.Tensor, int], Any]
    num_calls = 0
    draft_vocab_size = None

    def load(self, target: Any) -> None:
        self.vocab_size: int = target.vocab_size

    def propose(self, target_step: object, verdict: object, batch: Batch, state: object) -> Any:
        good = torch.zeros(batch.num_requests, K, dtype=torch.int64)
        self.num_calls += 1
        return Draft(tokens=good) if self.num_calls < 3 else self.make(good, self.vocab_size)


# What is proposed in place of [B, K] zeros, and what the error then says was given.
WRONG = {
    "one draft too few": (lambda good, v: Draft(tokens=good[:, 1:]), "2] of torch.int64"),
    "a row too many": (lambda good, v: Draft(tokens=good.repeat(2, 1)), "3] of torch.int64"),
    "floats": (lambda good, v: Draft(tokens=good.float()), "3] of torch.float32"),
    "32 bits": (lambda good, v: Draft(tokens=good.int()), "3] of torch.int32"),
    "no tensor": (lambda good, v: Draft(tokens=good.tolist()), "tokens list"),
    "no draft": (lambda good, v: good, "of torch.int64 on cpu"),
    "beyond the vocabulary": (lambda good, v: Draft(tokens=good + v), "token id "),
    "below -1": (lambda good, v: Draft(tokens=good - 2), "token id -2"),
}


def build(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]) -> None:
    def speculator(config: Any) -> BaseSpeculator:
        bad = BadSpeculator(config)
        bad.make = make
        return bad

    monkeypatch.setattr(loading, "build_speculator", speculator)


@pytest.mark.parametrize("case", WRONG)
def test_a_bad_draft_is_one_error(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, given = WRONG[case]
    build(monkeypatch, make)
    engine = make_graph_engine(graph_config("eagle3", "none"), None)
    with pytest.raises(DraftError) as caught:
        run_requests(engine, zoo_requests(3))
    message = str(caught.value)
    assert "test_bad_drafts.BadSpeculator.propose" in message
    expected = "token ids from 0" if "id" in given else f"tokens [3, {K}] of torch.int64"
    assert f"expected: {expected}" in message or f"expected: Draft with {expected}" in message
    assert given in message.partition("given: ")[2]
    assert engine.parts.runner.kv.usage == 0.0, "blocks leaked"


@pytest.mark.parametrize("case", ["beyond the vocabulary", "below -1"])
def test_ids_of_a_device_are_checked_when_they_arrive(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launched step reads nothing back: its ids come with the results of the next. The target's
    embedding accepts any id here, as kernels do."""
    attention_as_on_devices(monkeypatch)
    build(monkeypatch, WRONG[case][0])
    engine = make_graph_engine(graph_config("eagle3", "none"), RecordedOps())
    runner = engine.parts.runner
    prepare, vocab_size = runner.prepare, runner.target.vocab_size

    def within(inputs: Any) -> Batch:
        batch = prepare(inputs)
        batch.input_ids = batch.input_ids % vocab_size
        return batch

    monkeypatch.setattr(runner, "prepare", within)
    with pytest.raises(DraftError, match="token id"):
        run_requests(engine, zoo_requests(3))


def test_probabilities_that_are_missing_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification would take those of an earlier step."""
    build(monkeypatch, lambda good, v: Draft(tokens=good))
    monkeypatch.setattr(BadSpeculator, "draft_vocab_size", property(lambda self: self.vocab_size))
    engine = make_graph_engine(graph_config("eagle3", "none"), None)
    with pytest.raises(DraftError, match=rf"probs \[\d, {K}, \d+\] of torch\.float32"):
        run_requests(engine, zoo_requests(3, temperature=0.9))


def test_the_command_line_says_so_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    build(monkeypatch, WRONG["floats"][0])
    typed = ["target=tiny_qwen3", "method=eagle3", "tracker=none", "workload.limit=2"]
    folder = f"hydra.run.dir={tmp_path / 'run'}"
    monkeypatch.setattr(sys, "argv", ["hydraspec", *typed, folder])
    assert cli.main() == 1
    message = capsys.readouterr().err
    assert "BadSpeculator.propose" in message
    assert "expected: " in message
    assert "given: " in message
    assert "Traceback" not in message
