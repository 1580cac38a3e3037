"""Random engines whose requests share prefixes, held against the same requests without a prefix
cache, one at a time. Case n is the same on every machine.

Blocks hold NaN until they are first written: a hit that reads a row which nobody wrote shows in
tokens, or in what is accepted.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import records
import torch
from fuzz_cases import Case
from fuzz_engines import build, check_steps, near_tie, one_by_one
from fuzz_stages import LONGEST_OUTPUT, Pair, Stage, stage
from graph_runs import GRAPH_MODES, attention_as_on_devices
from late_device import LateDevice
from side_by_side import Following
from step_ahead import Watch, outputs
from torch import Tensor

from hydraspec.config.schema import DraftSampling, Dtype, Verification
from hydraspec.engine.native import NativeEngine
from hydraspec.engine.schedule.sequence import Sequence as Admitted
from hydraspec.types import Request, SamplingParams


@dataclass
class Hits:
    """What runs met: a comparison without hits proves nothing of them."""

    num_cases: int = 0
    num_with_hits: int = 0  # cases
    num_requests: int = 0
    num_hits: int = 0  # requests
    hit_tokens: int = 0
    num_at_the_end: int = 0  # hits that left less than a block of the prompt to compute
    num_chunked: int = 0  # requests that read the rest in several steps
    num_preempted: int = 0
    num_unlike: int = 0  # cases with groups of other block sizes
    num_late: int = 0  # cases on a device that lags behind the host
    num_resumed: int = 0  # preempted requests that found some of their own blocks again
    num_accepted: int = 0
    num_sampled: int = 0  # requests with a hit
    near_ties: list[str] = field(default_factory=list)
    other_drafts: int = 0  # float32: requests whose drafts part before their tokens do

    def count(self, case: Case, seen: Watch) -> None:
        cached = {i: done.num_cached_tokens for i, done in seen.completions.items()}
        self.num_cases += 1
        self.num_unlike += bool(case.config.engine.kv_cache.block_sizes)
        self.num_with_hits += any(cached.values())
        self.num_requests += len(cached)
        self.num_hits += sum(count > 0 for count in cached.values())
        self.hit_tokens += sum(cached.values())
        block = case.config.engine.kv_cache.block_size
        for request in case.requests:
            found = cached[request.index]
            self.num_at_the_end += 0 < len(request.prompt_token_ids or ()) - found <= block
            self.num_sampled += found > 0 and request.sampling.temperature > 0
        firsts: dict[int, int] = {}
        for record in seen.records:
            self.num_preempted += record.num_preempted
            for part in record.requests:
                self.num_accepted += part.num_accepted
                if not part.is_prefill:
                    continue
                before = firsts.setdefault(part.index, part.num_computed_tokens)
                self.num_chunked += cached[part.index] > 0 and part.num_computed_tokens > before
        self.num_resumed += len({i for i in restarted(seen) if any(n for n in starts(seen, i)[1:])})


def starts(seen: Watch, index: int) -> list[int]:
    """Computed tokens with which a request was admitted, each time."""
    found: list[int] = []
    expected, has_sampled = -1, False
    for record in seen.records:
        for part in record.requests:
            if part.index != index:
                continue
            # One that finds all of its blocks again goes on where it was, with a prompt's row.
            if part.num_computed_tokens != expected or (has_sampled and part.is_prefill):
                found.append(part.num_computed_tokens)
            has_sampled = not part.is_prefill or bool(part.output_token_ids)
            rows = part.num_rows if part.is_prefill else part.num_accepted + 1
            expected = part.num_computed_tokens + rows
    return found


def restarted(seen: Watch) -> set[int]:
    """Requests that were preempted after they had a step."""
    return {index for index in seen.completions if len(starts(seen, index)) > 1}


class Rows:
    """The KV of every request, target's and draft's, as a run without hits computed it."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Tensor] = {}  # by request and layer: [L, ...], or NaN
        self._tokens: dict[int, list[int]] = {}
        self._seen: dict[int, int] = {}  # computed tokens of a request at the last step
        self._due: dict[int, int] = {}  # tokens of a request that are still to be compared

    def keep(self, engine: NativeEngine) -> None:
        """What is final of the requests that run."""
        for sequence in engine.parts.scheduler.running:
            index, end = sequence.request.index, sequence.num_computed
            self._tokens[index] = list(sequence.token_ids)
            for layer, first, rows in _rows(engine, sequence):
                known = self._known.get((index, layer))
                if known is None:
                    shape = engine.parts.info.max_model_len + 16, *rows.shape[1:]
                    known = self._known[index, layer] = torch.full(
                        shape, float("nan"), dtype=rows.dtype
                    )
                known[first:end] = rows

    def compare(self, engine: NativeEngine) -> None:
        """The KV of requests that were just admitted is what it was without a hit. With a step in
        flight, which may write it, once they have computed rows themselves."""
        for sequence in engine.parts.scheduler.running:
            index, computed = sequence.request.index, sequence.num_computed
            if computed and computed < self._seen.get(index, computed + 1):
                self._due[index] = computed
            self._seen[index] = computed
            if engine._in_flight and computed == self._due.get(index):
                continue
            end = self._due.pop(index, 0)
            # A draft row reads the token after it. Sampled requests may part after a preemption.
            if not end or self._tokens.get(index, [])[: end + 1] != sequence.token_ids[: end + 1]:
                continue
            for layer, first, found in _rows(engine, sequence):
                known, rows = self._known[index, layer][first:end], found[: max(0, end - first)]
                is_known = known.isfinite()
                where = f"request {index}, layer {layer}, rows from {first}"
                assert rows[is_known].isfinite().all(), where
                torch.testing.assert_close(
                    rows[is_known], known[is_known], rtol=1e-6, atol=1e-9, msg=where
                )


