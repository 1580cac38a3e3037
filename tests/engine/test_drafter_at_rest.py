"""A drafter that does not run while no drafts are wanted, and makes up for it when they are: drafts
are those of a drafter that ran in every step. float64: no tie turns."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from typing import Any

import pytest
from graph_runs import Run, graph_config, make_graph_engine, run_requests, zoo_requests
from grids import slow_unless

from hydraspec.config.schema import PerStep
from hydraspec.engine.native import NativeEngine
from hydraspec.engine.run.late_rows import MOST_LATE_ROWS
from hydraspec.types import Request

MOST = 3
METHODS = ("eagle3", "eagle", "mtp", "peagle on gemma4", "dflash", "dspark on gemma4")
# Rests of every kind: short ones, one that is longer than rows are kept for, of some requests only.
SCRIPT = (0, 0, MOST, MOST, *[0] * (MOST_LATE_ROWS + 5), MOST, 1, 0, (0, MOST), (0, MOST), 0, 0, 0)


def engine_of(
    method: str, *, rests: bool = True, is_ahead: bool = False, caches: bool = True
) -> NativeEngine:
    config = graph_config(
        method, "none", k=PerStep.auto, max_speculative_tokens=MOST, max_model_len=160
    )
    config.engine.async_scheduling, config.engine.prefix_caching = is_ahead, caches
    engine = make_graph_engine(config, None)
    lengths = engine.parts.scheduler.draft_lengths
    assert lengths is not None
    assert lengths.most_late == MOST_LATE_ROWS
    if not rests:
        engine.parts.scheduler._plans._most_late = 0
    return engine


def decode(
    engine: NativeEngine, requests: list[Request], script: Iterable[Any], at_once: int = 4
) -> Run:
    lengths = engine.parts.scheduler.draft_lengths
    assert lengths is not None
    lengths.follow(script)
    return run_requests(engine, requests, concurrency=at_once)


def requests() -> list[Request]:
    return zoo_requests(7, longest=50, ignore_eos=True)


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("method", slow_unless(lambda m: m == "eagle3", [(m,) for m in METHODS]))
def test_drafts_are_those_of_a_drafter_that_never_rests(method: str, is_ahead: bool) -> None:
    runs = {}
    for rests in (False, True):
        engine = engine_of(method, rests=rests, is_ahead=is_ahead)
        runs[rests] = decode(engine, requests(), cycle(SCRIPT))
    assert runs[True].outputs == runs[False].outputs
    assert runs[True].drafts == runs[False].drafts
    assert sum(len(d) > 0 for of_one in runs[True].drafts.values() for d in of_one) > 5


def test_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps without drafts, but for one in MOST_LATE_ROWS + 1, and for those that read
    prompts."""
    engine = engine_of("eagle3")
    runner, calls = engine.parts.runner, {"propose": 0, "fill": 0}
    propose, fill = runner.speculator.propose, runner.speculator.fill_late  # type: ignore[attr-defined]

    def counted(name: str, call: Any) -> Any:
        def run(*args: Any) -> Any:
            calls[name] += 1
            return call(*args)

        return run

    monkeypatch.setattr(runner.speculator, "propose", counted("propose", propose))
    monkeypatch.setattr(runner.speculator, "fill_late", counted("fill", fill))
    one = zoo_requests(1, ignore_eos=True)
    one[0].sampling.max_tokens = 60
    run = decode(engine, one, cycle([0]), at_once=1)
    num_steps = len(run.batch_sizes)
    num_prompt_steps = num_steps - 59  # the last of them samples the first of 60 tokens
    assert calls["fill"] == 59 // (MOST_LATE_ROWS + 1)
    assert calls["propose"] == calls["fill"] + num_prompt_steps


def test_rows_that_it_lacks_are_in_no_prefix() -> None:
    """A request that goes on from a finished one's text, which no drafter ran over at its end, has
    the drafts that it has without a cache of prefixes."""
    texts = requests()[:1]
    texts[0].sampling.max_tokens = MOST_LATE_ROWS + 1
    engine = engine_of("eagle3")
    first = decode(engine, texts, cycle([0]), at_once=1)
    assert texts[0].prompt_token_ids is not None
    text = [*texts[0].prompt_token_ids, *first.outputs[0][0]]
    engine.tokenize(again := requests()[:2])
    again[0].sampling.max_tokens = MOST_LATE_ROWS + 1
    again[1].messages, again[1].prompt_token_ids = None, text
    script = [*[0] * len(first.batch_sizes), *[MOST] * 100]
    runs = []
    for caches in (True, False):
        engine = engine_of("eagle3", caches=caches)
        runs.append(decode(engine, again, script, at_once=1))
    cached, computed = ([drafts for drafts in run.drafts[1] if drafts] for run in runs)
    assert cached == computed
    assert len(cached) > 2
    assert runs[0].batch_sizes != runs[1].batch_sizes, "nothing was taken from the cache"
