"""A device that is as late as it may be, and freed cache that is poison: for engines that schedule
ahead of results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracle import OracleSpeculator

from hydraspec.engine import native as engine_module
from hydraspec.engine.cache.block_pool import BlockPool
from hydraspec.engine.cache.kv_cache import KVCache
from hydraspec.engine.native import NativeEngine
from hydraspec.types import Batch, Draft, RequestState, StepPlan, TargetStep, Verdict


class LateStep:
    """A launched step that has not begun."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.outcome: Any = None

    def result(self) -> Any:
        while self.outcome is None:
            self._device.work()
        return self.outcome

    def ms_since(self, before: LateStep) -> float | None:
        return None


class LateDevice:
    """Does what it is given in order, and nothing before somebody waits for a result.

    By then the host has moved on: a plan that shared memory with the scheduler, or a block given to
    two requests at once, shows as another token or a NaN.
    """

    def __init__(self, engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self._kv = engine.parts.runner.kv
        self._launch = engine.parts.runner.launch
        self.num_poisoned = 0
        monkeypatch.setattr(engine.parts.runner, "launch", self.launch)
        write = engine_module.write_request

        def write_later(
            state: RequestState, slot: int, tokens: list[int], sampling: Any, num_computed: int
        ) -> None:
            known = list(tokens)  # the host's copy at the time of the call
            self._queue.append(lambda: write(state, slot, known, sampling, num_computed))

        monkeypatch.setattr(engine_module, "write_request", write_later)

    def launch(self, plan: StepPlan) -> LateStep:
        step = LateStep(self)

        def run() -> None:
            step.outcome = self._launch(plan).result()

        self._queue.append(run)
        return step

    def work(self) -> None:
        self._queue.popleft()()

    def poison_freed_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Fill blocks with NaN, in order with the other work, once they are free and empty,
        or evicted from the prefix cache."""
        for name in ("slide", "release", "allocate"):
            monkeypatch.setattr(KVCache, name, self._poisoning(getattr(KVCache, name)))

    def _poisoning(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(kv: KVCache, *args: int) -> Any:
            before = [(set(group.pool.empty), kept(group.pool)) for group in kv._groups]
            found = method(kv, *args)
            for group, (empty, cached) in zip(kv._groups, before, strict=True):
                for block in set(group.pool.empty) - empty | cached - kept(group.pool):
                    self.num_poisoned += 1
                    self._queue.append(lambda group=group, block=block: poison(kv, group, block))
            return found

        return call


def kept(pool: BlockPool) -> set[int]:
    """Free blocks that are cached."""
    return {*pool._kept, *pool._passed}


def poison(kv: KVCache, group: Any, block: int) -> None:
    assert block != 0, "the null block was freed"
    size = group.spec.block_size
    for layer in group.spec.layers:
        cache = kv.caches[layer]
        assert cache is not None
        cache[block * size : (block + 1) * size] = torch.nan


class StableOracle(OracleSpeculator):
    """The oracle with errors that follow from a request's tokens alone, so that two engines are
    offered the same drafts. Past what it knows it drafts anything: overrun steps get there."""

    def propose(
        self, target_step: TargetStep, verdict: Verdict, batch: Batch, state: RequestState
    ) -> Draft:
        rows = []
        for slot, samples in zip(batch.slots.tolist(), batch.samples.tolist(), strict=True):
            length = int(state.num_computed[slot]) + 1
            tokens = state.token_ids[slot, :length].tolist()
            rows.append(self._draft(tokens) if samples else [0] * self.num_speculative_tokens)
        return Draft(tokens=torch.tensor(rows))

    def _draft(self, tokens: list[int]) -> list[int]:
        rng = np.random.default_rng(tokens)
        k = self.num_speculative_tokens
        truth = self._continuation(tokens)[:k]
        drafts = [*truth, *rng.integers(0, self._vocab_size, k - len(truth)).tolist()]
        right = int(rng.integers(0, k + 1))
        if right < len(truth):
            wrong = truth[right] + rng.integers(1, self._vocab_size)
            drafts[right] = int(wrong % self._vocab_size)
        return drafts

    def _continuation(self, tokens: list[int]) -> list[int]:
        for prompt, continuation in self._known.items():
            known = [*prompt, *continuation]
            if tokens[: len(known)] == known:
                return []
        return super()._continuation(tokens)