def _rows(engine: NativeEngine, sequence: Admitted) -> Iterator[tuple[int, int, Tensor]]:
    """Per layer: the first position that a request still holds, and its rows from there on."""
    kv, slot = engine.parts.runner.kv, sequence.slot
    for group in kv._groups:
        size = group.spec.block_size
        first = group.first_live[slot] * size
        positions = np.arange(first, sequence.num_computed)
        places = torch.from_numpy(group.rows[slot][positions // size] * size + positions % size)
        for layer in group.spec.layers:
            cache = kv.caches[layer]
            if cache is not None:
                yield layer, first, cache[places]


# ------------------------------------------------------------------ cases


RUNNERS = (*("plain",) * 6, "launched", "launched", "called", "recorded")


def draw_prefixes(number: int, pairs: Sequence[Pair], runners: Sequence[str] = RUNNERS) -> Case:
    """Case `number`: pairs come in turn, everything else by chance."""
    rng = np.random.default_rng([13, number])
    pair = pairs[number % len(pairs)]
    dtype = Dtype.float32 if rng.random() < 0.15 else Dtype.float64
    found = stage(pair.stage, dtype)
    block_size = int(rng.choice([4, 16, 32]))
    max_num_seqs = int(rng.choice([1, 2, 3, 4, 8]))
    requests = draw_families(found, rng, block_size)
    longest = max(len(request.prompt_token_ids or ()) for request in requests)
    config = found.config(
        pair,
        k=int(rng.integers(1, 6)),
        max_model_len=min(longest + LONGEST_OUTPUT + 9, found.target.max_position_embeddings),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=int(rng.choice([16, 24, 40, 63, 256, 512])),
        block_size=block_size,
        draft_sampling=rng.choice(list(DraftSampling)),
        verification=rng.choice([Verification.standard, Verification.block]),
        seed=int(rng.integers(1 << 20)),
    )
    config.engine.async_scheduling = bool(rng.random() < 0.5)
    if rng.random() < 0.3:
        groups = [spec.name for spec in found.target.kv_groups(lambda group: block_size)]
        name = str(rng.choice([*groups, "mtp"] if pair.method == "mtp" else groups))
        config.engine.kv_cache.block_sizes = {name: int(rng.choice([4, 8, 16, 32]))}
    runner = str(rng.choice(runners))
    if dtype is not Dtype.float64:
        runner = "plain"
    if runner in ("recorded", "called"):
        config.cudagraph.name = str(rng.choice(GRAPH_MODES))
        config.cudagraph.capture_sizes = [min(4, max_num_seqs)]
    return Case(
        number=number,
        pair=pair,
        config=config,
        requests=requests,
        concurrency=int(rng.integers(1, 5)) if rng.random() < 0.6 else None,
        runner=runner,
        room=int(rng.integers(1, 3)) if rng.random() < 0.3 else None,
        company="alone",
    )


def draw_families(found: Stage, rng: np.random.Generator, block_size: int) -> list[Request]:
    """Requests that begin as one of two texts do: cut near a block's border or anywhere, the same
    text again, or the text with what the target says after it and a further question."""
    room = found.target.max_position_embeddings - LONGEST_OUTPUT - 10
    bases = sorted(found.prompts, key=len)[-6:]
    texts = [bases[i] for i in rng.choice(len(bases), 2, replace=False)]
    vocabulary = found.target.vocab_size
    requests: list[Request] = []
    for index in range(int(rng.integers(4, 10))):
        text = texts[int(rng.integers(2))]
        kind = str(rng.choice(["border", "border", "anywhere", "again", "turn", "turn"]))
        tail = rng.integers(3, vocabulary, int(rng.integers(1, 12))).tolist()
        if kind == "turn":
            said = found.continuations[text]
            tokens = [*text, *said[: int(rng.integers(1, LONGEST_OUTPUT + 1))], *tail]
        elif kind == "again":
            tokens = list(text)
        elif kind == "border":
            cut = block_size * int(rng.integers(0, len(text) // block_size + 1))
            cut = min(len(text), max(0, cut + int(rng.integers(-1, 2))))
            tokens = [*text[:cut], *tail]
        else:
            tokens = [*text[: int(rng.integers(0, len(text) + 1))], *tail]
        sampling = SamplingParams(
            max_tokens=int(rng.integers(1, LONGEST_OUTPUT + 1)),
            seed=int(rng.integers(1 << 30)),
            ignore_eos=bool(rng.random() < 0.5),
        )
        if rng.random() < 0.35:
            sampling.temperature = float(rng.choice([0.3, 0.8, 1.3]))
            sampling.top_k = int(rng.choice([0, 5, 40]))
        requests.append(records.request(index, sampling=sampling, prompt_token_ids=tokens[:room]))
    return requests


# ------------------------------------------------------------------ checks


def run_prefix_cases(
    numbers: Iterable[int], pairs: Sequence[Pair], runners: Sequence[str] = RUNNERS
) -> Hits:
    """Draw, run and check cases on the CPU."""
    hits = Hits()
    for number in numbers:
        case = draw_prefixes(number, pairs, runners)
        try:
            run_prefix_case(case, hits)
        except Exception as error:
            error.add_note(str(case))
            raise
    return hits


def run_prefix_case(case: Case, hits: Hits) -> None:
    """Tokens, drafts and accepted counts of a run with hits are those of requests alone."""
    rows = Rows()
    cold = cold_run(case, rows)
    with pytest.MonkeyPatch.context() as patch:
        if case.runner in ("recorded", "called"):
            attention_as_on_devices(patch)
        engine = build(case)
        poison(engine)
        if case.config.engine.async_scheduling and case.runner == "plain":
            LateDevice(engine, patch).poison_freed_blocks(patch)
            hits.num_late += 1
        following = Following(engine, case.requests, case.concurrency)
        while not following.is_done:
            following.step()
            if case.dtype is Dtype.float64:
                rows.compare(engine)
        found = following.finish()
    hits.count(case, found)
    check_steps(case, found)
    compare_with_cold(case, engine, found, cold, hits)


def cold_run(case: Case, rows: Rows | None = None) -> Watch:
    """Each request alone, in an ample cache that keeps nothing. Its KV goes to `rows`."""
    alone = one_by_one(case)
    alone.config.engine.prefix_caching = False
    engine = build(alone)
    following = Following(engine, alone.requests, 1)
    while not following.is_done:
        following.step()
        if rows is not None:
            rows.keep(engine)
    seen = following.finish()
    assert not any(done.num_cached_tokens for done in seen.completions.values())
    return seen


def poison(engine: NativeEngine) -> None:
    """Fill every block but the null block with NaN."""
    kv = engine.parts.runner.kv
    for spec in kv.specs:
        for layer in spec.layers:
            cache = kv.caches[layer]
            if cache is not None:
                cache[spec.block_size :] = float("nan")


def compare_with_cold(
    case: Case, engine: NativeEngine, found: Watch, cold: Watch, hits: Hits
) -> None:
    """Requests that were preempted lose their drafts, and other draws decide: of those greedy
    tokens alone have to be equal."""
    assert found.completions.keys() == cold.completions.keys()
    again = restarted(found)
    got, wanted = outputs(found), outputs(cold)
    for request in case.requests:
        index, is_greedy = request.index, request.sampling.temperature == 0.0
        if index in again and not is_greedy:
            continue
        if case.dtype is not Dtype.float64:
            if got[index] != wanted[index] and is_greedy:
                tie = near_tie(engine, request, got[index][0], wanted[index][0])
                hits.near_ties.append(tie)
            elif got[index] == wanted[index] and index not in again:
                hits.other_drafts += found.decodes.get(index) != cold.decodes.get(index)
            continue
        assert got[index] == wanted[index], f"request {index}"
        if index not in again:
            assert found.decodes.get(index) == cold.decodes.get(index), f"request {index}"


def cut_at_every_block(text: Sequence[int], block_size: int, num_shared: int) -> list[Request]:
    """The text, then prompts that begin as it does up to the end of each block and `num_shared`
    tokens further, and go on with others."""
    ends = range(block_size, len(text) - num_shared, block_size)
    prompts = [list(text)]
    for end in ends:
        after = text[end + num_shared]
        prompts.append([*text[: end + num_shared], after ^ 1, 9, 8, 7])
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    return [
        Request(index=i, id=str(i), sampling=copy.copy(sampling), prompt_token_ids=prompt)
        for i, prompt in enumerate(prompts)
    ]


def plain_case(pair: Pair, requests: list[Request], **fields: object) -> Case:
    """A float64 engine for `pair` that serves these requests one at a time."""
    found = stage(pair.stage, Dtype.float64)
    longest = min(256, found.target.max_position_embeddings)
    return Case(
        number=0,
        pair=pair,
        config=found.config(pair, max_model_len=longest, **fields),
        requests=requests,
        concurrency=1,
        runner="plain",
        room=None,
        company="alone",
    )


def text_of(pair: Pair, length: int) -> list[int]:
    """A text of that many tokens that the target goes on with as it likes, from its prompts."""
    found = stage(pair.stage, Dtype.float64)
    tokens = [token for prompt in sorted(found.prompts, key=len)[-3:] for token in prompt]
    return tokens[: min(length, found.target.max_position_embeddings - LONGEST_OUTPUT - 10)]
