"""engine=vllm where it cannot start: whose fault it is, and what the message says."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_vllm
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig

from hydraspec.adapters.vllm import configs
from hydraspec.adapters.vllm.engine import VllmEngine
from hydraspec.cli.compose import plan
from hydraspec.config.schema import RunConfig
from hydraspec.errors import printable
from hydraspec.lab.run import run
from hydraspec.shipped import SHAPES
from hydraspec.types import CheckpointError, ConfigurationError, UserError


def planned(*overrides: str) -> RunConfig:
    return plan(["engine=vllm", *overrides]).jobs[0].config


def test_a_missing_vllm_or_gpu_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    config = planned("method=none")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="needs a CUDA device"):
        VllmEngine(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'vllm>=0\.26'"):
        VllmEngine(config)
    fake_vllm.install(monkeypatch, version="0.25.3")
    with pytest.raises(ConfigurationError, match=r"finds vLLM 0\.25\.3"):
        VllmEngine(config)
    broken = fake_vllm.install(monkeypatch)
    del broken.LLMEngine  # as where a package that it needs is missing or too old
    with pytest.raises(ConfigurationError, match="cannot be imported here"):
        VllmEngine(config)
    assert "VLLM_NO_USAGE_STATS" not in os.environ


VALIDATION = """2 validation errors for ModelConfig
  Value error, the checkpoint has model type `x`, which is not known.

Update transformers. [type=value_error, input_value=ArgsKwargs((), {'model': '/x'}), input_type=A]
    For further information visit https://errors.pydantic.dev/2.12/v/value_error
dtype
  Input should be a string [type=string_type, input_value=3, input_type=int]
    For further information visit https://errors.pydantic.dev/2.12/v/string_type"""


