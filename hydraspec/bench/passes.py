"""Timed passes of requests with fixed output lengths through an engine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np

from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Engine
from hydraspec.metrics.files import Json
from hydraspec.metrics.meter import Meter
from hydraspec.metrics.statistics import ratio
from hydraspec.metrics.summary import DraftLengths
from hydraspec.types import Completion, Request, StepRecord
from hydraspec.workloads.reading import fixed_length_sampling

STREAM = 0x62656E63  # seed of the prompts' random numbers


class Passes:
    """Timed passes of the same requests through an engine: offered all at once, or as they arrive.

    Attributes:
        seconds: time of each pass from its start to the last token, without waiting for a step that
            was launched ahead and that no request needs.
        meter: the counts of all passes together.
        steps: the records of the last pass; none from an engine that reports completions only.
        completions: the completions of the last pass, in the order in which they ended.
        num_built: number of kernels compiled and graphs captured in the last pass.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self._engine, self._requests = engine, requests
        self.seconds: list[float] = []
        self.steps: list[StepRecord] = []
        self.completions: list[Completion] = []
        self.num_built = 0
        self.meter = Meter(
            requests,
            num_speculative_tokens=engine.info.num_speculative_tokens,
            prefix_caching=engine.info.prefix_caching,
        )

    def run(self) -> None:
        """Time one pass, then count its steps.

        Raises:
            RuntimeError: a request ended otherwise than after all its tokens.
        """
        events: list[StepRecord | Completion] = []
        built_before = self._engine.num_built()
        seconds, started = 0.0, time.perf_counter()
        for event in self._engine.run(self._requests, concurrency=None):
            events.append(event)
            if isinstance(event, Completion):
                seconds = time.perf_counter() - started
        built = self._engine.num_built() - built_before
        self.num_built = built.kernels + built.graphs
        self.steps = [event for event in events if isinstance(event, StepRecord)]
        self.completions = [event for event in events if isinstance(event, Completion)]
        self._check(self.completions)
        self.seconds.append(seconds)
        self.meter.begin_run()
        for event in events:
            if isinstance(event, StepRecord):
                self.meter.add_step(event)
            else:
                self.meter.add_completion(event)

    def drafts_used(self) -> DraftLengths | None:
        """The numbers of drafts that requests had in decode steps; None where K is fixed or only
        completions are reported."""
        return self.meter.steps.draft_lengths.used(self.meter.num_speculative_tokens)

    def figures(self) -> Json:
        """The figures of a row that every benchmark of whole passes has, after exactly one pass."""
        (seconds,), num_tokens = self.seconds, self.meter.num_output_tokens()
        return {
            "seconds": seconds,
            "num_output_tokens": num_tokens,
            "tokens_per_second": ratio(num_tokens, seconds),
            "acceptance_length": self.meter.acceptance_length().mean,
            "num_speculative_tokens_used": self.drafts_used(),
            "num_steps": self.meter.steps.num_steps or None,  # None: only completions are reported
        }

    def _check(self, completions: Sequence[Completion]) -> None:
        wanted = {request.index: request.sampling.max_tokens for request in self._requests}
        for ended in completions:
            if len(ended.output_token_ids) != wanted[ended.index]:
                raise RuntimeError(
                    f"request {ended.index} ended with {ended.finish_reason!r} after "
                    f"{len(ended.output_token_ids)} of {wanted[ended.index]} tokens: {ended.error}"
                )
        if len(completions) != len(wanted):
            raise RuntimeError(f"{len(completions)} of {len(wanted)} requests ended")


def make_requests(
    config: RunConfig,
    prompts: Iterable[list[int]],
    num_tokens: Iterable[int],
    *,
    first: int = 0,
) -> list[Request]:
    """A request for each prompt of token ids, numbered from `first` on, which decodes exactly its
    entry of num_tokens."""
    return [
        Request(
            index=i,
            id=str(i),
            sampling=fixed_length_sampling(config, i, count),
            prompt_token_ids=ids,
        )
        for i, (ids, count) in enumerate(zip(prompts, num_tokens, strict=True), first)
    ]


def random_prompts(config: RunConfig, vocab_size: int, batch: int) -> list[list[int]]:
    """Random token ids of `batch` prompts with bench.prompt_tokens each (bench=turns: turn_tokens;
    bench=context: the first of contexts), the same for every engine."""
    rng = np.random.default_rng([config.seed, STREAM, batch])
    bench = config.bench
    length = bench.prompt_tokens or bench.turn_tokens or bench.contexts[0]
    ids: list[list[int]] = rng.integers(0, vocab_size, (batch, length)).tolist()
    return ids
