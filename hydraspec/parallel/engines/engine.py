"""The engine of several ranks, which the lab on rank 0 calls as it calls any engine."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from itertools import count

import numpy as np

from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Built, Engine, EngineInfo, StepProfile
from hydraspec.engine.native import NativeEngine
from hydraspec.engine.schedule.admission import Cancels
from hydraspec.parallel.control import Plain
from hydraspec.parallel.engines.calls import CLOSE, Images, announce
from hydraspec.parallel.engines.outcome import Peers, Together
from hydraspec.parallel.engines.replicas import Inbox, Share, replica_events
from hydraspec.parallel.engines.wire import from_requests
from hydraspec.parallel.ranks import current
from hydraspec.signals import interrupts_held_back
from hydraspec.types import Completion, Image, Request, SamplingParams, Span, StepRecord


class ParallelEngine(Engine):
    """Announces each call, makes it on this rank's engine, and waits until the others have made it.
    Raises the first error that any rank had."""

    def __init__(self, config: RunConfig, origin: ParallelEngine | None = None) -> None:
        """Load on every rank what `config` names, or make the baseline of the engine `origin`."""
        self._peers = Peers()
        self._num_steps = 0
        self._cancels = Cancels()  # of the newest run
        if origin is None:
            self._together = Together(current())
            self._number, self._numbers = 0, count(1)  # this engine's, and those of the next ones
            self._runs, self._images = count(), Images()
            with self._together.call(self._peers):
                self._peers.engine = NativeEngine(config)
        else:
            self._together, self._runs = origin._together, origin._runs
            self._images = origin._images
            self._number, self._numbers = next(origin._numbers), origin._numbers
            with interrupts_held_back(), self._together.call(self._peers):
                origin._announce("baseline")
                self._peers.engine = origin._engine.baseline()

    @property
    def _engine(self) -> NativeEngine:
        assert self._peers.engine is not None
        return self._peers.engine

    @property
    def info(self) -> EngineInfo:  # type: ignore[override]
        """Rank 0's facts, with the devices and warnings of all ranks and the most memory of any."""
        facts = self._peers.facts
        return replace(
            self._engine.info,
            devices=facts.devices,
            max_memory_bytes=facts.memory_bytes,
            warnings=facts.warnings,
        )

    def _announce(self, name: str, **arguments: Plain) -> None:
        announce(self._together.control, self._number, name, **arguments)

    @contextmanager
    def _called(
        self, name: str, requests: Sequence[Request], **more: Plain
    ) -> Iterator[NativeEngine]:
        """Context of a call that all ranks make and that is not interrupted within a step."""
        with interrupts_held_back(), self._together.call(self._peers):
            self._announce_with(name, requests, **more)
            yield self._engine

    def _announce_with(self, name: str, requests: Sequence[Request], **more: Plain) -> None:
        """Announce a call with requests, and before it the images that ranks do not have yet."""
        self._images.send(self._together.control, requests)
        self._announce(name, requests=from_requests(requests), **more)

    def tokenize(self, requests: Sequence[Request]) -> None:
        self._engine.tokenize(requests)

    def run(
        self, requests: Sequence[Request], *, concurrency: int | None
    ) -> Generator[StepRecord | Completion]:
        """See Engine. `concurrency` limits the requests of all replicas together."""
        self._cancels = Cancels()
        return self._events(requests, concurrency, self._cancels)

    def cancel(self, index: int) -> None:
        """See Engine. Other replicas are told at the next event of the iterator."""
        self._cancels.add(index)

    def _events(
        self, requests: Sequence[Request], concurrency: int | None, cancels: Cancels
    ) -> Generator[StepRecord | Completion]:
        control = self._together.control
        share = Share(
            name=f"run{next(self._runs)}",
            concurrency=concurrency,
            has_arrivals=any(request.arrival_s is not None for request in requests),
        )
        inbox = Inbox(control, share, cancels, self._num_steps)
        with self._together.call(self._peers), ExitStack() as opened:
            try:
                with interrupts_held_back():  # every rank begins the run, or none
                    own = replica_events(
                        *(self._engine, control, requests, share, inbox.cancels, inbox.receive)
                    )
                    events = opened.enter_context(closing(inbox.merged(own)))
                    self._announce_with("run", requests, share=asdict(share))
            except KeyboardInterrupt:
                next(events, None)  # a run that has begun announces its end
                raise
            yield from events
        self._num_steps = inbox.num_steps

    def prepare(self, requests: Sequence[Request], *, concurrency: int | None = None) -> None:
        with self._called("prepare", requests, concurrency=concurrency) as engine:
            engine.prepare(requests, concurrency=concurrency)

    def has_eager_steps(self) -> bool:
        return self._engine.has_eager_steps()

    def num_built(self) -> Built:
        """See Engine; the largest counts of any rank after the last call."""
        return self._peers.facts.built

    def baseline(self) -> ParallelEngine:
        return ParallelEngine(self._engine.parts.config, self)

    def next_token_logits(
        self,
        token_ids: Sequence[int],
        spans: tuple[Span, ...] = (),
        images: tuple[Image, ...] = (),
    ) -> np.ndarray:
        request = Request(
            index=0,
            id="logits",
            sampling=SamplingParams(),
            prompt_token_ids=list(token_ids),
            spans=spans,
            images=images,
        )
        with self._called("next_token_logits", [request]) as engine:
            return engine.next_token_logits(token_ids, spans, images)

    def allowed_tokens(
        self, sampling: SamplingParams, token_ids: Sequence[int], num_prompt: int
    ) -> np.ndarray | None:
        return self._engine.allowed_tokens(sampling, token_ids, num_prompt)

    def profile_step(self, requests: Sequence[Request]) -> StepProfile | None:
        """See Engine; only rank 0's replica is measured."""
        with self._called("profile_step", requests) as engine:
            return engine.profile_step(requests)

    def profile_phases(self, requests: Sequence[Request]) -> dict[str, float] | None:
        """See Engine; only rank 0's replica is measured."""
        with self._called("profile_phases", requests) as engine:
            return engine.profile_phases(requests)

    def close(self) -> None:
        """See Engine. Closing the first engine ends `follow` on other ranks, unless one failed."""
        if self._number == 0 and not self._together.is_over:
            announce(self._together.control, self._number, CLOSE)
        self._engine.close()
