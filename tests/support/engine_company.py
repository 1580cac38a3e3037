"""Two and three engines over one loaded target, in every relation a process may have them in, held
against what each does without the others; on a CPU (float64, a graph backend) or on a device
(float32).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fuzz_stages import Pair, Stage, stage
from recorded_graphs import RecordedOps
from records import request
from side_by_side import Following, assert_same_run, has_graphs, interleave, run_alone
from step_ahead import Watch

from hydraspec.config.schema import Device, DraftSampling, Dtype, RunConfig
from hydraspec.engine.native import NativeEngine
from hydraspec.types import Request

LAUNCHES = ["eager", "graphs"]


@dataclass(frozen=True)
class Company:
    """Engines of a pair: kind own (K = 3), k (K = 5, other blocks, slots and steps) or none."""

    pair: Pair
    launch: str  # eager or graphs
    device: str = "cpu"

    @property
    def dtype(self) -> Dtype:
        return Dtype.float64 if self.device == "cpu" else Dtype.float32

    def make(self, kind: str) -> NativeEngine:
        """An engine with its own drafter and cache over the one target of the process."""
        found = stage(self.pair.stage, self.dtype, self.device)
        backend = RecordedOps() if self.device == "cpu" else None
        engine = found.engine(self.config(found, kind), backend)
        assert has_graphs(engine) == (self.launch == "graphs")
        return engine

    def config(self, found: Stage, kind: str) -> RunConfig:
        is_none, is_other = kind == "none", kind == "k"
        config = found.config(
            Pair(self.pair.stage, "none") if is_none else self.pair,
            k=5 if is_other else 3,
            max_model_len=96,
            max_num_seqs=2 if is_other else 4,
            max_num_batched_tokens=24 if is_other else 40,
            block_size=32 if is_other else 16,
            draft_sampling=DraftSampling.probabilistic,
        )
        config.engine.device = Device(self.device)
        if self.launch == "graphs":
            config.cudagraph.name = "full" if is_other else "full_and_piecewise"
            config.cudagraph.capture_sizes = [2]
        return config

    def requests(self) -> list[Request]:
        """Three of unlike length; on a CPU one is sampled."""
        prompts = [p for p in stage(self.pair.stage, self.dtype).prompts if 1 < len(p) < 70]
        return [
            request(
                index,
                prompt_token_ids=list(prompts[index]),
                max_tokens=7 + 3 * index,
                ignore_eos=True,
                seed=index,
                temperature=0.9 * (index == 1 and self.device == "cpu"),
            )
            for index in range(3)
        ]

    def follow(self, engine: NativeEngine) -> Following:
        return Following(engine, self.requests())

    def run(self, engine: NativeEngine) -> Watch:
        return self.follow(engine).finish()


def alone(company: Company, kind: str) -> Watch:
    """What such an engine does without company: over another copy of the weights, on the CPU and
    without graphs."""
    found = stage.__wrapped__(company.pair.stage, company.dtype)
    config = Company(company.pair, "eager").config(found, kind)
    return run_alone(found.engine(config), company.requests())


Alone = Callable[[Company, str], Watch]


def three_step_in_between(company: Company, order: Sequence[str], alone: Alone) -> None:
    """Other K, other block size, other method; in whatever order they are built and step."""
    engines = [company.make(kind) for kind in order]
    for stride in (1, 2):
        runs = interleave([company.follow(engine) for engine in engines], stride)
        for found, kind in zip(runs, order, strict=True):
            assert_same_run(found, alone(company, kind))


def baseline_takes_turns(company: Company, alone: Alone) -> None:
    """A shared cache, one run after the other, in every order. The baseline is built in the middle
    of a run of its origin, and so is an engine with its own cache, which steps in between."""
    engine = company.make("own")
    begun = company.follow(engine)
    begun.step()
    baseline, fellow = engine.baseline(), company.make("k")
    found = interleave([begun, company.follow(fellow)])
    assert_same_run(found[0], alone(company, "own"))
    assert_same_run(found[1], alone(company, "k"))
    for turn in (baseline, baseline, engine, baseline, engine, engine):
        wanted = alone(company, "own" if turn is engine else "none")
        assert_same_run(company.run(turn), wanted)


def one_goes_in_the_middle(company: Company, alone: Alone) -> None:
    """One of two is closed in the middle of its run and freed while the other goes on; a third
    takes its place, and the memory it had."""
    staying, going = company.make("own"), company.make("k")
    stays, goes = company.follow(staying), company.follow(going)
    for run in (stays, goes, stays, goes):
        run.step()
    goes.close()
    del going, goes, run
    gc.collect()
    coming = company.make("k")
    assert_same_run(company.run(coming), alone(company, "k"))
    assert_same_run(stays.finish(), alone(company, "own"))
    assert_same_run(company.run(staying), alone(company, "own"))
