"""Ranks choose the same number of drafts in every step, over costs that rank 0 measured, and give
what one process gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graph_runs import graph_config, make_graph_engine, run_requests
from many_ranks import few, over_ranks, requests_of

from hydraspec.config.schema import PerStep
from hydraspec.engine.base import Engine
from hydraspec.parallel.layout import Layout
from hydraspec.types import Completion, StepRecord

LAYOUTS = {
    "tensor": Layout(tensor=2),
    "pipeline": Layout(pipeline=2),
    "data": Layout(data=2),
    "all": Layout(tensor=2, pipeline=2, data=2),
}
AT_ONCE = 3  # requests


@pytest.mark.slow
@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("method", ["eagle3", "gemma4_mtp", "peagle", "dspark"])
@pytest.mark.parametrize("axis", LAYOUTS)
def test_ranks_choose_alike(axis: str, method: str, is_ahead: bool) -> None:
    """A rank that chose another number would send rows that the others do not expect, or compare
    unequal (parallelism.check). Costs are of batches of AT_ONCE requests at most, on all replicas
    together; larger steps take those of the largest."""
    layout = LAYOUTS[axis]
    config = graph_config(method, "none", k=PerStep.auto, max_speculative_tokens=3)
    config.parallelism = replace(
        config.parallelism,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        data=layout.data,
        check=layout.tensor > 1,
    )
    config.engine.async_scheduling = is_ahead

    def lab(engine: Engine) -> tuple[dict[int, list[int]], set[int]]:
        requests = requests_of(engine)
        engine.prepare(requests, concurrency=AT_ONCE)
        assert engine.info.costs is not None
        of_replica = -(-AT_ONCE // layout.data)
        assert engine.info.costs.batches[-1] == -(-of_replica // layout.pipeline)
        tokens, lengths = {}, set()
        for event in engine.run(requests, concurrency=None):
            if isinstance(event, Completion):
                assert event.error is None
                tokens[event.index] = event.output_token_ids
            elif isinstance(event, StepRecord):
                assert event.draft_length is not None
                lengths.add(event.draft_length)
        return tokens, lengths

    tokens, lengths = over_ranks(layout, config, lab, splits=True)
    plain = graph_config("none", "none", pair=(config.target.checkpoint.partition(":")[2], None))
    wanted = run_requests(make_graph_engine(plain, None), few()).tokens
    assert [tokens[index] for index in sorted(tokens)] == wanted
    assert lengths <= {0, 1, 2, 3}
