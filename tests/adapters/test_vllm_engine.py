"""engine=vllm over a fake of vLLM's interface: counts, ends, refusals; and the real one, on a GPU
where it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import target_token
from fake_vllm import FakeRequest
from records import request as asked

from hydraspec.adapters.vllm.engine import VllmEngine, sampling_params
from hydraspec.adapters.vllm.steps import Part, StepStats, share_out
from hydraspec.cli.compose import plan
from hydraspec.config.schema import RunConfig, Weights
from hydraspec.types import (
    Completion,
    ConfigurationError,
    PrefixCaching,
    Request,
    StepRecord,
    WorkloadError,
)

MAX_MODEL_LEN = 96


def planned(*overrides: str) -> RunConfig:
    return plan(["engine=vllm", *overrides]).jobs[0].config


# ------------------------------------------------------------------ running


def requests_of(count: int = 5, **sampling: Any) -> list[Request]:
    settings = {"max_tokens": 20, "ignore_eos": True, **sampling}
    prompts = [[3 + i, 7, 11 + 2 * i][: 2 + i % 2] for i in range(count)]
    return [
        asked(i, id=f"r{i}", seed=i, prompt_token_ids=prompt, **settings)
        for i, prompt in enumerate(prompts)
    ]


def expected_output(request: Request) -> list[int]:
    tokens = list(request.prompt_token_ids or [])
    for _ in range(request.sampling.max_tokens):
        tokens.append(target_token(tokens))
        if tokens[-1] in request.sampling.stop_token_ids:
            break
        if tokens[-1] == 63 and not request.sampling.ignore_eos:
            break
    return tokens[len(request.prompt_token_ids or []) :]


def decode(
    engine: VllmEngine, requests: list[Request], concurrency: int | None = None
) -> tuple[list[StepRecord], dict[int, Completion]]:
    engine.tokenize(requests)
    events = list(engine.run(requests, concurrency=concurrency))
    records = [event for event in events if isinstance(event, StepRecord)]
    done = {event.index: event for event in events if isinstance(event, Completion)}
    assert len(events) == len(records) + len(requests)
    return records, done


@pytest.mark.parametrize("concurrency", [1, 2, None])
def test_tokens_records_and_counters_agree(
    start: Callable[..., VllmEngine], concurrency: int | None
) -> None:
    """Each position's sums are vLLM's counters, whichever requests end together."""
    engine = start()
    requests = requests_of(7, max_tokens=21)
    records, done = decode(engine, requests, concurrency)
    emitted: dict[int, list[int]] = {request.index: [] for request in requests}
    computed: Counter[int] = Counter()
    drafted, accepted = [0] * 8, [0] * 8
    for record in records:
        assert len(record.requests) <= (concurrency or 7)
        for step in record.requests:
            assert step.num_computed_tokens == computed[step.index]
            computed[step.index] += step.num_rows - len(step.draft_token_ids) + step.num_accepted
            assert step.is_prefill == (not emitted[step.index])
            emitted[step.index] += step.output_token_ids
            for i in range(len(step.draft_token_ids)):
                drafted[i] += 1
                accepted[i] += i < step.num_accepted
            kept = step.output_token_ids[: step.num_accepted]
            assert step.draft_token_ids[: len(kept)] == kept
    fake = engine.parts.engine
    assert (drafted, accepted) == (fake.counters["drafted"], fake.counters["accepted"])
    for request in requests:
        assert emitted[request.index] == done[request.index].output_token_ids
        assert done[request.index].output_token_ids == expected_output(request)
        assert done[request.index].finish_reason == "length"
        assert 0 < (done[request.index].ttft_ms or 0) <= done[request.index].latency_ms
    assert records[0].kv_usage == 0.25
    assert records[0].num_running == min(concurrency or 7, 7)


def test_cached_tokens_are_reported_and_every_run_begins_with_none(
    start: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeRequest, "num_cached", 1)
    engine = start()
    for number in (1, 2):
        records, done = decode(engine, requests_of(2))
        assert engine.parts.engine.num_resets == number
    assert [completion.num_cached_tokens for completion in done.values()] == [1, 1]
    first = records[0].requests[0]
    assert first.num_computed_tokens == 1
    assert first.num_rows == len(done[0].prompt_token_ids) - 1
    assert engine.info.prefix_caching == PrefixCaching(block_size=4)


def test_method_none_drafts_nothing(start: Callable[..., VllmEngine]) -> None:
    records, done = decode(start("none"), requests_of())
    assert all(not step.draft_token_ids for record in records for step in record.requests)
    assert all(step.num_rows == 1 for record in records[1:] for step in record.requests)
    assert [len(c.output_token_ids) for c in done.values()] == [20] * 5


def test_counts_of_requests_that_end_together_are_shared_out() -> None:
    """Emitted tokens are cut, counts are not; the larger count goes to who emitted more."""
    stats = StepStats(drafted_per_position=[3, 3, 2], accepted_per_position=[3, 2, 1])
    parts = [
        Part(num_emitted=2, finished=False),
        Part(num_emitted=1, finished=True),
        Part(num_emitted=3, finished=True),
    ]
    share_out(parts, stats)
    assert [(p.num_accepted, p.num_drafted) for p in parts] == [(1, 2), (2, 3), (3, 3)]


def test_a_request_without_drafts_among_others() -> None:
    stats = StepStats(drafted_per_position=[1, 1], accepted_per_position=[0, 0])
    parts = [Part(num_emitted=1, finished=False), Part(num_emitted=1, finished=True)]
    share_out(parts, stats)
    assert sorted((p.num_accepted, p.num_drafted) for p in parts) == [(0, 0), (0, 2)]
    share_out(parts := [Part(num_emitted=1, finished=True)], StepStats())
    assert (parts[0].num_accepted, parts[0].num_drafted) == (0, 0)


def test_end_of_sequence_and_stop_ids_end_a_request(start: Callable[..., VllmEngine]) -> None:
    engine = start()
    stop = expected_output(requests_of(1)[0])[6]
    requests = requests_of(2, stop_token_ids=(stop,), ignore_eos=False, max_tokens=60)
    _, done = decode(engine, requests)
    assert [done[i].output_token_ids for i in (0, 1)] == [expected_output(r) for r in requests]
    assert done[0].finish_reason == "stop"
    assert engine.parts.eos_token_ids == (63,)


def test_stop_strings_end_a_request_here_and_in_vllm(
    start: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    monkeypatch.setattr(engine._finish, "_decode", lambda ids: " ".join(f"<{i}>" for i in ids))
    requests = requests_of(2)
    whole = expected_output(requests[0])
    requests[0].sampling = replace(requests[0].sampling, stop=(f"<{whole[5]}>",))
    events = list(engine.run(requests, concurrency=None))
    done = {event.index: event for event in events if isinstance(event, Completion)}
    first = whole.index(whole[5])
    assert done[0].output_token_ids == whole[: first + 1]
    assert done[0].finish_reason == "stop"
    assert done[0].text == "".join(f"<{i}> " for i in whole[:first])
    assert engine.parts.engine.aborted == ["1-0"]
    assert len(done[1].output_token_ids) == 20


def test_prompts_that_are_too_long_and_refused_parameters_are_the_requests_error(
    start: Callable[..., VllmEngine],
) -> None:
    requests = requests_of(3)
    requests[0].prompt_token_ids = [5] * MAX_MODEL_LEN
    requests[1].sampling = replace(requests[1].sampling, min_p=0.9)
    _, done = decode(start(), requests)
    assert [done[i].finish_reason for i in range(3)] == ["error", "error", "length"]
    assert "max_model_len is 96" in str(done[0].error)
    assert "min_p is not yet supported" in str(done[1].error)


def test_max_model_len_ends_a_request(start: Callable[..., VllmEngine]) -> None:
    _, done = decode(start(), requests_of(1, max_tokens=500))
    assert len(done[0].output_token_ids) == MAX_MODEL_LEN - 2
    assert done[0].finish_reason == "length"


def test_a_run_that_is_closed_drops_its_requests(start: Callable[..., VllmEngine]) -> None:
    engine = start()
    events = engine.run(requests_of(3), concurrency=None)
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert engine.parts.engine.requests == {}
    _, done = decode(engine, requests_of(3))
    assert [c.finish_reason for c in done.values()] == ["length"] * 3


def test_without_step_records_only_completions_come(start: Callable[..., VllmEngine]) -> None:
    engine = start(record_steps=False)
    records, done = decode(engine, requests_of())
    assert records == []
    assert [c.output_token_ids for c in done.values()] == [
        expected_output(request) for request in requests_of()
    ]
    assert all(c.ttft_ms is None and c.latency_ms > 0 for c in done.values())
    assert engine.parts.engine.loggers == []
    assert "engine.vllm.record_steps=false" in engine.info.warnings[0]


def test_data_parallel_goes_through_the_asynchronous_engine(
    start: Callable[..., VllmEngine],
) -> None:
    engine = start(data=2)
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    records, done = decode(engine, requests_of(), concurrency=2)
    assert records == []
    assert {c.index: c.output_token_ids for c in done.values()} == {
        request.index: expected_output(request) for request in requests_of()
    }
    assert "data parallel" in engine.info.warnings[0]


def test_facts(start: Callable[..., VllmEngine]) -> None:
    info = start(weights=Weights.checkpoint).info
    assert (info.engine, info.device, info.greedy_is_exact) == ("vllm", "cuda", False)
    assert (info.vocab_size, info.max_model_len) == (64, MAX_MODEL_LEN)
    assert info.cudagraph == {"requested": "none", "target": "none", "draft": None, "reason": None}
    assert info.memory_bytes == {"weights": 1000, "kv_cache": 500}
    assert info.warnings == []


def test_the_environment_stands_while_the_engine_lives(
    start: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    engine = start()
    running = engine.parts.engine
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn", "CUDA may be in use here"
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG", "the user's own"
    engine.close()
    assert running.is_shut_down
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in os.environ
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    engine.close()


# ------------------------------------------------------------------ refusals


def test_the_baseline_is_left_to_a_sweep(start: Callable[..., VllmEngine]) -> None:
    config = planned("method=gemma4_mtp")
    assert config.baseline is False
    assert "run -m method=none,gemma4_mtp" in config.warnings[0]
    assert planned("method=none").warnings == []
    assert planned("baseline=false").warnings == []
    with pytest.raises(ConfigurationError, match="takes the device for one engine"):
        start().baseline()
    assert start().next_token_logits([1]) is None


@pytest.mark.parametrize(
    ("package", "loaded"),
    [("transformers", "hydraspec.engine.native"), ("vllm", "hydraspec.adapters.vllm.engine")],
)
def test_a_package_is_imported_by_its_own_engine_only(package: str, loaded: str) -> None:
    """vllm, which is slow to load, once its engine is to run."""
    program = (
        f"import sys, hydraspec.cli.main, hydraspec.lab.run, {loaded};"
        f"print(sorted(m for m in sys.modules if m.split('.')[0] == {package!r}))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


# ------------------------------------------------------------------ for real


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["none", "gemma4_mtp"])
def test_the_real_vllm(method: str, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    config = planned(
        *("target=gemma4_e2b", "target.weights=random", "target.max_model_len=1024"),
        *(f"method={method}", "method.verification=synthetic"),
        *("method.synthetic_acceptance_length=2.5", "engine.max_num_seqs=4"),
        "engine.kv_cache.memory_gib=4",
    )
    engine = VllmEngine(config)
    try:
        requests = requests_of(6, max_tokens=40)
        records, done = decode(engine, requests, concurrency=3)
    finally:
        engine.close()
    assert [len(done[i].output_token_ids) for i in range(6)] == [40] * 6
    steps = [s for r in records for s in r.requests if s.draft_token_ids]
    if method == "none":
        assert not steps
    else:
        mean = 1 + sum(s.num_accepted for s in steps) / len(steps)
        assert mean == pytest.approx(2.5, abs=0.3)
    assert engine.info.memory_bytes["weights"] > 1 << 30


def test_rules_go_to_vllm_in_its_words(start: Callable[..., VllmEngine]) -> None:
    """End-of-sequence ids are stop ids there, which min_tokens holds back."""
    engine = start()
    (one,) = requests_of(1, max_tokens=8)
    rules = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2}
    biases = ((5, 1.5), (9, -2.0))
    own = {"ignore_eos": False, "min_tokens": 3, "logit_bias": biases}
    one.sampling = replace(one.sampling, **rules, **own)
    params = sampling_params(one.sampling, engine.parts.eos_token_ids, streamed=True)
    assert {name: getattr(params, name) for name in rules} == rules
    assert (params.min_tokens, params.logit_bias) == (3, {5: 1.5, 9: -2.0})
    assert set(engine.parts.eos_token_ids) <= set(params.stop_token_ids)
    for key, value in (("bad_words", ((5,),)), ("logprobs", 1), ("prompt_logprobs", 0)):
        (other,) = requests_of(1, max_tokens=8)
        other.sampling = replace(other.sampling, **{key: value})
        with pytest.raises(WorkloadError, match=rf"sampling\.{key} is not available: engine=vllm"):
            engine.tokenize([other])
