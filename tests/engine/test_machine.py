"""What a machine or a checkpoint cannot give is refused before anything is decoded."""

from __future__ import annotations

import pytest
import torch

from hydraspec.cli.compose import plan
from hydraspec.config.schema import RunConfig
from hydraspec.engine.machine import model_length, pick_device
from hydraspec.errors import ConfigurationError
from hydraspec.lab.resolution import resolve


def composed(*typed: str) -> RunConfig:
    return plan(typed).jobs[0].config


@pytest.mark.parametrize("refuse", [pick_device, resolve])
def test_cuda_is_refused_where_there_is_none(
    refuse: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a benchmark's preset, whose target would be drawn for the CPU otherwise."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert callable(refuse)
    for typed in ("engine.device=cuda", "experiment=bench_gemma4"):
        with pytest.raises(ConfigurationError) as caught:
            refuse(composed(typed))
        told = str(caught.value).splitlines()
        assert told[0].startswith("engine.device=cuda ")
        assert told[1:] == [
            "  allowed: auto, cpu",
            "  to do: add engine.device=cpu, or run where there is one",
        ]
    refuse(composed("experiment=bench_gemma4", "engine.device=cpu"))


def test_a_cache_beyond_the_machine_is_refused() -> None:
    """Catches an allocation that fails, or swaps, once everything is loaded."""
    config = composed("engine.device=cpu", "engine.kv_cache.memory_gib=1e6")
    with pytest.raises(ConfigurationError, match=r"memory_gib=1000000\.0 is beyond .* cpu"):
        pick_device(config)
    pick_device(composed("engine.device=cpu", "engine.kv_cache.memory_gib=0.1"))


def test_a_length_above_the_checkpoints_is_refused() -> None:
    config = composed("target.max_model_len=257")
    assert model_length(config, 257) == 257
    with pytest.raises(ConfigurationError, match=r"(?s)target.max_model_len=257 .*to 256, or null"):
        model_length(config, 256)


def test_random_requests_that_would_be_cut_short_are_refused() -> None:
    sizes = ["workload.prompt_tokens=200", "workload.output_tokens=57"]
    config = composed("workload=random", *sizes)
    assert model_length(config, 257) == 257
    with pytest.raises(ConfigurationError, match=r"(?s)prompt_tokens=200 and .*make 257 .* 256"):
        model_length(config, 256)
    bench = composed("workload=random", *sizes, "bench=decode", "engine.max_num_seqs=32")
    assert model_length(bench, 256) == 256  # which sets its lengths


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches two ranks on one GPU, which would wait for each other for ever."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigurationError) as caught:
        pick_device(composed("engine.device=cuda", "parallelism.tensor=2"))
    told = str(caught.value).splitlines()
    assert told[0] == (
        "parallelism.tensor=2 needs 2 CUDA devices, one a rank, and this machine has 1"
    )
    assert "1 ranks or fewer" in told[1]
    assert "engine.device=cpu" in told[2]
    pick_device(composed("engine.device=cpu", "parallelism=tp4"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # a rank a host
    assert pick_device(composed("engine.device=cuda", "parallelism.tensor=2")).type == "cuda"
