"""What compiling ahead computes is garbage: nothing of it may stay in an engine.

Every target family with every drafter is loaded on the CPU the way a device loads it. The second
engine of a process once rehearsed on the runner that then decoded: its upload kept row indices that
were all zero, and every answer of a baseline was wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from fuzz_stages import PAIRS, RANDOM_PAIRS, Pair, Stage, stage
from graph_runs import attention_as_on_devices
from recorded_graphs import RecordedOps
from records import request
from rehearsed import Snapshot, rehearse_on_cpu, rehearse_where_it_decodes
from side_by_side import assert_same_run, has_graphs, run_alone

from hydraspec.config.schema import DraftSampling, Dtype, MethodConfig, RunConfig
from hydraspec.engine.cache.sizing import Models
from hydraspec.engine.run import loading
from hydraspec.engine.run.device_runner import DeviceRunner
from hydraspec.speculators.none import NoSpeculator
from hydraspec.types import Request

QUICK = {"random sharing", "random experts", "random peagle on gemma4"}
QUICK |= {"random mimo", "random deepseek"}
EVERY_PAIR = [
    pytest.param(
        pair,
        mode,
        id=f"{pair.stage}-{pair.method}-{mode}",
        marks=[] if pair.stage in QUICK and mode == "none" else [pytest.mark.slow],
    )
    for pair in PAIRS
    for mode in (("none", "full") if pair in RANDOM_PAIRS else ("none",))  # the zoo's take longer
]


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    attention_as_on_devices(monkeypatch)


def config_of(found: Stage, pair: Pair, mode: str) -> RunConfig:
    config = found.config(
        pair,
        k=3,
        max_model_len=96,
        max_num_seqs=4,
        max_num_batched_tokens=40,
        block_size=16,
        draft_sampling=DraftSampling.probabilistic,
    )
    config.cudagraph.name = mode
    config.cudagraph.capture_sizes = [2] if mode != "none" else None
    return config


def requests_for(found: Stage, count: int = 3) -> list[Request]:
    """Greedy, and one that is sampled."""
    prompts = [prompt for prompt in found.prompts if 1 < len(prompt) < 60]
    return [
        request(
            index,
            prompt_token_ids=list(prompts[index]),
            max_tokens=6 + index,
            ignore_eos=True,
            seed=index,
            temperature=0.9 * (index == 1),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize(("pair", "mode"), EVERY_PAIR)
def test_a_second_engine_changes_nothing_of_the_first(
    pair: Pair, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first engine has decoded, so its caches of layouts are full. Rehearsals for a second one
    and for a baseline then make and change no tensor of target, drafter, runner or upload, and
    leave none elsewhere in the process."""
    found = stage(pair.stage, Dtype.float64)
    config = config_of(found, pair, mode)
    engine, requests = found.engine(config, RecordedOps()), requests_for(found)
    assert has_graphs(engine) == (mode != "none")
    wanted = run_alone(engine, requests)
    parts, runner = engine.parts, engine.parts.runner
    other = engine.parts.runner.speculator.__class__(config)
    other.load(found.target)
    none = replace(config, method=MethodConfig(name="none", num_speculative_tokens=0))
    before = Snapshot(found.target, parts.target, runner.speculator, runner, runner.upload)
    assert len(before) > 20
    rehearse_on_cpu(monkeypatch)
    modes = runner.modes
    for of, speculator in ((none, NoSpeculator(none)), (config, other)):
        models = Models(
            config=of,
            target=parts.target,
            speculator=speculator,
            max_model_len=engine.info.max_model_len,
        )
        rehearsing = loading.rehearsing_runner(models, modes, RecordedOps())
        loading._compile(rehearsing)
        del rehearsing
    del other, speculator, models
    before.assert_unchanged()
    assert_same_run(run_alone(engine, requests), wanted)


@pytest.mark.parametrize(("pair", "mode"), EVERY_PAIR)
def test_engines_that_rehearse_decode_the_same(
    pair: Pair, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first engine and its baseline, loaded as a device loads them."""
    found = stage(pair.stage, Dtype.float64)
    config, requests = config_of(found, pair, mode), requests_for(found)
    engine = found.engine(config, RecordedOps())
    wanted = run_alone(engine, requests), run_alone(engine.baseline(), requests)
    rehearse_on_cpu(monkeypatch)
    engine = found.engine(config, RecordedOps())
    baseline = engine.baseline()
    assert_same_run(run_alone(engine, requests), wanted[0])
    assert_same_run(run_alone(baseline, requests), wanted[1])
    assert_same_run(run_alone(engine, requests), wanted[0])


def keep_row_indices_with_the_drafter(patch: pytest.MonkeyPatch) -> None:
    """A separate runner rehearses, but what it keeps is kept in the drafter, which both share."""
    true_init = DeviceRunner.__init__

    def init(self: DeviceRunner, *args: object, **kwargs: object) -> None:
        true_init(self, *args, **kwargs)  # type: ignore[arg-type]
        kept = vars(self.speculator).setdefault("kept", {})
        self.upload._uniform = kept

    patch.setattr(DeviceRunner, "__init__", init)


@pytest.mark.parametrize("plant", [rehearse_where_it_decodes, keep_row_indices_with_the_drafter])
def test_planted_bugs_are_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above proves something only if it fails where garbage stays."""
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_engines_that_rehearse_decode_the_same(Pair("random mimo", "mtp"), "none", monkeypatch)
