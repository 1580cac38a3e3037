"""Drafts from every output position: what a run records, against what its steps did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import FakeEngine
from records import json_lines

from hydraspec.cli.compose import plan
from hydraspec.config.schema import RunConfig
from hydraspec.errors import ConfigurationError
from hydraspec.lab.positions import decoder
from hydraspec.types import PositionScores

POSITIONS = "positions.jsonl"


class Scoring(FakeEngine):
    """Gives scores of two places of each request, or runs out of memory after the first one."""

    is_short = False

    def position_scores(self, requests: Any, completions: Any) -> Iterator[PositionScores]:
        for request in requests[:2]:
            table = np.array([[1, 2, 3], [4, 5, -1]])
            yield PositionScores(
                index=request.index,
                first=len(completions[request.index].prompt_token_ids),
                target_token_ids=table,
                target_ranks=np.array([[1, 0, 2], [1, 1, 1]]),
                target_probs=np.array([[0.5, 0, 1 / 3], [1, 1, 1]], np.float32),
                draft_token_ids=table,
                draft_probs=np.ones((2, 3), np.float32),
                target_entropies=np.ones(2, np.float32),
            )
            if self.is_short:
                raise torch.OutOfMemoryError


@pytest.mark.parametrize("is_short", [False, True])
def test_lists_end_where_tokens_are_not_known(
    config: RunConfig,
    use_engine: Callable[[FakeEngine], FakeEngine],
    run_config: Callable[[], dict[str, Any]],
    tmp_path: Path,
    is_short: bool,
) -> None:
    """Also: a device without memory for the pass costs the run nothing else."""
    config.metrics.all_positions = True
    engine = Scoring()
    engine.is_short = is_short
    use_engine(engine)
    summary = run_config()
    lines = json_lines(tmp_path / "run" / POSITIONS)
    assert lines[0]["target_ranks"] == [1, None, 2]
    assert lines[0]["target_probabilities"] == [0.5, 0, 0.333333]
    assert lines[1]["target_ranks"] == [1, 1]
    assert lines[1]["num_computed_tokens"] == lines[0]["num_computed_tokens"] + 1
    assert len({line["request"] for line in lines}) == (1 if is_short else 2)
    said = [w for w in summary["warnings"] if "metrics.all_positions=true" in w]
    assert [("memory" in w) for w in said] == [True] * is_short
    assert summary["status"] == "ok"


def test_an_engine_without_scores_says_so(
    config: RunConfig,
    use_engine: Callable[[FakeEngine], FakeEngine],
    run_config: Callable[[], dict[str, Any]],
) -> None:
    config.metrics.all_positions = True
    use_engine(FakeEngine())
    assert any("only our own draft heads" in w for w in run_config()["warnings"])


class Lacking(FakeEngine):
    """Has a drafter whose head lacks a method that the pass needs."""

    def position_scores(self, requests: Any, completions: Any) -> Iterator[PositionScores]:
        raise AttributeError("no read_from")
        yield


def test_a_head_that_lacks_something_is_a_warning_if_it_is_another_packages(
    config: RunConfig,
    use_engine: Callable[[FakeEngine], FakeEngine],
    run_config: Callable[[], dict[str, Any]],
) -> None:
    """Catches a run that another package's drafter fails, and an error of ours that is hidden."""
    config.metrics.all_positions = True
    use_engine(Lacking())
    with pytest.raises(AttributeError, match="no read_from"):
        run_config()
    config.method.name = "bigram"
    use_engine(Lacking())
    summary = run_config()
    assert summary["status"] == "ok"
    assert any("fed whole texts: AttributeError: no read_from" in w for w in summary["warnings"])


@pytest.mark.parametrize(
    "typed",
    [
        ["engine=transformers"],
        ["parallelism=tp2"],
        ["method.verification=synthetic", "method.synthetic_acceptance_length=2"],
    ],
)
def test_where_there_is_no_such_record_it_is_refused(typed: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"metrics\.all_positions=true"):
        plan([*typed, "metrics.all_positions=true", "target.dtype=float32"])


@pytest.mark.parametrize("name", ["trace", "all_positions"])
def test_the_targets_tokenizer_gives_texts_of_tokens(config: RunConfig, name: str) -> None:
    config.target.checkpoint = "zoo:tiny_gemma4"
    assert decoder(config) is None, "no tokens are shown"
    setattr(config.metrics, name, True)
    decode = decoder(config)
    assert decode is not None
    assert decode([6]) == "!"
    assert decode([10**9]) == decode([10**30]) == decode([-1]) == ""
    for checkpoint in ("zoo:tiny_fake", "shape:gemma4_e4b"):
        config.target.checkpoint = checkpoint
        assert decoder(config) is None
