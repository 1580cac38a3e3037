"""Quantised pairs of the zoo beside the float pairs that they are made from: acceptance, and the
faults of loaders that acceptance or a message must show.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from fuzz_engines import build, one_by_one
from fuzz_ranks import Happened, small_case
from fuzz_stages import QUANTISED_PAIRS, RAGGED, Pair
from graph_runs import graph_config, run_requests, zoo_requests
from grids import slow_unless
from side_by_side import run_alone
from step_ahead import outputs
from tiny_targets import load
from torch import Tensor

from hydraspec.config.schema import Dtype, RunConfig
from hydraspec.engine.native import NativeEngine
from hydraspec.models import weights
from hydraspec.models.base import TargetModel
from hydraspec.models.checkpoint.quantization import Scheme
from hydraspec.models.checkpoint.reader import Checkpoint, resolve_folder
from hydraspec.models.checkpoint.twins import TWINS
from hydraspec.models.moe import RoutedExperts
from hydraspec.models.parts import Tensors, Weights
from hydraspec.models.quantised.experts import ExpertSlab
from hydraspec.models.quantised.projection import Projection
from hydraspec.types import CheckpointError

FLOOR = 0.97  # of the float pair's acceptance length
QUICK = (8, 24)  # requests, and tokens of each
FEWEST = (3, 24)  # show a fault, which leaves hardly a draft accepted
WHOLE = (64, 96)


def float_pair(pair: Pair) -> Pair:
    """The pair of the float checkpoints that both are made from."""

    def source(name: str) -> str:
        return TWINS[name].of if name in TWINS else name

    drafter = pair.drafter and f"zoo:{source(pair.drafter.removeprefix('zoo:'))}"
    return Pair(source(pair.stage), pair.method, drafter)


def engine_config(pair: Pair) -> RunConfig:
    return graph_config(
        pair.method,
        "none",
        dtype=Dtype.float32,
        pair=(pair.stage, pair.drafter and pair.drafter.removeprefix("zoo:")),
        max_num_seqs=16,
        max_num_batched_tokens=512,
        max_model_len=256,
    )


def acceptance_length(pair: Pair, size: tuple[int, int]) -> float:
    """Mean acceptance length over the zoo's first prompts, greedy, in float32."""
    num_requests, max_tokens = size
    requests = zoo_requests(num_requests)
    for request in requests:
        request.sampling.max_tokens = max_tokens
    run = run_requests(NativeEngine(engine_config(pair)), requests, concurrency=16)
    steps = [draft for drafts in run.drafts.values() for draft in drafts if draft]
    return 1 + run.num_accepted / len(steps)


@cache
def float_length(pair: Pair, size: tuple[int, int]) -> float:
    return acceptance_length(pair, size)


def assert_floor(pair: Pair, size: tuple[int, int]) -> None:
    found, wanted = acceptance_length(pair, size), float_length(float_pair(pair), size)
    assert found >= FLOOR * wanted, f"{found:.3f}, of {wanted:.3f} in float"


def name(pair: Pair) -> str:
    return f"{pair.stage}-{pair.method}"


PAIRS = [*QUANTISED_PAIRS, RAGGED]


