"""Engines of one process that run at the same time or in turns, and what each of them did."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from step_ahead import Watch, outputs

from hydraspec.engine.native import NativeEngine
from hydraspec.engine.run.device_runner import DeviceRunner
from hydraspec.types import Request, StepRecord


class Following:
    """A run of an engine, step by step."""

    def __init__(
        self, engine: NativeEngine, requests: Sequence[Request], concurrency: int | None = None
    ) -> None:
        self.engine, self.seen, self.is_done = engine, Watch(), False
        self._events = engine.run(copy.deepcopy(list(requests)), concurrency=concurrency)

    def step(self) -> None:
        """One step further; nothing once the run is done."""
        for event in self._events:
            if isinstance(event, StepRecord):
                self.seen.records.append(event)
                return
            self.seen.completions[event.index] = event
        self.is_done = True

    def finish(self) -> Watch:
        while not self.is_done:
            self.step()
        assert_nothing_is_held(self.engine)
        return self.seen

    def close(self) -> None:
        """End the run where it stands."""
        self._events.close()
        self.is_done = True
        assert_nothing_is_held(self.engine)


def run_alone(
    engine: NativeEngine, requests: Sequence[Request], concurrency: int | None = None
) -> Watch:
    return Following(engine, requests, concurrency).finish()


def interleave(runs: Sequence[Following], stride: int = 1) -> list[Watch]:
    """A few steps of each in turn until all are done."""
    while not all(run.is_done for run in runs):
        for run in runs:
            for _ in range(stride):
                if not run.is_done:
                    run.step()
    return [run.finish() for run in runs]


def assert_nothing_is_held(engine: NativeEngine) -> None:
    """No block, slot or step belongs to a request that has ended; the null block is as it was."""
    scheduler, kv = engine.parts.scheduler, engine.parts.runner.kv
    assert not engine._in_flight
    assert not scheduler.running
    assert not scheduler.waiting
    assert sorted(scheduler._free_slots) == list(range(scheduler.max_num_seqs)), "slots leaked"
    assert kv.usage == 0.0, "blocks leaked"
    for group in kv._groups:
        assert sorted(group.pool.empty) == list(range(1, group.num_blocks)), "blocks leaked"
        for layer in group.spec.layers:
            cache = kv.caches[layer]
            assert cache is not None
            null_block = cache[: group.spec.block_size].double()
            assert not null_block.count_nonzero(), "the null block was written"


def has_graphs(engine: NativeEngine) -> bool:
    runner = engine.parts.runner
    return isinstance(runner, DeviceRunner) and bool(runner.graphs)


def assert_same_run(found: Watch, wanted: Watch) -> None:
    """Tokens, reasons, and every verify step's drafts and accepted count."""
    assert outputs(found) == outputs(wanted)
    assert found.decodes == wanted.decodes
