"""Workload files: every mistake is refused before the run, with file, line and remedy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from workload_lines import GOOD, read_lines

from hydraspec.config.schema import LogprobsMode, RunConfig
from hydraspec.types import ConfigurationError, SamplingParams, WorkloadError
from hydraspec.workloads import reading as workloads
from hydraspec.workloads.generated import random_requests
from hydraspec.workloads.reading import request_seed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lines.jsonl"


BAD_LINES = {
    "not JSON": ("{prompt: 1}", "not JSON: Expecting property name"),
    "NaN": ('{"prompt": "a", "sampling": {"temperature": NaN}}', "NaN is no JSON number"),
    "a number of 5000 digits": ('{"max_tokens": ' + "9" * 5000 + "}", "not a workload line"),
    "infinite answer": ('{"prompt": "a", "answer": 1e400}', "1e400 is infinite as a float"),
    "infinite in meta": ('{"prompt": "a", "meta": {"a": [-1e999]}}', "-1e999 is infinite"),
    "meta very deep": (
        '{"prompt": "a", "meta": {"a": ' + "[" * 60 + "]" * 60 + "}}",
        "meta: is nested too deeply; allowed are 50 levels",
    ),
    "no object": ([1, 2], "must be a JSON object, not list"),
    "misspelt key": ({"prmopt": "a"}, "unknown key 'prmopt'; did you mean 'prompt'?"),
    "unknown key": ({**GOOD, "xyzzy": 1}, "unknown key 'xyzzy'. Allowed: id, prompt"),
    "misplaced key": ({**GOOD, "temperature": 1}, "'temperature' belongs inside \"sampling\""),
    "misplaced limit": ({**GOOD, "sampling": {"max_tokens": 1}}, 'belongs beside "sampling"'),
    "misspelt sampling": (
        {**GOOD, "sampling": {"temprature": 1}},
        "unknown key 'sampling.temprature'; did you mean 'temperature'?",
    ),
    "no prompt": ({"id": "a"}, "exactly one of prompt, messages, prompt_token_ids, turns; it"),
    "null prompt": ({"prompt": None}, "it has none of them"),
    "two prompts": ({**GOOD, "prompt_token_ids": [1]}, "it has prompt and prompt_token_ids"),
    "empty prompt": ({"prompt": ""}, 'prompt: "" is not allowed'),
    "blank prompt": ({"prompt": " \n"}, "with something in it"),
    "prompt of another type": ({"prompt": 3}, "prompt: 3 is not allowed"),
    "no ids": ({"prompt_token_ids": []}, "non-empty list of token ids"),
    "negative id": ({"prompt_token_ids": [3, -1]}, "prompt_token_ids: -1 is not allowed"),
    "fractional id": ({"prompt_token_ids": [1.5]}, "prompt_token_ids: 1.5 is not allowed"),
    "boolean id": ({"prompt_token_ids": [True]}, "prompt_token_ids: true is not allowed"),
    "no messages": ({"messages": []}, "messages: [] is not allowed"),
    "message without content": ({"messages": [{"role": "user"}]}, "messages: {"),
    "empty message": ({"messages": [{"role": "user", "content": ""}]}, "messages: {"),
    "user twice": (
        {"messages": [{"role": "user", "content": c} for c in "ab"]},
        "messages[1]: role 'user' comes twice in a row; user and assistant alternate",
    ),
    "assistant first": (
        {"messages": [{"role": r, "content": "a"} for r in ("system", "assistant", "user")]},
        "messages[1]: the user speaks before the assistant",
    ),
    "assistant last": (
        {"messages": [{"role": r, "content": "a"} for r in ("user", "assistant")]},
        "messages[1]: the last message is the assistant's",
    ),
    "no turns": ({"turns": []}, "turns: [] is not allowed; it must be a non-empty list"),
    "turns no list": ({"turns": "a"}, 'turns: "a" is not allowed'),
    "blank turn": ({"turns": ["a", " "]}, 'turns[1]: " " is not allowed'),
    "turns of two kinds": ({"turns": ["a", [1]]}, "turns[1]: [1] is not allowed"),
    "turns of two kinds, ids first": ({"turns": [[1], "a"]}, 'turns[1]: "a" is not allowed'),
    "turn without ids": ({"turns": [[1], []]}, "turns[1]: [] is not allowed; it must be a non-emp"),
    "bad id in a turn": ({"turns": [[1], [-2]]}, "turns[1]: -2 is not allowed"),
    "turns beside prompt": ({**GOOD, "turns": ["a"]}, "it has prompt and turns"),
    "system alone": ({**GOOD, "system": "a"}, '"system" belongs to "turns"'),
    "system of ids": ({"turns": [[1]], "system": "a"}, '"system" is text'),
    "system no text": ({"turns": ["a"], "system": 1}, "system: 1 is not allowed"),
    "answers of some turns": ({"turns": ["a", "b"], "answer": ["1"]}, "or a list of 2"),
    "bad id": ({**GOOD, "id": ""}, 'id: "" is not allowed'),
    "bad category": ({**GOOD, "category": 3}, "category: 3 is not allowed; it must be a string"),
    "bad answer": ({**GOOD, "answer": [3]}, "answer: [3] is not allowed"),
    "max_tokens 0": ({**GOOD, "max_tokens": 0}, "max_tokens: 0 is not allowed"),
    "max_tokens true": ({**GOOD, "max_tokens": True}, "max_tokens: true is not allowed"),
    "sampling no object": ({**GOOD, "sampling": 1}, "sampling: 1 is not allowed"),
    "temperature": ({**GOOD, "sampling": {"temperature": -1}}, "sampling.temperature: -1 is not"),
    "top_k": ({**GOOD, "sampling": {"top_k": -1}}, "whole number, 0 (off) to 2147483647; to"),
    "top_p 0": ({**GOOD, "sampling": {"top_p": 0}}, "top_p: 0 is not allowed; it must be above"),
    "min_p": ({**GOOD, "sampling": {"min_p": 1}}, "min_p: 1 is not allowed; it must be 0 (off)"),
    "temperature like 0": ({**GOOD, "sampling": {"temperature": 1e-50}}, "0 (greedy), or 0.0001"),
    "temperature like 0.0": ({**GOOD, "sampling": {"temperature": 9.9e-5}}, "write 0"),
    "temperature 101": ({**GOOD, "sampling": {"temperature": 101}}, "0.0001 to 100"),
    "temperature true": ({**GOOD, "sampling": {"temperature": True}}, "true is not allowed"),
    "temperature text": ({**GOOD, "sampling": {"temperature": "1"}}, '"1" is not allowed'),
    "temperature of 400 digits": ({**GOOD, "sampling": {"temperature": 10**400}}, "0.0001 to"),
    "top_k of 21 digits": ({**GOOD, "sampling": {"top_k": 10**20}}, "top_k: 1000000000"),
    "top_k 1.5": ({**GOOD, "sampling": {"top_k": 1.5}}, "top_k: 1.5 is not allowed"),
    "max_tokens of 32 bits": ({**GOOD, "max_tokens": 2**31}, "1 to 2147483647"),
    "stop id of 32 bits": (
        {**GOOD, "sampling": {"stop_token_ids": [1, 2**31]}},
        "sampling.stop_token_ids[1]: 2147483648 is not allowed",
    ),
    "half a character": ({"prompt": "\ud800 x"}, r"prompt: '\ud800' is half a character"),
    "half in id": ({**GOOD, "id": "\udfff"}, r"id: '\udfff'"),
    "half in category": ({**GOOD, "category": "\ud800"}, "category: "),
    "half in answer": ({**GOOD, "answer": "\ud800"}, "answer: "),
    "half in messages": ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages: "),
    "half in stop": ({**GOOD, "sampling": {"stop": ["\ud800"]}}, "sampling: "),
    "half in a key": ({**GOOD, "\ud800": 1}, r"\ud800: '\ud800' is half"),
    "key twice": ('{"prompt": "a", "prompt": "b"}', "key 'prompt' stands twice"),
    "key twice inside": (
        '{"prompt": "a", "sampling": {"seed": 1, "seed": 1}}',
        "key 'seed' stands twice in one object; keep one of the two",
    ),
    "seed": ({**GOOD, "sampling": {"seed": 2**63}}, "sampling.seed: 9223372036854775808"),
    "stop": ({**GOOD, "sampling": {"stop": [""]}}, "a non-empty string or a list of them"),
    "stop ids": ({**GOOD, "sampling": {"stop_token_ids": [-1]}}, "stop_token_ids[0]: -1 is not"),
    "stop ids no list": ({**GOOD, "sampling": {"stop_token_ids": 1}}, "a list of whole numbers"),
    "ignore_eos": ({**GOOD, "sampling": {"ignore_eos": 1}}, "true or false"),
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_is_refused_with_its_place(
    config: RunConfig, path: Path, line: Any, message: str
) -> None:
    with pytest.raises(WorkloadError) as caught:
        read_lines(config, path, GOOD, "", line)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert caught.value.exit_code == 3


def test_files_that_cannot_be_used(config: RunConfig, path: Path, tmp_path: Path) -> None:
    config.workload.path = str(tmp_path / "missing.jsonl")
    with pytest.raises(WorkloadError, match="cannot be read: No such file"):
        workloads.read(config)
    config.workload.path = "zoo:nothing"
    with pytest.raises(WorkloadError, match=r"ships .*zoo:tiny"):
        workloads.read(config)
    config.workload.path = None
    with pytest.raises(WorkloadError, match=r"workload\.path is null"):
        workloads.read(config)
    with pytest.raises(WorkloadError, match="there is no request in it"):
        read_lines(config, path, "", "  ")
    with pytest.raises(WorkloadError, match=r":2: id: 'a' is the id of .*:1 already"):
        read_lines(config, path, {**GOOD, "id": "a"}, {**GOOD, "id": "a"})
    path.write_bytes(b'{"prompt": "\xff"}')
    config.workload.path = str(path)
    with pytest.raises(WorkloadError, match="not UTF-8 text"):
        workloads.read(config)


def test_a_line_overrides_the_defaults(config: RunConfig, path: Path) -> None:
    config.sampling.temperature, config.sampling.stop = 0.7, ["END"]
    config.sampling.stop_token_ids, config.sampling.max_tokens = [5], 11
    full = {
        "id": 7,
        "messages": [{"role": "user", "content": "hi"}],
        "category": "chat",
        "answer": 3,
        "max_tokens": 2,
        "sampling": {"temperature": 0, "seed": 9, "stop": "x", "stop_token_ids": [1, 2]},
    }
    first, second = read_lines(config, path, GOOD, full).requests
    seed = request_seed(config.seed, 0)
    assert first.sampling == SamplingParams(
        temperature=0.7, stop=("END",), stop_token_ids=(5,), max_tokens=11, seed=seed
    )
    assert (first.id, first.index, first.prompt) == ("0", 0, "hello")
    assert second.sampling == SamplingParams(
        temperature=0, stop=("x",), stop_token_ids=(1, 2), max_tokens=2, seed=9
    )
    assert (second.id, second.category, second.answer) == ("7", "chat", "3")


def test_a_key_that_every_line_overrides_is_warned_about(config: RunConfig, path: Path) -> None:
    config.sampling.max_tokens, config.sampling.top_p, config.sampling.stop = 1, 0.5, ["x"]
    own = {**GOOD, "max_tokens": 9, "sampling": {"stop": ["y"]}}
    workload = read_lines(config, path, own, {**own, "sampling": {"top_p": 0.9, "stop": "z"}})
    tail = "has no effect: every line of the workload has its own"
    assert workload.warnings == [f"sampling.max_tokens=1 {tail}", f"sampling.stop=[x] {tail}"]
    workload = read_lines(config, path, own, {**own, "max_tokens": None, "sampling": None})
    assert workload.warnings == []


def test_a_mode_of_log_probabilities_without_any_is_warned_about(
    config: RunConfig, path: Path
) -> None:
    config.sampling.logprobs_mode = LogprobsMode.processed
    assert read_lines(config, path, {**GOOD, "sampling": {"logprobs": 0}}).warnings == []
    (warning,) = read_lines(config, path, GOOD).warnings
    assert warning == "sampling.logprobs_mode=processed has no effect: no request has logprobs"


def test_default_values_that_lines_override_need_no_warning(config: RunConfig, path: Path) -> None:
    line = {**GOOD, "max_tokens": 9, "sampling": {"temperature": 1}}
    assert read_lines(config, path, line).warnings == []


def test_limit_reads_no_further(config: RunConfig, path: Path) -> None:
    config.workload.limit = 2
    assert len(read_lines(config, path, GOOD, "", GOOD, "{broken").requests) == 2


@pytest.mark.parametrize("limit", [1, 2, 3, 4, None])
def test_lines_beyond_the_limit_are_counted(
    config: RunConfig, path: Path, limit: int | None
) -> None:
    """Catches blank lines that count, and the line counted twice at which reading stops."""
    config.workload.limit = limit
    found = read_lines(config, path, GOOD, "", GOOD, "", GOOD, "")
    assert (found.num_lines, found.num_lines_in_all) == (min(limit or 3, 3), 3)


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ({"prompt_token_ids": [9, 10]}, r"prompt_token_ids"),
        ({"turns": [[1], [2, 10]]}, r"turns\[1\]"),
        ({**GOOD, "sampling": {"stop_token_ids": [9, 10]}}, r"sampling\.stop_token_ids"),
    ],
)
def test_token_ids_are_checked_against_the_vocabulary(
    config: RunConfig, path: Path, line: Any, key: str
) -> None:
    workload = read_lines(config, path, GOOD, line)
    workload.check_vocabulary(11)
    with pytest.raises(WorkloadError, match=rf":2: {key}: 10 is outside .* of 10 tokens"):
        workload.check_vocabulary(10)
    config.sampling.stop_token_ids = [3, 10]
    workloads.check_configured_ids(config, 11)
    with pytest.raises(ConfigurationError, match=r"(?s)stop_token_ids\[1\]=10 .*allowed: 0 to 9"):
        workloads.check_configured_ids(config, 10)


def test_edges_of_the_ranges_are_allowed(config: RunConfig, path: Path) -> None:
    edges = [
        {"temperature": 1e-4, "top_k": 2**31 - 1, "top_p": 1e-9, "min_p": 0.999, "seed": 2**63 - 1},
        {"temperature": 100, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 0},
        {"temperature": 0, "stop_token_ids": [0, 2**31 - 1], "stop": "\U0001f600"},
    ]
    lines = [{**GOOD, "max_tokens": 2**31 - 1, "sampling": edge} for edge in edges]
    assert len(read_lines(config, path, *lines).requests) == 3


def test_the_zoo_workload_can_be_read(config: RunConfig) -> None:
    config.workload.path = "zoo:tiny"
    config.sampling.max_tokens = 1  # its lines leave it to the key
    workload = workloads.read(config)
    assert workload is not None
    assert workload.warnings == []
    assert {r.sampling.max_tokens for r in workload.requests} == {1}
    assert len(workload.requests) >= 64
    assert {r.answer is not None for r in workload.requests} == {True}


def test_random_requests_are_seeded_and_inside_the_vocabulary(config: RunConfig) -> None:
    config.workload.name = "random"
    config.workload.num_requests, config.workload.prompt_tokens = 3, 40
    assert workloads.read(config) is None
    one, same = (random_requests(config, 13).requests for _ in range(2))
    assert [r.prompt_token_ids for r in one] == [r.prompt_token_ids for r in same]
    assert {len(r.prompt_token_ids or []) for r in one} == {40}
    assert {t for r in one for t in r.prompt_token_ids or []} == set(range(13))
    assert all(r.sampling.ignore_eos and r.sampling.max_tokens == 256 for r in one)
    config.seed = 1
    other = random_requests(config, 13).requests
    assert one[0].prompt_token_ids != other[0].prompt_token_ids


def test_request_seeds_differ_and_fit_a_signed_word() -> None:
    """Catches seed + index, which would share streams between neighbouring runs."""
    seeds = [request_seed(seed, index) for seed in range(50) for index in range(200)]
    assert len(set(seeds)) == len(seeds)
    assert 0 <= min(seeds) <= max(seeds) < 2**63
    assert request_seed(0, 0) == 1534736266818221247, "published runs must stay repeatable"


@pytest.mark.parametrize("kind", ["FIFO", "folder", "device"])
def test_a_workload_that_is_no_file_is_refused_without_waiting(
    config: RunConfig, tmp_path: Path, kind: str
) -> None:
    """Catches a run that waits for a writer, or reads /dev/zero until the memory is full."""
    path = tmp_path / "workload"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    config.workload.path = str(path)
    with pytest.raises(WorkloadError, match=f"is a {kind}; give the path of a file"):
        workloads.read(config)
