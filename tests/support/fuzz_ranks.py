"""Fuzzed configurations on several tensor-parallel ranks, held against one process."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from fuzz_cases import Case, Choices, draw
from fuzz_engines import build, near_tie
from fuzz_stages import Pair, of_rank, stage
from graph_runs import attention_as_on_devices, graph_config, zoo_requests
from side_by_side import assert_same_run, run_alone
from step_ahead import Watch, outputs
from thread_ranks import as_ranks

from hydraspec.config.schema import DraftSampling, Dtype, Verification
from hydraspec.engine.native import NativeEngine
from hydraspec.parallel.layout import Layout
from hydraspec.parallel.ranks import Ranks
from hydraspec.types import Request

SAMPLED = {"temperature": 1.1, "top_k": 30, "top_p": 0.95, "min_p": 0.01}


def small_case(number: int, pair: Pair, dtype: Dtype = Dtype.float64) -> Case:
    """Prompts in chunks, more requests than slots, stops; every third cache holds one request of
    full length. Half of the requests sample, with drafts that are sampled in every second case.
    """
    found = stage(pair.stage, dtype)
    config = graph_config(
        pair.method,
        "none",
        pair=(pair.stage, pair.drafter and pair.drafter.removeprefix("zoo:")),
        dtype=dtype,
        max_num_seqs=3,
        max_model_len=72,
        max_num_batched_tokens=24,
        draft_sampling=[*DraftSampling][number % 2],
        verification=[Verification.standard, Verification.block][number // 2 % 2],
    )
    requests = zoo_requests(2) + zoo_requests(4, **SAMPLED)[2:]
    for request, length, most in zip(requests, (9, 51, 20, 27), (9, 4, 7, 5), strict=True):
        assert request.messages is not None
        prompt = found.tokenizer.encode_chat(request.messages)
        request.prompt_token_ids, request.sampling.max_tokens = prompt[-length:], most
    requests[0].sampling.stop = (" ", "e")
    return Case(
        number=number,
        pair=pair,
        config=config,
        requests=requests,
        concurrency=None,
        runner="plain",
        room=1 if number % 3 == 0 else None,
        company="alone",
    )


@dataclass
class Happened:
    """What runs met: a comparison that never meets a rejection proves nothing of it."""

    num_requests: int = 0
    num_preempted: int = 0
    num_chunked: int = 0  # prefill steps beyond a request's first
    num_rejected: int = 0
    num_accepted: int = 0
    num_stopped: int = 0
    num_sampled: int = 0
    near_ties: list[str] = field(default_factory=list)
    other_drafts: int = 0  # float32: requests whose drafts part before their tokens do

    def count(self, case: Case, seen: Watch) -> None:
        self.num_requests += len(seen.completions)
        self.num_sampled += sum(r.sampling.temperature > 0 for r in case.requests)
        self.num_stopped += sum(x.finish_reason == "stop" for x in seen.completions.values())
        prefills: set[int] = set()
        for record in seen.records:
            self.num_preempted += record.num_preempted
            for part in record.requests:
                self.num_accepted += part.num_accepted
                self.num_rejected += len(part.draft_token_ids) - part.num_accepted
                if part.is_prefill:
                    self.num_chunked += part.index in prefills
                    prefills.add(part.index)


def run_case_on_ranks(number: int, choices: Choices, num_ranks: int, happened: Happened) -> None:
    """Case `number` on `num_ranks` ranks: each gives what one process gives, request by request.

    What graphs hold is called again: a recording of operators has no sums over ranks.
    """
    case = replace(draw(number, choices), company="alone", other=None)
    with pytest.MonkeyPatch.context() as patch:
        if case.runner in ("recorded", "called"):
            case.runner = "called"
            attention_as_on_devices(patch)
        try:
            check_case_on_ranks(case, num_ranks, happened)
        except Exception as error:
            error.add_note(f"{num_ranks} ranks, {case}")
            raise


def check_case_on_ranks(case: Case, num_ranks: int, happened: Happened) -> None:
    engine = build(case)
    wanted = run_alone(engine, case.requests, case.concurrency)
    happened.count(case, wanted)
    found = stage(case.pair.stage, case.dtype)

    def work(ranks: Ranks) -> Watch:
        own = build(case, found=of_rank(found, ranks.group))
        return run_alone(own, case.requests, case.concurrency)

    first, *others = as_ranks(Layout(tensor=num_ranks), work)
    for other in others:
        assert_same_run(other, first)
    if case.dtype is Dtype.float64:
        assert_same_run(first, wanted)
        return
    for request in case.requests:
        check_request(engine, request, first, wanted, happened)


def check_request(
    engine: NativeEngine, request: Request, found: Watch, wanted: Watch, happened: Happened
) -> None:
    """Equal, or first different within the margin rule; sampled requests may turn at a draw."""
    ours, theirs = outputs(found)[request.index], outputs(wanted)[request.index]
    if ours != theirs and request.sampling.temperature == 0.0:
        happened.near_ties.append(near_tie(engine, request, ours[0], theirs[0]))
    elif ours == theirs and found.decodes.get(request.index) != wanted.decodes.get(request.index):
        happened.other_drafts += 1
