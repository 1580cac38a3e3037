"""Logits that are NaN or infinite end a run; no baseline is needed to notice."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_runs import graph_config, make_graph_engine
from recorded_graphs import RecordedOps
from records import request
from safetensors.torch import load_file, save_file
from torch import Tensor

from hydraspec.cli import main as cli
from hydraspec.config.schema import Device, DraftSampling, Dtype, Verification
from hydraspec.engine.native import NativeEngine
from hydraspec.models.gemma4.model import Gemma4Target
from hydraspec.types import Completion, NotFiniteError, Request, StepRecord
from hydraspec.zoo.recipe.evaluate import read_workload

ZOO = Path(cli.__file__).parents[1] / "zoo" / "checkpoints"
PROMPTS = [line["messages"] for line in read_workload()[:6]]
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.timeout(90)])]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8},
    "truncated": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
}


def requests(**sampling: Any) -> list[Request]:
    return [
        request(
            i, id=f"r{i}", messages=messages, max_tokens=12, ignore_eos=True, seed=i, **sampling
        )
        for i, messages in enumerate(PROMPTS)
    ]


def decode(engine: NativeEngine, offered: Sequence[Request]) -> tuple[dict[int, Completion], Any]:
    """What ended, and the error that ended the run, if one did."""
    engine.tokenize(offered)
    ended: dict[int, Completion] = {}
    try:
        for event in engine.run(offered, concurrency=3):
            if not isinstance(event, StepRecord):
                ended[event.index] = event
    except NotFiniteError as error:
        return ended, error
    return ended, None


class Plant:
    """Logits of Gemma targets that are `value` wherever the newest token is `trigger`, as a broken
    row of the embedding would make them: on the device, so that graphs hold it."""

    def __init__(self, patch: pytest.MonkeyPatch, device: str = "cpu") -> None:
        self.trigger = torch.tensor(-1, device=device)
        self.value = torch.tensor(0.0, device=device)
        forward, compute = Gemma4Target.forward, Gemma4Target.compute_logits
        seen: list[Tensor] = []

        def watched(target: Gemma4Target, batch: Any, *args: Any) -> Any:
            ids = batch.input_ids
            seen[:] = [ids if batch.logits_rows is None else ids.index_select(0, batch.logits_rows)]
            return forward(target, batch, *args)

        def broken(target: Gemma4Target, hidden: Tensor) -> Tensor:
            logits = compute(target, hidden)
            hit = (seen[0] == self.trigger).unsqueeze(1)
            return torch.where(hit, self.value.to(logits.dtype), logits)

        patch.setattr(Gemma4Target, "forward", watched)
        patch.setattr(Gemma4Target, "compute_logits", broken)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("method", "mode", "way", "value"),
    [
        ("none", "none", "greedy", torch.nan),
        ("none", "none", "truncated", -torch.inf),
        ("gemma4_mtp", "none", "greedy", torch.inf),
        ("gemma4_mtp", "none", "sampled", torch.nan),
        ("gemma4_mtp", "none", "truncated", torch.inf),
        ("gemma4_mtp", "full_decode_only", "greedy", torch.nan),
        ("gemma4_mtp", "full_decode_only", "sampled", -torch.inf),
    ],
)
def test_the_first_token_of_broken_logits_fails_its_request_and_the_run(
    method: str, mode: str, way: str, value: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches logits that pass as good with acceptance K+1, a token more or less that is kept, the
    wrong request or position named, and a check that graphs or a host running ahead leave out."""
    plant = Plant(monkeypatch, device)
    config = graph_config(
        method, mode, device=Device(device), dtype=Dtype.float32, sizes=(1, 3), max_num_seqs=3
    )
    config.engine.async_scheduling = mode != "none"
    records = mode != "none" and device == "cpu"  # a device captures CUDA graphs
    engine = make_graph_engine(config, RecordedOps() if records else None)
    good, error = decode(engine, requests(**WAYS[way]))
    assert error is None
    outputs = [good[i].output_token_ids for i in sorted(good)]
    trigger = next(token for token in outputs[1][4:9] if token not in outputs[0])
    plant.trigger.fill_(trigger)
    plant.value.fill_(value)
    ended, error = decode(engine, requests(**WAYS[way]))
    assert isinstance(error, NotFiniteError)
    index = int(error.request_id[1:])
    tokens, failed = outputs[index], ended[index]
    assert error.position == tokens.index(trigger) + 1
    assert failed.finish_reason == "error"
    assert failed.output_token_ids == tokens[: error.position]
    assert f"output token {error.position} of request '{error.request_id}'" in str(error)
    assert failed.error is not None
    assert failed.error in str(error)
    for other in ended.values():
        if other.finish_reason != "error":
            assert other.output_token_ids == outputs[other.index]
    plant.trigger.fill_(-1)
    again, error = decode(engine, requests(**WAYS[way]))
    assert error is None  # nothing of the failed run is left
    assert [again[i].output_token_ids for i in sorted(again)] == outputs


def test_logits_beside_a_run_may_be_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict looks at logits where outputs differ; NaN is an answer there."""
    plant = Plant(monkeypatch)
    engine = make_graph_engine(graph_config("none", "none"), None)
    plant.trigger.fill_(7)
    plant.value.fill_(torch.nan)
    assert torch.tensor(engine.next_token_logits([5, 6, 7])).isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("verification", ["standard", "block"])
@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_a_drafter_of_nan_costs_acceptance_only(
    way: str, verification: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches drafts of a broken drafter that pass, and a target that is blamed for them."""
    config = graph_config(
        "gemma4_mtp", "none", device=Device(device), dtype=Dtype.float32, max_num_seqs=3
    )
    config.method.verification = Verification(verification)
    config.method.draft_sampling = DraftSampling("greedy" if way == "greedy" else "probabilistic")
    engine = make_graph_engine(config, None)
    plain, _ = decode(engine.baseline(), requests())
    head = engine.parts.runner.speculator.head  # type: ignore[attr-defined]
    compute = head.compute_logits
    monkeypatch.setattr(head, "compute_logits", lambda hidden: compute(hidden) * torch.nan)
    offered = requests(**WAYS[way])
    engine.tokenize(offered)
    ended = {}
    for event in engine.run(offered, concurrency=3):
        if isinstance(event, StepRecord):
            assert not any(part.num_accepted for part in event.requests if way == "sampled")
        else:
            ended[event.index] = event
    assert {len(c.output_token_ids) for c in ended.values()} == {12}
    if way == "greedy":
        assert {i: c.output_token_ids for i, c in ended.items()} == {
            i: c.output_token_ids for i, c in plain.items()
        }


def overflowing(folder: Path) -> Path:
    """tiny_mistral with finite weights whose products are infinite."""
    shutil.copytree(ZOO / "tiny_mistral", folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], 3e38)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("engine", ["native"])
def test_a_run_without_baseline_ends_failed(
    engine: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches a run of NaN that ends with status 0 because nothing was compared."""
    folder = overflowing(tmp_path / "broken")
    typed = [
        *("target=tiny_mistral", "method=none", f"engine={engine}", "baseline=false"),
        *(f"target.checkpoint={folder}", "tracker=none", "workload.limit=2"),
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    monkeypatch.setattr(sys, "argv", ["hydraspec", *typed])
    assert cli.main() == 1
    message = capsys.readouterr().err
    assert "output token 0 of request" in message
    assert "Traceback" not in message
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "failed"
    assert any("output token 0 of request" in warning for warning in summary["warnings"])
