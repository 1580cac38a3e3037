"""The interface of every engine: what runs, benchmarks and reports call and read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hydraspec.engine.costs import CostTable
from hydraspec.errors import ConfigurationError
from hydraspec.sampling.rules import constrained_row, has_rules
from hydraspec.types import (
    Completion,
    Image,
    PositionScores,
    PrefixCaching,
    Request,
    SamplingParams,
    Span,
    StepRecord,
)


@dataclass(slots=True, kw_only=True)
class EngineInfo:
    """Facts of a loaded engine that the summary and env.json record."""

    engine: str
    target: str
    method: str
    num_speculative_tokens: int
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    greedy_is_exact: bool  # native float32/float64: outputs are expected identical
    cudagraph: dict[str, str | None]  # requested, target, draft, reason
    checks_logits: bool = False  # in every step: NaN or infinite logits end the run
    async_scheduling: bool | None = None  # steps are scheduled ahead of results; None: not known
    prefix_caching: PrefixCaching | None = None  # None: there is none, or it is not known
    encoded_kinds: tuple[str, ...] = ()  # kinds of spans that the target has an encoder for
    memory_bytes: dict[str, int] = field(default_factory=dict)  # weights, draft_weights, kv_cache
    max_memory_bytes: dict[str, int] = field(default_factory=dict)  # the most of any rank
    devices: list[str] = field(default_factory=list)  # of all ranks, in their order
    draft_spec: dict[str, object] | None = None  # the normalised drafter, as logged
    # Of the target by kind, its "kv_cache" too if that is not in dtype; None: all is float.
    quantization: Mapping[str, str] | None = None
    eos_token_ids: list[int] = field(default_factory=list)  # that min_tokens bans
    # Time of the host for grammars, see engine.grammars.GrammarCosts; None: no request has any.
    grammars: Mapping[str, float | int | None] | None = None
    costs: CostTable | None = None  # decode step costs, if K is chosen by these
    # Notes on what was loaded and captured; callers log them (factory.log_notes), engines do not.
    warnings: list[str] = field(default_factory=list)


def notes_of(info: EngineInfo, baseline: EngineInfo | None = None) -> list[str]:
    """The warnings of an engine, each once, then those that only its baseline has, marked so."""
    others = () if baseline is None else baseline.warnings
    own = dict.fromkeys(info.warnings)
    return [*own, *(f"baseline: {text}" for text in dict.fromkeys(others) if text not in own)]


@dataclass(slots=True, frozen=True)
class Built:
    """Kernels compiled (or read from a cache on the disk) in this process, and graphs captured by
    one engine."""

    kernels: int = 0
    graphs: int = 0

    def __sub__(self, earlier: Built) -> Built:
        return Built(self.kernels - earlier.kernels, self.graphs - earlier.graphs)

    def __add__(self, other: Built) -> Built:
        return Built(self.kernels + other.kernels, self.graphs + other.graphs)


@dataclass(slots=True, frozen=True, kw_only=True)
class StepProfile:
    """Means over decode steps that ran as they do in a run, in milliseconds."""

    step_ms: float  # wall time from one step's results to the next one's
    device_ms: float  # time of the device, from the plan's copy to the results
    schedule_ms: float  # time of the host: which requests run, and their plan
    launch_ms: float  # time of the host: handing the step to the device


class Engine(ABC):
    """A loaded target with at most one drafter."""

    info: EngineInfo

    @abstractmethod
    def tokenize(self, requests: Sequence[Request]) -> None:
        """Fill `prompt_token_ids` of every request.

        Raises:
            WorkloadError: naming `request.id`, for token ids outside the vocabulary, or text
            without a tokenizer.
        """

    @abstractmethod
    def run(
        self, requests: Sequence[Request], *, concurrency: int | None
    ) -> Iterator[StepRecord | Completion]:
        """Decode tokenised requests, at most `concurrency` unfinished at a time (None: any number).
        A request with `arrival_s` is offered so many seconds after the first `next` of the
        iterator, a later turn of a conversation once the previous one has ended. A conversation
        counts as one unfinished request until its last turn has ended.

        Yields the record of each step, then the completions it brought. A request that can never be
        served yields a Completion with finish_reason "error"; the others go on. Closing the
        iterator drops unfinished requests.

        Raises:
            NotFiniteError: a token came from logits whose maximum is NaN or infinite; its request
            was yielded as an error, with the tokens before it. Only engines with
            `info.checks_logits` raise it; for others the lab checks one request after the run.
        """

    def cancel(self, index: int) -> None:
        """End request `index` of the newest run with the error "cancelled" and the tokens that it
        has by then. Its completion comes with the next step, or, if it has not been offered yet,
        with the step that it would join. A request that has ended is left alone. Any thread may
        call this, also between two events of the run's iterator.

        Raises:
            ConfigurationError: this engine cannot cancel requests; the native engine can.
        """
        raise ConfigurationError(
            "cancel: this engine ends no request before its time\n"
            "  allowed: engine=native\n  to do: choose that engine, or close the run's iterator"
        )

    def prepare(self, requests: Sequence[Request], *, concurrency: int | None = None) -> None:
        """Build ahead of time what `run` would build when these requests first need it, with at
        most `concurrency` of them unfinished at a time (None: any number)."""
        return None

    def most_at_once(self, num_tokens: int) -> int | None:
        """Number of requests of `num_tokens`, prompt and output, that may run at once; None from an
        engine that cannot say."""
        return None

    def with_drafts(self, num_drafts: int) -> AbstractContextManager[None]:
        """Context in which every step of an engine that chooses its drafts has so many.

        Raises:
            ConfigurationError: this engine chooses none; the native engine does with
            method.num_speculative_tokens=auto.
        """
        raise ConfigurationError(
            "with_drafts: this engine has one number of drafts\n  allowed: engine=native with "
            "method.num_speculative_tokens=auto\n  to do: choose these"
        )

    def has_eager_steps(self) -> bool:
        """Returns whether some steps run on a device without graphs, so that their kernels are
        compiled when a step first needs them."""
        return False

    def num_built(self) -> Built:
        """Counts of kernels and graphs built so far; a run during which they grow was slowed down
        by building."""
        return Built()

    @abstractmethod
    def baseline(self) -> Engine:
        """The same loaded target without a drafter; it shares weights with this engine."""

    def plain_cache(self) -> Engine | None:
        """The same loaded target without a drafter, over a cache that rounds nothing, where this
        engine's rounds keys and values; None from an engine that cannot tell what that costs.

        Raises ConfigurationError: no memory is left for such a cache.
        """
        return None

    @abstractmethod
    def next_token_logits(
        self,
        token_ids: Sequence[int],
        spans: tuple[Span, ...] = (),
        images: tuple[Image, ...] = (),
    ) -> np.ndarray | None:
        """Target logits [V] (float64) after `token_ids`, of which `spans` are no text, and `images`
        those of kind "image", from one fresh prefill; None from an engine that gives none.
        """

    def logits_under(
        self, sampling: SamplingParams, token_ids: Sequence[int], num_prompt: int, **given: Any
    ) -> np.ndarray | None:
        """Logits of `next_token_logits` under a request's rules, where it has any; the first
        num_prompt tokens are its prompt. `given` are further arguments of that method."""
        logits = self.next_token_logits(token_ids, **given)
        if logits is None or not has_rules(sampling):
            return logits
        found = constrained_row(logits, token_ids, num_prompt, sampling, self.info.eos_token_ids)
        allowed = self.allowed_tokens(sampling, token_ids, num_prompt)
        return found if allowed is None else np.where(allowed, found, -np.inf)

    def allowed_tokens(
        self, sampling: SamplingParams, token_ids: Sequence[int], num_prompt: int
    ) -> np.ndarray | None:
        """Tokens [V] (bool) that a request's grammar allows after `token_ids`, of which the first
        num_prompt are its prompt; None: it has no grammar, or the engine follows none."""
        return None

    def profile_step(self, requests: Sequence[Request]) -> StepProfile | None:
        """Breakdown of a decode step's wall time, from a separate short run over tokenised
        requests; None where host and device do not run side by side.
        """
        return None

    def profile_phases(self, requests: Sequence[Request]) -> dict[str, float] | None:
        """Mean milliseconds per decode step of each phase, from a separate short run over tokenised
        requests; None where `run` measures phases itself, or where they cannot be measured.
        """
        return None

    def position_scores(
        self, requests: Sequence[Request], completions: Mapping[int, Completion]
    ) -> Iterator[PositionScores] | None:
        """Teacher-forced drafts from every place of finished outputs, one record per request;
        outputs of fewer than two tokens are left out. `completions` are by request index. None from
        an engine whose drafter cannot be teacher-forced. The pass is separate from any run and
        takes additional time and memory.
        """
        return None

    def close(self) -> None:
        """Free the engine's memory at once, even while this object is referenced; further calls are
        undefined. What a baseline shares with it is freed once the baseline is closed too."""
        vars(self).clear()


@contextmanager
def closing_run(
    engine: Engine, requests: Sequence[Request], concurrency: int | None
) -> Iterator[Iterator[StepRecord | Completion]]:
    """Context that yields the events of an engine's run, and closes the run in any case, so that an
    interrupt leaves the engine usable."""
    events = engine.run(requests, concurrency=concurrency)
    try:
        yield events
    finally:
        if isinstance(events, Generator):
            events.close()
