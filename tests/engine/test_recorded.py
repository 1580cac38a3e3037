"""Acceptance recorded in a run and followed by requests of another one, request by request."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graph_runs import attention_as_on_devices, graph_config, make_graph_engine, zoo_requests
from grids import every_third
from many_ranks import over_ranks
from recorded_graphs import RecordedOps

from hydraspec.config.schema import MethodConfig, PerStep, RunConfig, Verification
from hydraspec.engine.base import Engine
from hydraspec.engine.costs import filled_to
from hydraspec.engine.native import NativeEngine
from hydraspec.engine.recorded import Recorded, read_recorded
from hydraspec.errors import ConfigurationError
from hydraspec.parallel.layout import Layout
from hydraspec.types import Completion, Request, StepRecord

K = 3
LENGTHS = {"a": [3, 0, 1, 3, 2], "b": [0, 0, 2], "c": [1, 1, 1, 1]}  # accepted, step by step
# By place: of the two steps of a that accepted all three drafts, of which two thirds go on, the
# later one does, with the 2 of the next step after its bonus token.
COUNTS = {
    (3, 0, 1, 3, 2): [3, 2, 1, 0, 0, 1, 0, 3, 3, 3, 3, 2, 1, 0],
    (0, 0, 2): [0, 0, 2, 1, 0],
    (1, 1, 1, 1): [1, 0, 1, 0, 1, 0, 1, 0],
}
PROMPTS = {"a": 7, "b": 4, "c": 9}


def write_run(folder: Path, *, traced: bool = True, k: int = K) -> Path:
    """A run's requests.jsonl, and its trace: a token of the prompt's step, then LENGTHS."""
    rows, steps = [], []
    for number, (name, lengths) in enumerate(LENGTHS.items()):
        num_prompt, place = PROMPTS[name], PROMPTS[name]
        for accepted in lengths:
            steps.append({"request": name, "num_computed_tokens": place, "num_accepted": accepted})
            place += accepted + 1
        row = {
            "id": name,
            "category": "code" if number == 1 else "text",
            "prompt_token_ids": [0] * num_prompt,
            "output_token_ids": [0] * (place + 1 - num_prompt),
            "num_drafts": len(lengths),
            "drafted_per_position": [len(lengths)] * k,
            "accepted_per_position": [sum(n > i for n in lengths) for i in range(k)],
        }
        rows.append(row)
    folder.mkdir(exist_ok=True)
    write_lines(folder / "requests.jsonl", rows)
    if traced:
        write_lines(folder / "trace.jsonl", steps)
    return folder


def write_lines(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def method(trace: Path, **fields: Any) -> MethodConfig:
    fields = {"num_speculative_tokens": K, **fields}
    return MethodConfig(name="eagle3", synthetic_trace=str(trace), **fields)


def following(trace: Path, k: int | PerStep = K, mode: str = "none", **fields: Any) -> RunConfig:
    config = graph_config("eagle3", mode, k=k, verification=Verification.synthetic, sizes=(5,))
    config.method = replace(config.method, synthetic_trace=str(trace), **fields)
    return config


def accepted_of(engine: NativeEngine, requests: list[Request]) -> dict[int, list[int]]:
    """Drafts accepted in each verify step, by request."""
    engine.tokenize(requests)
    return accepted_by(engine, requests)


def accepted_by(engine: Engine, requests: list[Request]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for event in engine.run(requests, concurrency=4):
        if isinstance(event, Completion):
            assert event.error is None
            continue
        assert isinstance(event, StepRecord)
        for part in event.requests:
            if part.draft_token_ids:
                found.setdefault(part.index, []).append(part.num_accepted)
    return found


def long_requests(count: int, **sampling: Any) -> list[Request]:
    return [
        replace(each, sampling=replace(each.sampling, max_tokens=20, ignore_eos=True))
        for each in zoo_requests(count, **sampling)
    ]


def in_turn(lengths: list[int], k: int, num_steps: int) -> list[int]:
    """What the definition says of so many steps."""
    counts = COUNTS[tuple(lengths)]
    place, found = 0, []
    for _ in range(num_steps):
        found.append(min(k, counts[place % len(counts)]))
        place += found[-1] + 1
    return found


Engines = Callable[[int, str], NativeEngine]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Engines that follow the run, by K and graph mode: made once for greedy and sampled ones."""
    folder = write_run(tmp_path_factory.mktemp("run"))

    @cache
    def made(k: int, mode: str) -> NativeEngine:
        backend = RecordedOps() if mode == "full" else None
        return make_graph_engine(following(folder, k, mode), backend)

    return made