@pytest.mark.parametrize(
    "pair", slow_unless(lambda pair: pair in PAIRS[::2], product(PAIRS)), ids=name
)
def test_acceptance_is_near_that_of_the_float_pair(pair: Pair) -> None:
    assert_floor(pair, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("pair", QUANTISED_PAIRS, ids=name)
def test_acceptance_over_the_whole_workload(pair: Pair) -> None:
    assert_floor(pair, WHOLE)


def test_drafts_change_no_token() -> None:
    """Greedy requests in chunks, beside sampled ones, some of them preempted, against the target
    alone with one request at a time. On ranks: test_tensor_parallel.py; others: slow fuzzes."""
    happened = Happened()
    for number, pair in enumerate(QUANTISED_PAIRS):
        case = small_case(number, pair)
        seen = run_alone(build(case), case.requests)
        happened.count(case, seen)
        greedy = [r for r in case.requests if r.sampling.temperature == 0.0]
        plain = run_alone(build(one_by_one(case)).baseline(), greedy, 1)
        found, wanted = outputs(seen), outputs(plain)
        assert len(wanted) == len(greedy) > 0
        assert {index: found[index] for index in wanted} == wanted, name(pair)
    assert happened.num_preempted
    assert happened.num_chunked
    assert happened.num_accepted
    assert happened.num_rejected
    assert happened.num_stopped


# ------------------------------------------------------------------ faults of scales


def scales_are_skipped(patch: pytest.MonkeyPatch) -> None:
    """Numbers are read without their scales (GLM FP8's MTP layers: acceptance 1 %)."""
    whole = Projection.scales
    patch.setattr(Projection, "scales", lambda self, **given: torch.ones_like(whole(self, **given)))


def scales_are_inverted(patch: pytest.MonkeyPatch) -> None:
    """`weight_scale_inv` is taken as what its name says."""
    whole = Projection.scales
    patch.setattr(Projection, "scales", lambda self, **given: whole(self, **given).reciprocal())


def scales_are_transposed(patch: pytest.MonkeyPatch) -> None:
    """The grid of blocks is read by columns."""
    whole = Projection.scales

    def scales(self: Projection, *, by_row: bool) -> Tensor:
        grid = self.scheme.grid(self.outputs.size, self.inputs.size)
        turned = self.file[self.scheme.scale].reshape(grid).t().contiguous()
        return whole(replace(self, file=self.file | {self.scheme.scale: turned}), by_row=by_row)

    patch.setattr(Projection, "scales", scales)


def experts_are_zero(patch: pytest.MonkeyPatch) -> None:
    """Single experts have names that the loader does not know (Gemma 4 26B FP8: GSM8K 0.0)."""
    finish = ExpertSlab.finish

    def skip(self: ExpertSlab) -> None:
        finish(self)
        self.matrix = replace(self.filled, scales=torch.zeros_like(self.filled.scales))

    patch.setattr(ExpertSlab, "finish", skip)


QWEN3 = Pair("tiny_qwen3_fp8", "eagle3", "zoo:tiny_qwen3-eagle3")
EAGLE = Pair("tiny_mistral_fp8", "eagle", "zoo:tiny_mistral_fp8-eagle")
DEEPSEEK = Pair("tiny_deepseek_fp8", "mtp")
MOE = Pair("tiny_gemma4_moe_fp8", "gemma4_mtp", "zoo:tiny_gemma4_moe-assistant")


@pytest.mark.parametrize(
    ("fault", "pair"),
    [
        (scales_are_skipped, QWEN3),
        (scales_are_skipped, EAGLE),
        (scales_are_inverted, QWEN3),
        (scales_are_transposed, DEEPSEEK),
        (experts_are_zero, MOE),
    ],
)
def test_the_floor_shows(
    fault: Callable[[pytest.MonkeyPatch], None], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    float_length(float_pair(pair), FEWEST)
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="in float"):
        assert_floor(pair, FEWEST)


# ------------------------------------------------------------------ which modules are quantised


def quantised(part: Weights) -> set[str]:
    """Names of the quantised matrices of a model or a head."""
    return {prefix + each.name for prefix, one in part.matrices() for each in one.projections()}


def target_of(stage: str, weights: str = "checkpoint") -> TargetModel:
    return load(f"zoo:{stage}", torch.float32, weights=weights)


@pytest.mark.parametrize("pair", QUANTISED_PAIRS, ids=name)
def test_a_drafter_has_its_own_number_format(pair: Pair) -> None:
    """A float drafter stays float beside a quantised target; MTP layers follow their own file."""
    parts = NativeEngine(engine_config(pair)).parts
    assert quantised(parts.target)
    head = quantised(parts.runner.speculator.head)  # type: ignore[attr-defined]
    drafter = (pair.drafter or f"zoo:{pair.stage}").removeprefix("zoo:")
    assert bool(head) == (drafter in TWINS)
    if drafter in TWINS and pair.method != "mtp":
        assert any("fc" in each for each in head)  # the layer that joins inputs too
    assert not any("eh_proj" in each for each in head)


def test_a_drafter_that_inherits_the_format_of_its_target_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loader that gives the drafter's maps the target's scheme finds float numbers there."""
    pair = QUANTISED_PAIRS[0]
    scheme = TWINS[pair.stage].format.scheme
    named = weights._named_as_in_model

    def inherited(schemes: Mapping[str, Scheme], model: Weights) -> dict[str, Scheme]:
        if schemes:
            return named(schemes, model)
        names = (prefix + n for prefix, one in model.matrices() for n in one.projection_names)
        return dict.fromkeys(names, scheme)

    monkeypatch.setattr(Checkpoint, "is_quantised", property(lambda self: True))
    monkeypatch.setattr(weights, "_named_as_in_model", inherited)
    with pytest.raises(CheckpointError, match=r"assistant.*down_proj\.weight \(BF16\)"):
        NativeEngine(engine_config(pair))


def test_a_float_drafter_that_repeats_its_targets_settings_is_read_in_float(
    tmp_path: Path,
) -> None:
    """Tensors without scales are float, whatever the config says."""
    target = resolve_folder("zoo:tiny_gemma4_fp8")
    settings = json.loads((target / "config.json").read_text())["quantization_config"]
    for file in resolve_folder("zoo:tiny_gemma4-eagle3").iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = engine_config(Pair("tiny_gemma4_fp8", "eagle3", "zoo:tiny_gemma4-eagle3"))
    found.method.checkpoint = str(tmp_path)
    parts = NativeEngine(found).parts
    assert not quantised(parts.runner.speculator.head)  # type: ignore[attr-defined]


@pytest.mark.parametrize("stage", sorted({pair.stage for pair in QUANTISED_PAIRS}))
def test_random_weights_have_the_formats_of_the_file(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists of ignored modules name them as the file does. A reader that matches them with the
    model's names would quantise DeepSeek's routers."""
    from_file = quantised(target_of(stage))
    assert quantised(target_of(stage, "random")) == from_file
    monkeypatch.setattr(weights, "_FILE_PREFIXES", ("",))
    renamed = quantised(target_of(stage, "random"))
    assert (renamed == from_file) == (stage != "tiny_deepseek_fp8")


def test_experts_that_a_loader_does_not_know_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expert's tensors are wanted by name, so that none is skipped."""
    stacked = RoutedExperts.tensors

    def without_the_last(self: RoutedExperts) -> Tensors:
        return {k: v for k, v in stacked(self).items() if not k.startswith(f"{self.count - 1}.")}

    monkeypatch.setattr(RoutedExperts, "tensors", without_the_last)
    with pytest.raises(CheckpointError, match=r"surplus tensors: .*experts\.7\."):
        target_of("tiny_gemma4_moe_fp8")
