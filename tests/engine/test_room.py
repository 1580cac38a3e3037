"""Weights for which a device has no room."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from hydraspec.cli.compose import plan
from hydraspec.config import RunConfig
from hydraspec.engine.run import loading
from hydraspec.engine.run.room import room_for, target_bytes
from hydraspec.errors import ConfigurationError
from hydraspec.models.stages import WHOLE
from hydraspec.parallel.group import SOLO, SoloGroup

CPU = torch.device("cpu")


def config_of(*typed: str) -> RunConfig:
    (job,) = plan(["tracker=none", "engine.device=cpu", "method=none", *typed]).jobs
    return job.config


def no_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 336.00 MiB.")


@pytest.mark.parametrize(
    ("target", "gib"),
    [("gemma4_31b_fp8", 29.9), ("gemma4_31b", 57.2), ("mistral_medium_3_5", 119.4)],
)
def test_bytes_of_a_target_without_its_weights(target: str, gib: float) -> None:
    config = config_of(f"target={target}", "target.weights=random")
    found = target_bytes(config, SOLO, WHOLE)
    assert found is not None
    assert found / 2**30 == pytest.approx(gib, abs=0.1)


def test_ranks_and_stages_hold_their_part() -> None:
    config = config_of("target=mistral_medium_3_5", "target.weights=random")
    group = SoloGroup()
    group.size = 2
    whole, half = target_bytes(config, SOLO, WHOLE), target_bytes(config, group, WHOLE)
    assert whole is not None
    assert half == pytest.approx(whole / 2, rel=0.01)


def test_a_target_that_does_not_fit_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback of the allocator, which does not say how much is missing."""
    monkeypatch.setattr(loading, "load_target", no_memory)
    config = config_of("target=mistral_medium_3_5", "target.weights=random")
    with pytest.raises(ConfigurationError) as caught:
        loading.load(config)
    lines = str(caught.value).splitlines()
    assert caught.value.exit_code == 2
    assert lines[0].startswith("target.checkpoint=shape:mistral_medium_3_5 has no room on cpu, ")
    assert "its weights take 119.4 GiB on each rank" in lines[0]
    assert lines[2].startswith("  to do: raise parallelism.tensor")


def test_a_drafter_that_does_not_fit_is_one_message() -> None:
    with (
        pytest.raises(ConfigurationError, match=r"method\.checkpoint=drafter has no room on cpu"),
        room_for("its weights", "method.checkpoint", "drafter", CPU, None),
    ):
        no_memory()


def test_what_fits_counts_nothing() -> None:
    with room_for("its weights", "target.checkpoint", "target", CPU, partial(pytest.fail, "asked")):
        pass
