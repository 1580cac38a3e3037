"""Lines of requests.jsonl."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from records import completion, part, request

from hydraspec.lab.lost import _completion
from hydraspec.metrics.counters import RequestCounters, RunningTotals
from hydraspec.metrics.files import json_line
from hydraspec.metrics.sinks import request_row
from hydraspec.study.baseline import digest
from hydraspec.study.runs import key_of
from hydraspec.types import Completion, Span

IMAGE = Span(kind="image", start=1, length=2, digest="0a", may_be_cut=False)


def completion_of(*spans: Span) -> Completion:
    return completion(prompt_token_ids=[4, 5, 6], output_token_ids=[7], spans=spans)


def row_of(*spans: Span) -> dict[str, object]:
    counters, done = RequestCounters(index=0), completion_of(*spans)
    row = request_row(request(id="a"), done, counters, None, num_positions=1)
    found: dict[str, object] = json.loads(json_line(row))
    return found


def test_a_row_has_spans_only_where_the_prompt_has_any() -> None:
    assert "spans" not in row_of()
    assert row_of(IMAGE) == {**row_of(), "spans": [asdict(IMAGE)]}


def test_prompts_that_differ_in_a_spans_content_are_other_prompts() -> None:
    other = Span(kind="image", start=1, length=2, digest="0b", may_be_cut=False)
    keys = [key_of(row_of(*spans)) for spans in ((), (IMAGE,), (other,), (IMAGE,))]
    assert keys[0] == ("a", (4, 5, 6))
    assert keys[1] == keys[3]
    assert len(set(keys)) == len({digest(prompt) for _, prompt in keys}) == 3


@pytest.mark.parametrize("spans", [(), (IMAGE,)])
def test_a_growing_file_gives_a_completion_its_spans_back(spans: tuple[Span, ...]) -> None:
    done = completion_of(*spans)
    assert _completion(json.loads(json.dumps(asdict(done)))) == done


def test_acceptance_has_the_names_of_vllm_too() -> None:
    counters = RequestCounters(index=0)
    totals = RunningTotals()
    for drafts, accepted in ((3, 3), (3, 1), (1, 0), (0, 0), (2, 1)):
        counters.add(part(drafts=drafts, accepted=accepted), 0.0, totals)
    row = request_row(request(id="a"), completion_of(), counters, None, num_positions=4)
    assert row["speculative_decoding"] == {
        "mean_acceptance_length": 1 + 5 / 4,
        "draft_acceptance_rate": 5 / 9,
        "acceptance_histogram": [1, 2, 0, 1, 0],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 9,
    }
    assert row_of()["speculative_decoding"] is None
