"""A model of the times of steps, and loads that the scheduler serves in its time."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch
from caches import kv_cache, kv_group

from hydraspec.engine.schedule.prompt_rows import PromptRows
from hydraspec.engine.schedule.scheduler import Scheduler
from hydraspec.engine.schedule.sequence import Scheduled, Sequence
from hydraspec.graphs import mixed_row_sizes
from hydraspec.types import Request, SamplingParams

BLOCK = 64
LARGEST_GRAPH = 2048


@dataclass(slots=True, frozen=True, kw_only=True)
class StepTimes:
    """Milliseconds of one model's steps, each linear in its rows and in the keys that they see."""

    prompt_row: float
    prompt_key: float  # of a prompt row and key
    prompt_step: float  # of a step of prompts alone, beside its rows
    decode_step: float
    decode_row: float
    decode_key: float
    mixed_step: float  # what decodes add to the rows of a step of prompts
    mixed_key: float  # the same, of the longest request's keys, which one program reads
    launch_bound_rows: int
    are_prompts_read: bool = True  # False: their KV is there at once

    def of(self, scheduled: Seq[Scheduled]) -> float:
        """The time of a step, in ms."""
        prompts = [item for item in scheduled if item.is_prefill and self.are_prompts_read]
        decodes = [item.seq_len for item in scheduled if not item.is_prefill]
        rows = sum(item.num_rows * self._prompt_row(item) for item in prompts)
        if not decodes:
            return self.prompt_step + rows if prompts else 0.0
        if prompts:
            return self.mixed_step + max(decodes) * self.mixed_key + rows
        return self.decode_step + len(decodes) * self.decode_row + sum(decodes) * self.decode_key

    def _prompt_row(self, item: Scheduled) -> float:
        return self.prompt_row + (item.num_computed + item.num_rows / 2) * self.prompt_key


@dataclass(slots=True, frozen=True)
class Offered:
    """A request of a load."""

    prompt: int  # tokens
    output: int
    arrival_ms: float = 0.0


@dataclass(slots=True, frozen=True, kw_only=True)
class Limits:
    """The engine's own, of a model with graphs of steps with prompts."""

    slots: int = 32
    max_rows: int = 16384
    max_mixing_cost: float | None = 0.08


@dataclass(slots=True)
class Served:
    """What serving a load took."""

    busy_ms: float = 0.0  # without waiting for arrivals
    gaps_ms: list[float] = field(default_factory=list)  # between tokens of a request
    steps: list[tuple[int, int]] = field(default_factory=list)  # rows of prompts, and decodes

    @property
    def p99_ms(self) -> float:
        """Of the times between tokens."""
        return sorted(self.gaps_ms)[int(0.99 * len(self.gaps_ms))]

    @property
    def num_mixed(self) -> int:
        """Steps with rows of prompts and decodes."""
        return sum(prompts > 0 < decodes for prompts, decodes in self.steps)


def serve(load: Seq[Offered], times: StepTimes, limits: Limits) -> Served:
    """Serve a load with the engine's scheduler, one step after another."""
    scheduler = _scheduler(max(each.prompt + each.output for each in load), times, limits)
    waiting = sorted(enumerate(load), key=lambda each: each[1].arrival_ms)
    served, now, last_token = Served(), 0.0, dict[int, float]()
    while waiting or scheduler.running or scheduler.waiting:
        if not scheduler.running and not scheduler.waiting:
            now = max(now, waiting[0][1].arrival_ms)
        while waiting and waiting[0][1].arrival_ms <= now:
            scheduler.add(_sequence(*waiting.pop(0)))
        step = scheduler.schedule()
        assert step, "every step runs something"
        scheduler.launched(step)
        prompts = sum(item.num_rows for item in step if item.is_prefill)
        served.steps.append((prompts, sum(not item.is_prefill for item in step)))
        took = times.of(step)
        now, served.busy_ms = now + took, served.busy_ms + took
        for item in step:
            if item.samples:
                index = item.sequence.request.index
                if index in last_token:
                    served.gaps_ms.append(now - last_token[index])
                last_token[index] = now
            _apply(scheduler, item)
    return served


def parts_ms(load: Seq[Offered], times: StepTimes, limits: Limits) -> tuple[float, float]:
    """The time of reading a load's prompts alone, each for one token, and that of decoding it
    alone, each prompt read in no time."""
    read = serve([replace(each, output=1) for each in load], times, limits)
    at_once = replace(limits, max_rows=sum(each.prompt + each.output for each in load))
    decode = serve(load, replace(times, are_prompts_read=False), at_once)
    return read.busy_ms, decode.busy_ms


def _scheduler(longest: int, times: StepTimes, limits: Limits) -> Scheduler:
    tokens = longest + 2 * BLOCK
    blocks = 1 + limits.slots * (tokens // BLOCK + 1)
    graphs = mixed_row_sizes(
        [1, limits.slots], 1, limits.slots, limits.max_rows, max_large_rows=LARGEST_GRAPH
    )
    return Scheduler(
        kv_cache([kv_group("full", (0,), BLOCK)], [blocks], limits.slots, tokens, dtype=torch.half),
        max_num_seqs=limits.slots,
        max_num_batched_tokens=limits.max_rows,
        max_model_len=longest + 1,
        num_speculative_tokens=0,
        prompt_rows=PromptRows(
            max_rows=limits.max_rows,
            graph_rows=tuple(graphs),
            launch_bound_rows=times.launch_bound_rows,
            max_mixing_cost=limits.max_mixing_cost,
        ),
    )


def _sequence(index: int, offered: Offered) -> Sequence:
    sampling = SamplingParams(max_tokens=offered.output)
    request = Request(index=index, id=str(index), sampling=sampling)
    # No prompt shares its beginning with another.
    return Sequence(request=request, token_ids=[index] * offered.prompt, num_prompt=offered.prompt)


def _apply(scheduler: Scheduler, item: Scheduled) -> None:
    sequence = item.sequence
    sequence.num_computed += item.num_rows
    if item.samples:
        sequence.token_ids.append(0)
        sequence.decoding = True
    scheduler.arrived(item)
    if sequence.num_tokens - sequence.num_prompt >= sequence.request.sampling.max_tokens:
        scheduler.release(sequence)