@pytest.mark.parametrize(
    ("k", "mode", "temperature"), every_third((1, 2, 3), ("none", "full"), (0.0, 0.9))
)
def test_requests_accept_what_was_recorded(
    k: int, mode: str, temperature: float, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step by step and in turn, again from the beginning where the record ends; fewer drafts follow
    the same process. Greedy and sampled, in graphs and not, as slots get other owners."""
    if mode == "full":
        attention_as_on_devices(monkeypatch)
    engine = engines(k, mode)
    found = accepted_of(engine, long_requests(7, temperature=temperature))
    for index, lengths in found.items():
        recorded = LENGTHS["abc"[index % 3]]
        # The last step may have fewer drafts, at the end of the length.
        assert lengths[:-1] == in_turn(recorded, k, len(lengths) - 1), index
    assert len(found) == 7
    assert k < 3 or found[0][:5] == LENGTHS["a"]


def test_every_second_request_is_undraftable_and_the_others_stay(tmp_path: Path) -> None:
    config = following(write_run(tmp_path), synthetic_undraftable=0.5)
    found = accepted_of(make_graph_engine(config, None), long_requests(6))
    for index, lengths in found.items():
        if index % 2:
            assert set(lengths) == {0}
        else:
            recorded = LENGTHS["abc"[index % 3]]
            assert lengths[:-1] == in_turn(recorded, K, len(lengths) - 1)


def test_a_number_of_drafts_per_step_follows_the_same_record(tmp_path: Path) -> None:
    config = following(write_run(tmp_path), PerStep.auto, max_speculative_tokens=K)
    engine = make_graph_engine(config, None)
    lengths = engine.parts.scheduler.draft_lengths
    assert lengths is not None
    lengths.follow(iter([2] * 1000))
    found = accepted_of(engine, long_requests(2))
    assert found[0][1:-1] == in_turn(LENGTHS["a"], 2, len(found[0]) - 1)[1:]


def test_a_baseline_and_plain_decoding_follow_nothing(tmp_path: Path) -> None:
    engine = make_graph_engine(following(write_run(tmp_path)), None)
    plain = engine.baseline()
    assert plain.parts.runner.state.accepts is None
    assert accepted_of(plain, long_requests(2)) == {}


def test_a_category_alone_is_followed(tmp_path: Path) -> None:
    found = read_recorded(method(write_run(tmp_path), synthetic_category="code"))
    assert found is not None
    assert [each.tolist() for each in found.counts] == [[0, 0, 2, 1, 0]]
    everything = read_recorded(method(tmp_path))
    assert everything is not None
    assert [each.tolist() for each in everything.counts] == list(COUNTS.values())


def test_counts_without_a_trace_are_spread_with_the_same_sums(tmp_path: Path) -> None:
    """Steps of each number of accepted drafts are as many; their order is even."""
    found = read_recorded(method(write_run(tmp_path, traced=False) / "requests.jsonl"))
    assert found is not None
    for counts, lengths in zip(found.counts, LENGTHS.values(), strict=True):
        assert len(counts) == sum(lengths) + len(lengths)
        place, seen = 0, []
        while place < len(counts):
            seen.append(int(counts[place]))
            place += seen[-1] + 1
        assert sorted(seen) == sorted(lengths)
    assert found.counts[1].tolist() == [0, 2, 1, 0, 0]


@pytest.mark.parametrize(
    ("share", "wanted"),
    [
        (0.0, []),
        (1.0, [*range(8)]),
        (0.5, [1, 3, 5, 7]),
        (0.25, [3, 7]),
        (0.75, [1, 2, 3, 5, 6, 7]),
    ],
)
def test_undraftable_requests_are_spread_evenly(share: float, wanted: list[int]) -> None:
    found = Recorded([np.zeros(1, np.int8)], share)
    assert [i for i in range(8) if found.is_undraftable(i)] == wanted


def changed(folder: Path, row: dict[str, Any]) -> Path:
    file = write_run(folder, traced=False) / "requests.jsonl"
    first, *rest = file.read_text(encoding="utf-8").splitlines()
    write_lines(file, [json.loads(first) | row, *map(json.loads, rest)])
    return folder


@pytest.mark.parametrize(
    ("make", "fields", "says"),
    [
        (lambda f: f / "none", {}, "cannot be read (No such file or directory)"),
        (write_run, {"num_speculative_tokens": 4}, "with 3 drafts a step, fewer than 4"),
        (write_run, {"synthetic_category": "cod"}, "allowed: code, text"),
        (lambda f: changed(f, {"num_drafts": "x"}), {}, "is none of a run with drafts"),
        (
            lambda f: changed(f, {"drafted_per_position": [50, 9, 1]}),
            {},
            "with a number of drafts that changed",
        ),
    ],
    ids=["no run", "more drafts than recorded", "no such category", "damaged", "K per step"],
)
def test_what_cannot_be_followed_is_one_message(
    make: Any, fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_recorded(method(make(tmp_path), **fields))
    message = str(caught.value)
    assert says in message
    assert message.count("\n") == 2
    assert "method.synthetic_" in message.splitlines()[0]


def test_a_run_without_drafts_has_nothing_to_follow(tmp_path: Path) -> None:
    write_lines(tmp_path / "requests.jsonl", [{"id": "0", "num_drafts": 0}])
    with pytest.raises(ConfigurationError, match="holds no request that verified drafts"):
        read_recorded(method(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tensor", "pipeline", "data"])
def test_ranks_follow_the_same_record(axis: str, tmp_path: Path) -> None:
    """Filled requests and a record's acceptance: each rank writes its own rows of the table."""
    layout = Layout(**{axis: 2})
    config = following(write_run(tmp_path))
    config.target.max_model_len = 400
    is_tensor = axis == "tensor"
    config.parallelism = replace(config.parallelism, check=is_tensor, **{axis: 2})  # type: ignore[arg-type]

    def lab(engine: Engine) -> dict[int, list[int]]:
        requests = long_requests(4)
        engine.tokenize(requests)
        return accepted_by(engine, [filled_to(request, 300) for request in requests])

    found = over_ranks(layout, config, lab, splits=True)
    assert sorted(found) == [0, 1, 2, 3]
    for index, lengths in found.items():
        recorded = LENGTHS["abc"[index % 3]]
        assert lengths[:-1] == in_turn(recorded, K, len(lengths) - 1)