def test_the_reasons_of_a_validation_error_are_told(
    start: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches "1 validation error for ModelConfig" alone, which hides why."""

    def refuse(args: Any, **options: Any) -> None:
        raise ValueError(VALIDATION + "\x1b[31m" + " and so on" * 200)

    monkeypatch.setattr(fake_vllm.LLMEngine, "from_engine_args", refuse)
    with pytest.raises(CheckpointError) as caught:
        start()
    said = str(caught.value)
    reasons = "model type `x`, which is not known. Update transformers. dtype Input should be a str"
    assert reasons in said
    assert "https://" not in said
    assert "input_value" not in said
    assert "\n" not in said
    assert len(said) < 1000
    assert printable(said).isprintable()


@pytest.mark.parametrize(
    ("splits", "vllm", "said"),
    [
        ({"tensor": 3}, {}, "parallelism.tensor=3 does not divide the target's heads"),
        (
            {"tensor": 2, "pipeline": 3, "data": 2},
            {},
            "parallelism.pipeline=3 needs 12 CUDA devices",
        ),
        ({"data": 9}, {}, "parallelism.data=9 needs 9 CUDA devices"),
        ({"tensor": 2, "pipeline": 99}, {}, "is more stages than the target has layers (3)"),
        ({"tensor": 4, "pipeline": 3}, {"nnodes": 2, "master_addr": "a"}, ""),
        ({"data": 9}, {"distributed_executor_backend": "ray"}, ""),
    ],
    ids=str,
)
def test_splits_are_refused_before_vllm_starts(
    start: Callable[..., VllmEngine],
    monkeypatch: pytest.MonkeyPatch,
    splits: dict[str, int],
    vllm: dict[str, Any],
    said: str,
) -> None:
    def begin(args: Any, **options: Any) -> None:
        raise RuntimeError("vLLM was started")

    monkeypatch.setattr(fake_vllm.LLMEngine, "from_engine_args", begin)
    monkeypatch.setattr(fake_vllm.AsyncLLMEngine, "from_engine_args", begin)
    if not said:
        with pytest.raises(RuntimeError, match="vLLM was started"):
            start("none", vllm=vllm, **splits)
        return
    with pytest.raises(ConfigurationError) as refused:
        start("none", vllm=vllm, **splits)
    assert said in str(refused.value)
    assert "allowed: " in str(refused.value)
    assert refused.value.exit_code == 2


def test_stages_of_a_target_with_per_layer_inputs_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches wrong outputs without a word: vLLM 0.26 drops these inputs after its first stage."""
    fake_vllm.install(monkeypatch)
    config = planned("target=tiny_gemma4_e", "method=none", "parallelism.pipeline=2")
    with pytest.raises(ConfigurationError, match="a target with per-layer inputs"):
        VllmEngine(config)


def test_layers_of_stages_reach_vllm_through_the_environment(
    start: Callable[..., VllmEngine],
) -> None:
    engine = start("none", pipeline=2, pipeline_layers=[1, 2])
    assert os.environ["VLLM_PP_LAYER_PARTITION"] == "1,2"
    engine.close()
    assert "VLLM_PP_LAYER_PARTITION" not in os.environ


def test_mimo_is_known_to_what_vllm_reads_configurations_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches "does not recognize this architecture": MiMo's class is code of its checkpoint."""
    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", {})
    with pytest.raises(ValueError, match="model type `mimo`"):
        AutoConfig.from_pretrained(SHAPES / "mimo_7b")
    configs.register()
    found = AutoConfig.from_pretrained(SHAPES / "mimo_7b")
    found = pickle.loads(pickle.dumps(found))  # as it goes to worker processes
    assert (found.model_type, found.num_nextn_predict_layers) == ("mimo", 1)
    assert (found.hidden_size, found.rope_parameters["rope_theta"]) == (4096, 640000)


@pytest.mark.parametrize(
    ("error", "known", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), UserError, "free device memory"),
        (RuntimeError("CUDA error: out of memory\nand more"), UserError, "free device memory"),
        (ValueError("No available memory for the cache blocks."), UserError, "for the cache"),
        (NotImplementedError("no such layer"), CheckpointError, "no such layer"),
        (AttributeError("no default_output_length"), CheckpointError, "default_output_length"),
        (
            ValueError("no head size 8\nand more"),
            CheckpointError,
            "ValueError: no head size 8 and mor",
        ),
        (RuntimeError("Engine core initialization failed."), RuntimeError, "core init"),
    ],
    ids=lambda value: str(value)[:12] if isinstance(value, Exception) else "",
)
def test_only_what_a_checkpoint_is_to_blame_for_is_said_of_it(
    start: Callable[..., VllmEngine],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    known: type[Exception],
    said: str,
) -> None:
    def fail(args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(fake_vllm.LLMEngine, "from_engine_args", fail)
    with pytest.raises(known, match=said) as caught:
        start()
    assert type(caught.value) is known
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ
    if known is RuntimeError:
        assert "vLLM cannot start with target" in caught.value.__notes__[0]
    elif known is UserError:
        assert caught.value.exit_code == 1  # type: ignore[attr-defined]


def test_block_verification_needs_the_newer_runner(
    start: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fake_vllm.LLMEngine.__init__

    def older(self: Any, *args: Any) -> None:
        made(self, *args)
        self.vllm_config.use_v2_model_runner = False

    monkeypatch.setattr(fake_vllm.LLMEngine, "__init__", older)
    block = type(planned().method.verification)("block")
    with pytest.raises(ConfigurationError, match="VLLM_USE_V2_MODEL_RUNNER=1"):
        start(verification=block)


def test_a_host_of_several_lends_its_devices_and_saves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = fake_vllm.install(monkeypatch)
    told: list[Any] = []

    class MultiprocExecutor:
        def __init__(self, found: Any, *, monitor_workers: bool) -> None:
            told.append((found, monitor_workers, os.environ["VLLM_LOGGING_LEVEL"]))

        def start_worker_monitor(self, *, inline: bool) -> None:
            told.append(inline)

        def shutdown(self) -> None:
            told.append("shut down")

    executors = ModuleType("multiproc_executor")
    executors.MultiprocExecutor = MultiprocExecutor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.executor.multiproc_executor", executors)
    made = lambda self, headless: (self.node_rank, self.nnodes, headless)  # noqa: E731
    monkeypatch.setattr(fake.AsyncEngineArgs, "create_engine_config", made, raising=False)
    hosts = ["engine.vllm.nnodes=2", "engine.vllm.node_rank=1", "engine.vllm.master_addr=first"]
    config = planned("method=none", "parallelism.tensor=2", *hosts)
    summary = run(config, run_dir=tmp_path / "run", overrides=[])
    assert summary == {"status": "ok", "follows": "first:29501"}
    assert told == [((1, 2, True), False, "WARNING"), True, "shut down"]
    assert not (tmp_path / "run").exists()
    assert "VLLM_LOGGING_LEVEL" not in os.environ
