"""Engines of fuzzed configurations, and checks of everything that their runs report.

The reference of greedy requests is a plain engine without drafts (fuzz_stages); sampled requests
and the drafts of all are held against the same drafter with one request at a time, no graphs and an
ample cache.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from fuzz_cases import Case, Choices, draw
from fuzz_stages import Stage, expected_output, stage
from graph_runs import attention_as_on_devices
from recorded_graphs import CalledAgain, RecordedOps
from side_by_side import Following, assert_same_run, interleave, run_alone
from step_ahead import Watch, outputs

from hydraspec.config.schema import Device, Dtype, RunConfig
from hydraspec.engine.cache.kv_budget import plan_num_blocks, row_bytes
from hydraspec.engine.cache.sizing import Models
from hydraspec.engine.native import NativeEngine
from hydraspec.engine.run import step_graphs
from hydraspec.graphs import GraphBackend, modes
from hydraspec.speculators import registry
from hydraspec.types import Request

GIB = 1 << 30


def build(case: Case, device: str = "cpu", found: Stage | None = None) -> NativeEngine:
    """The engine of a case, over the target that the process has loaded or that of `found`."""
    config = copy.deepcopy(case.config)
    config.engine.device = Device(device)
    found = found or stage(case.pair.stage, case.dtype, device)
    if case.room is not None:
        config.engine.kv_cache.memory_gib = _memory_gib(config, found, case.room)
    backend: GraphBackend | None = None
    if device == "cpu" and case.runner != "plain":
        backend = CalledAgain() if case.runner == "called" else RecordedOps()
        config.cudagraph.max_mixed_rows = modes.PROMPT_ROWS[-1]  # more are a matter of other tests
    return found.engine(config, backend)


def _memory_gib(config: RunConfig, found: Stage, room: int) -> float:
    """A cache of as many full-length requests as `room`."""
    speculator = registry.build_speculator(config)
    speculator.load(found.target)
    length = config.target.max_model_len
    assert length is not None
    models = Models(config=config, target=found.target, speculator=speculator, max_model_len=length)
    size, specs, dtype = models.cache_size(), models.kv_groups(), found.target.dtype
    counts = plan_num_blocks(
        specs, replace(size, max_num_seqs=room, num_cached_seqs=0), dtype, 1 << 50
    )
    num_bytes = sum(
        count * spec.block_size * row_bytes(spec, dtype)
        for count, spec in zip(counts, specs, strict=True)
    )
    return (num_bytes + 1) / GIB


def one_by_one(case: Case) -> Case:
    """The same requests where nothing disturbs them."""
    config = copy.deepcopy(case.config)
    config.cudagraph.name, config.cudagraph.capture_sizes = "none", None
    config.engine.async_scheduling = False
    config.engine.max_num_batched_tokens, config.engine.max_num_seqs = 512, 1
    return replace(
        case, config=config, runner="plain", room=None, concurrency=1, company="alone", other=None
    )


# ------------------------------------------------------------------ checks


@dataclass
class Tally:
    """What happened over many cases: a fuzz that never meets a preemption proves nothing of it."""

    num_cases: int = 0
    num_requests: int = 0
    num_steps: int = 0
    num_preempted: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    near_ties: list[str] = field(default_factory=list)

    def count(self, seen: Watch) -> None:
        self.num_requests += len(seen.completions)
        self.num_steps += len(seen.records)
        self.num_preempted += sum(record.num_preempted for record in seen.records)
        parts = [part for record in seen.records for part in record.requests]
        self.num_drafts += sum(len(part.draft_token_ids) for part in parts)
        self.num_accepted += sum(part.num_accepted for part in parts)


def run_cases(numbers: Iterable[int], choices: Choices) -> Tally:
    """Draw, run and check cases on the CPU."""
    tally = Tally()
    for number in numbers:
        case = draw(number, choices)
        try:
            run_case(case, tally)
        except Exception as error:
            error.add_note(str(case))
            raise
    return tally


def run_case(case: Case, tally: Tally) -> None:
    """Run it on the CPU, alone or in company, and check everything."""
    with pytest.MonkeyPatch.context() as patch:
        cases = [case] if case.other is None else [case, case.other]
        if any(one.runner in ("recorded", "called") for one in cases):
            attention_as_on_devices(patch)
            for module in (modes, step_graphs):  # recordings share no memory: 7 GB with 256 rows
                patch.setattr(module, "PROMPT_ROWS", (32, 64))
        tally.num_cases += 1
        engines = [build(one) for one in cases]
        for one, engine, seen in zip(cases, engines, run_together(cases, engines), strict=True):
            check(one, engine, seen, tally)
        if case.company == "baseline":
            run_baseline(case, engines[0])


def run_together(cases: Sequence[Case], engines: Sequence[NativeEngine]) -> list[Watch]:
    runs = [
        Following(engine, case.requests, case.concurrency)
        for case, engine in zip(cases, engines, strict=True)
    ]
    return interleave(runs)


def run_baseline(case: Case, engine: NativeEngine) -> Watch:
    """The engine's baseline runs the same requests, and after it the engine does, as before."""
    before = run_alone(engine, case.requests, case.concurrency)
    baseline = engine.baseline()
    found = run_alone(baseline, case.requests, case.concurrency)
    plain = replace(case, config=baseline.parts.config)
    check_outputs(plain, baseline, found, Tally())
    check_steps(plain, found)
    assert_same_run(run_alone(engine, case.requests, case.concurrency), before)
    return found


