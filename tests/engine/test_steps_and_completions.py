"""What steps say of a request and what its completion says are the same tokens."""

from __future__ import annotations

from collections import defaultdict

from graph_runs import graph_config, make_graph_engine, zoo_requests

from hydraspec.metrics.meter import Meter
from hydraspec.types import Completion, RequestStep, StepRecord


def test_first_tokens_and_cut_last_steps_are_counted_once() -> None:
    """The first token comes without a draft and is no draft's; of a last step that a limit cuts,
    the tokens that were kept are output, and the drafts that were accepted are accepted.
    """
    engine = make_graph_engine(graph_config("gemma4_mtp", "none", k=4), None)
    requests = zoo_requests(4)
    meter = Meter(requests, num_speculative_tokens=4)
    parts: dict[int, list[RequestStep]] = defaultdict(list)
    done: dict[int, Completion] = {}
    engine.tokenize(requests)
    for event in engine.run(requests, concurrency=3):
        if isinstance(event, StepRecord):
            meter.add_step(event)
            for part in event.requests:
                parts[part.index].append(part)
        else:
            meter.add_completion(event)
            done[event.index] = event
    num_cut = 0
    for index, steps in parts.items():
        output = [token for part in steps for token in part.output_token_ids]
        assert output == done[index].output_token_ids
        first = next(part for part in steps if part.output_token_ids)
        assert first.is_prefill
        assert (first.draft_token_ids, len(first.output_token_ids)) == ([], 1)
        verified = [part for part in steps if not part.is_prefill]
        for part in verified[:-1]:
            assert len(part.output_token_ids) == part.num_accepted + 1
        last = verified[-1]
        assert 1 <= len(last.output_token_ids) <= last.num_accepted + 1
        num_cut += len(last.output_token_ids) <= last.num_accepted
    assert num_cut > 0, "no accepted draft was cut"
    drafted = [part for steps in parts.values() for part in steps if part.draft_token_ids]
    assert meter.num_drafts() == len(drafted)
    assert meter.num_accepted_tokens() == sum(part.num_accepted for part in drafted)
    assert meter.num_output_tokens() == sum(len(d.output_token_ids) for d in done.values())
