"""A baseline shares its origin's cache: two runs at once would overwrite each other's keys and
values, so the second one is refused."""

from __future__ import annotations

from contextlib import closing

import pytest
from graph_runs import graph_config, make_graph_engine, run_requests, zoo_requests


def test_a_baseline_does_not_run_while_its_origin_does() -> None:
    engine = make_graph_engine(graph_config("gemma4_mtp", "none"), None)
    baseline = engine.baseline()
    alone = run_requests(baseline, zoo_requests(3, longest=6), concurrency=3)
    requests = zoo_requests(2)
    engine.tokenize(requests)
    with closing(engine.run(requests, concurrency=2)) as events:
        next(events)
        for other in (baseline, engine):
            with pytest.raises(RuntimeError, match="another run uses this KV cache"):
                next(other.run(requests, concurrency=1))
        next(events)  # the run that was there first goes on
    again = run_requests(baseline, zoo_requests(3, longest=6), concurrency=3)
    assert again.outputs == alone.outputs