def check(case: Case, engine: NativeEngine, seen: Watch, tally: Tally) -> None:
    tally.count(seen)
    check_steps(case, seen)
    check_outputs(case, engine, seen, tally)
    if case.dtype is Dtype.float64 and case.drafts_alone:
        check_against_one_by_one(case, seen)


def check_outputs(case: Case, engine: NativeEngine, seen: Watch, tally: Tally) -> None:
    """Greedy tokens and reasons are the plain engine's; sampled ones end where they must."""
    found = stage(case.pair.stage, case.dtype)
    length = case.config.target.max_model_len
    assert length is not None
    assert sorted(seen.completions) == [request.index for request in case.requests]
    for request in case.requests:
        done, prompt = seen.completions[request.index], tuple(request.prompt_token_ids or ())
        assert done.error is None, done.error
        assert tuple(done.prompt_token_ids) == prompt
        room = length - len(prompt)
        if request.sampling.temperature > 0.0:
            count = len(done.output_token_ids)
            ended = count == min(request.sampling.max_tokens, room)
            assert ended or done.finish_reason == "stop"
            continue
        tokens, reason = expected_output(found, prompt, request.sampling, room)
        if done.output_token_ids != tokens and case.dtype is not Dtype.float64:
            tally.near_ties.append(near_tie(engine, request, done.output_token_ids, tokens))
            continue
        assert done.output_token_ids == tokens, request.index
        assert done.finish_reason == reason, request.index


def near_tie(
    engine: NativeEngine,
    request: Request,
    got: Sequence[int],
    expected: Sequence[int],
    most: float = 8,
) -> str:
    """The margin rule: greedy outputs may part only where the two best logits are within
    `most` eps max|logit|. Says where."""
    pairs = enumerate(zip(got, expected, strict=False))
    common = next((n for n, (one, other) in pairs if one != other), None)
    assert common is not None, "one output is the beginning of the other: no tie ends a request"
    logits = engine.next_token_logits([*(request.prompt_token_ids or ()), *expected[:common]])
    first, second = np.sort(logits)[-1:-3:-1]
    unit = torch.finfo(engine.parts.target.dtype).eps * np.abs(logits).max()
    told = f"token {common}: margin {(first - second) / unit:.1f} eps max|logit|"
    assert first - second <= most * unit, told
    assert {got[common], expected[common]} == set(np.argsort(logits)[-2:].tolist()), told
    return told


def check_steps(case: Case, seen: Watch) -> None:
    """Rows, drafts, accepted counts and emitted tokens of every step add up."""
    engine, k = case.config.engine, case.config.method.num_speculative_tokens
    computed: dict[int, int] = {}
    emitted: dict[int, list[int]] = {}
    num_restarts = 0
    for record in seen.records:
        parts = record.requests
        assert len(parts) <= min(engine.max_num_seqs, case.concurrency or len(case.requests))
        assert sum(part.num_rows for part in parts) <= engine.max_num_batched_tokens
        assert len({part.index for part in parts}) == len(parts)
        assert 0.0 <= record.kv_usage <= 1.0
        for part in parts:
            if part.index not in computed:
                cached = seen.completions[part.index].num_cached_tokens
                assert part.num_computed_tokens == cached, part
            elif part.num_computed_tokens != computed[part.index]:  # preempted: read again
                num_restarts += 1
                cached = part.num_computed_tokens
            else:
                cached = 0
            for size in engine.kv_cache.block_sizes.values() or [engine.kv_cache.block_size]:
                assert cached % size == 0, part
            assert part.is_prefill or not cached, part
            drafts, output = part.draft_token_ids, part.output_token_ids
            assert part.num_accepted <= len(drafts) <= k, part
            if part.is_prefill:
                assert not drafts
                assert len(output) <= 1
                computed[part.index] = part.num_computed_tokens + part.num_rows
            else:
                assert part.num_rows >= len(drafts) + 1
                assert 1 <= len(output) <= part.num_accepted + 1
                assert output[: part.num_accepted] == drafts[: len(output)][: part.num_accepted]
                computed[part.index] = part.num_computed_tokens + part.num_accepted + 1
            emitted.setdefault(part.index, []).extend(output)
    assert num_restarts <= sum(record.num_preempted for record in seen.records)
    assert emitted == {index: done.output_token_ids for index, done in seen.completions.items()}


def check_against_one_by_one(case: Case, seen: Watch) -> None:
    """Sampled tokens, drafts and accepted counts too are those of a request alone, unless it was
    preempted: drafts are then dropped, and other draws decide."""
    if case.room is not None:
        return
    alone = one_by_one(case)
    wanted = run_alone(build(alone), alone.requests, 1)
    assert outputs(seen) == outputs(wanted)
    assert seen.decodes == wanted.decodes
