"""What a step whose drafts are chosen costs more than one of a fixed K: nothing on the device where
every request gets K, and few choices on the host."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from graph_runs import graph_config, make_graph_engine, zoo_requests
from torch.utils._python_dispatch import TorchDispatchMode

from hydraspec.config.schema import PerStep
from hydraspec.engine.costs import CostTable
from hydraspec.engine.native import NativeEngine
from hydraspec.types import StepRecord

K, NUM_REQUESTS = 3, 4
# Drafts are worth their rows at any rate, so that every request has K of them.
CHEAP = CostTable(batches=(1,), drafts=tuple(range(K + 1)), step_ms=((10.0, 10.1, 10.2, 10.3),))


class Calls(TorchDispatchMode):
    """Counts the calls of torch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def calls_of_steps(engine: NativeEngine) -> list[Counter[str]]:
    """Calls of each step in which every request verified K drafts and the same ones ran before."""
    requests = zoo_requests(NUM_REQUESTS, ignore_eos=True)
    engine.tokenize(requests)
    found, size = [], 0
    with Calls() as calls:
        for event in engine.run(requests, concurrency=None):
            if isinstance(event, StepRecord):
                rows = [part.num_rows for part in event.requests if not part.is_prefill]
                if rows == [K + 1] * len(event.requests) and len(rows) == size:
                    found.append(calls.found.copy())
                calls.found.clear()
                size = len(event.requests)
    return found


@pytest.mark.parametrize("method", ["gemma4_mtp", "eagle3", "dspark"])
def test_a_step_of_equal_counts_is_that_of_a_fixed_number(method: str) -> None:
    """The same calls of the same operators, as many times."""
    fields = {"max_num_seqs": NUM_REQUESTS, "max_num_batched_tokens": 256, "max_model_len": 256}
    chosen = make_graph_engine(
        graph_config(method, "none", k=PerStep.auto, max_speculative_tokens=K, **fields), None
    )
    lengths = chosen.parts.scheduler.draft_lengths
    assert lengths is not None
    lengths.costs = CHEAP
    fixed = make_graph_engine(graph_config(method, "none", k=K, **fields), None)
    ours, theirs = calls_of_steps(chosen), calls_of_steps(fixed)
    assert len(ours) > 3
    assert ours == theirs
