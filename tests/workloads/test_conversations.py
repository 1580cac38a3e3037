"""Conversations in workload files, workload=multi_turn and workload=shared_prefix."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from workload_lines import GOOD, read_lines

from hydraspec.config.schema import RunConfig
from hydraspec.types import ConfigurationError, WorkloadError
from hydraspec.workloads import reading as workloads
from hydraspec.workloads.generated import random_requests
from hydraspec.workloads.reading import request_seed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lines.jsonl"


def test_turns_become_requests_that_follow_each_other(config: RunConfig, path: Path) -> None:
    line = {"turns": ["a", "b", "c"], "system": "s", "category": "k", "meta": {"m": 1}}
    line |= {"answer": "3", "max_tokens": 7, "sampling": {"temperature": 0.5}}
    requests = read_lines(config, path, GOOD, line, {"turns": [[1, 2], [3]], "id": "x"}).requests
    assert [r.id for r in requests] == ["0", "1/1", "1/2", "1/3", "x/1", "x/2"]
    assert [r.after for r in requests] == [None, None, 1, 2, None, 4]
    assert [r.turn for r in requests] == [1, 1, 2, 3, 1, 2]
    assert requests[1].messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
    ]
    assert requests[2].messages == [{"role": "user", "content": "b"}]
    assert [r.prompt_token_ids for r in requests[4:]] == [[1, 2], [3]]
    assert [r.answer for r in requests[1:4]] == [None, None, "3"]
    for request in requests[1:4]:
        assert (request.category, request.meta) == ("k", {"m": 1})
        assert (request.sampling.max_tokens, request.sampling.temperature) == (7, 0.5)
        assert request.sampling.seed == request_seed(config.seed, request.index)


def test_each_turn_may_have_its_answer(config: RunConfig, path: Path) -> None:
    line = {"turns": ["a", "b", "c"], "answer": ["1", None, 3]}
    assert [r.answer for r in read_lines(config, path, line).requests] == ["1", None, "3"]


def test_the_limit_counts_lines_and_ids_of_turns_must_differ(config: RunConfig, path: Path) -> None:
    config.workload.limit = 2
    lines = [{"turns": ["a", "b"]}, GOOD, {**GOOD, "id": "0/2"}]
    assert len(read_lines(config, path, *lines).requests) == 3
    config.workload.limit = None
    with pytest.raises(WorkloadError, match=f"{path}:3: id: '0/2' is the id of {path}:1 already"):
        read_lines(config, path, *lines)


def test_a_message_list_of_several_turns_is_one_request(config: RunConfig, path: Path) -> None:
    roles = ("system", "user", "assistant", "tool", "assistant", "user")
    messages = [{"role": role, "content": "a"} for role in roles]
    (request,) = read_lines(config, path, {"messages": messages}).requests
    assert (request.messages, request.after) == (messages, None)


def test_shared_prefixes_are_shared_by_as_many_requests_as_it_says(config: RunConfig) -> None:
    size = config.workload
    size.name, size.path = "shared_prefix", None
    size.num_prefixes, size.requests_per_prefix = 3, 4
    size.prefix_tokens, size.suffix_tokens, size.output_tokens = 16, 5, 7
    requests = random_requests(config, 1000).requests
    prompts = [r.prompt_token_ids or [] for r in requests]
    assert list(Counter(tuple(p[:16]) for p in prompts).values()) == [4, 4, 4]
    assert len({tuple(p[16:]) for p in prompts}) == 12
    assert {len(p) for p in prompts} == {21}
    assert {(r.sampling.max_tokens, r.sampling.ignore_eos, r.after) for r in requests} == {
        (7, True, None)
    }
    firsts = [r.id.split("/")[0] for r in requests]
    assert firsts != sorted(firsts), "prefixes are mixed"
    assert sorted(r.id for r in requests) == sorted(
        f"{p}/{n}" for p in range(3) for n in (1, 2, 3, 4)
    )
    again = random_requests(config, 1000).requests
    assert [r.prompt_token_ids for r in again] == prompts
    size.limit = 5
    assert [r.prompt_token_ids for r in random_requests(config, 1000).requests] == prompts[:5]


def test_conversations_of_random_tokens(config: RunConfig) -> None:
    size = config.workload
    size.name, size.path = "multi_turn", None
    size.num_conversations, size.num_turns, size.turn_tokens, size.output_tokens = 3, 2, 9, 4
    assert workloads.read(config) is None
    requests = random_requests(config, 1000).requests
    assert [r.id for r in requests] == ["0/1", "0/2", "1/1", "1/2", "2/1", "2/2"]
    assert [r.after for r in requests] == [None, 0, None, 2, None, 4]
    assert [r.turn for r in requests] == [1, 2] * 3
    assert {len(r.prompt_token_ids or []) for r in requests} == {9}
    size.limit = 2
    assert len(random_requests(config, 1000).requests) == 4


def test_conversations_of_the_zoos_prompts(config: RunConfig) -> None:
    """Each turn keeps its line's answer and category."""
    size = config.workload
    size.path = "zoo:tiny"
    lines = workloads.read(config)
    size.name, size.num_conversations, size.num_turns = "multi_turn", 5, 3
    found = workloads.read(config)
    assert lines is not None
    assert found is not None
    assert [r.messages for r in found.requests] == [r.messages for r in lines.requests[:15]]
    assert [r.answer for r in found.requests] == [r.answer for r in lines.requests[:15]]
    assert [r.after for r in found.requests[:5]] == [None, 0, 1, None, 3]
    assert found.places["1/2"] == "zoo:tiny:5"
    size.num_conversations = 33
    with pytest.raises(ConfigurationError, match="need 99 lines, and zoo:tiny has 96"):
        workloads.read(config)


def test_lines_that_are_no_single_message_make_no_turns(config: RunConfig, path: Path) -> None:
    size = config.workload
    size.name, size.num_conversations, size.num_turns = "multi_turn", 1, 1
    with pytest.raises(WorkloadError, match=f"^{path}:1: workload=multi_turn makes turns of lines"):
        read_lines(config, path, GOOD)
