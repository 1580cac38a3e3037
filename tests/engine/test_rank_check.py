"""parallelism.check: ranks that part company are named with the step."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from graph_runs import graph_config, run_requests, zoo_requests
from thread_ranks import as_ranks

from hydraspec.config.schema import RunConfig
from hydraspec.engine.native import NativeEngine
from hydraspec.engine.run.rank_check import RankCheck, RanksDiffer
from hydraspec.engine.run.results import StepResult
from hydraspec.parallel.layout import Layout
from hydraspec.parallel.ranks import Ranks


def checked_config() -> RunConfig:
    config = graph_config("eagle3", "none")
    config.parallelism.check = True
    return config


def test_ranks_that_agree_are_left_alone() -> None:
    """And the check is part of the engine: it ran once a step."""

    def work(ranks: Ranks) -> tuple[list[list[int]], int]:
        engine = NativeEngine(checked_config())
        check = engine.parts.check
        assert check is not None
        steps: list[int] = []
        compare = check.compare
        check.compare = lambda step, *found: (steps.append(step), compare(step, *found))[1]
        run = run_requests(engine, zoo_requests(2, longest=6))
        assert steps == list(range(len(run.batch_sizes)))
        return run.tokens, len(steps)

    (tokens, count), other = as_ranks(Layout(tensor=2), work)
    assert other == (tokens, count)
    assert count > 2


def test_a_rank_that_chooses_another_token_is_found() -> None:
    """In the step in which it does: later ones would differ in everything."""
    errors: dict[int, str] = {}
    together = threading.Barrier(2)

    def work(ranks: Ranks) -> None:
        engine = NativeEngine(checked_config())
        runner = engine.parts.runner
        verify, calls = runner.verify, []

        def other(batch, target_step):  # type: ignore[no-untyped-def]
            verdict = verify(batch, target_step)
            calls.append(1)
            if ranks.rank == 1 and len(calls) == 4:
                verdict.tokens[0, 0] += 1
            return verdict

        runner.verify = other  # type: ignore[method-assign]
        try:
            run_requests(engine, zoo_requests(2, longest=6))
        except RanksDiffer as error:
            errors[ranks.rank] = str(error)
        together.wait(60)

    as_ranks(Layout(tensor=2), work)
    assert sorted(errors) == [0, 1]
    for message in errors.values():
        assert (
            "in step 3 the tokens of tensor-parallel rank 1 differ from those of rank 0" in message
        )


@pytest.mark.parametrize("part", ["step number", "rows", "tokens", "counts", "drafts"])
def test_every_part_of_a_result_is_compared(part: str) -> None:
    """Of four ranks two are wrong; both are named, and what they have wrong."""

    def work(ranks: Ranks) -> str:
        tokens, drafts = np.array([[5, -1], [7, 8]]), np.array([[3], [7]])
        count, wrong = np.array([1, 2]), int(ranks.rank in (1, 3))
        result = StepResult(
            tokens=tokens + wrong * (part == "tokens"),
            num_sampled=count + wrong * (part == "counts"),
            not_finite=np.array([0, 0]),
            draft_tokens=drafts[: 2 - wrong * (part == "drafts")],
        )
        check = RankCheck(ranks.group, torch.device("cpu"))
        rows = np.array([[16 * (1 - wrong * (part == "rows")), 4]])  # a rank without the hit
        with pytest.raises(RanksDiffer) as caught:
            check.compare(9 + wrong * (part == "step number"), rows, result)
        return str(caught.value)

    for message in as_ranks(Layout(tensor=4), work):
        assert f"the {part} of tensor-parallel ranks 1, 3 differ" in message


def test_one_process_has_nothing_to_compare() -> None:
    """The key is legal there, and costs nothing."""
    assert NativeEngine(checked_config()).parts.check is None
