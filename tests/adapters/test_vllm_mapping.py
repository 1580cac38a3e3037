"""engine=vllm: our configuration in vLLM's words, line by line; what is refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hydraspec.adapters.vllm.loading import check_version, engine_arguments
from hydraspec.adapters.vllm.weights import LOAD_FORMAT
from hydraspec.cli.compose import plan
from hydraspec.config.schema import RunConfig, VllmConfig
from hydraspec.types import ConfigurationError

TARGET, DRAFTER = Path("/models/target"), Path("/models/drafter")


def planned(*overrides: str) -> RunConfig:
    return plan(["engine=vllm", *overrides]).jobs[0].config


def arguments(*overrides: str, drafter: Path | None = DRAFTER) -> dict[str, Any]:
    return engine_arguments(planned(*overrides), TARGET, drafter)


PLAIN = {
    "model": "/models/target",
    "load_format": "auto",
    "skip_tokenizer_init": True,
    "generation_config": "vllm",
    "language_model_only": True,
    "dtype": "float32",
    "kv_cache_dtype": "auto",
    "max_model_len": None,
    "seed": 0,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 2048,
    "async_scheduling": None,
    "enable_prefix_caching": True,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"},
    "speculative_config": None,
    "disable_log_stats": False,
    "gpu_memory_utilization": 0.9,
}


def test_the_plain_configuration_to_the_letter() -> None:
    assert arguments("method=none", drafter=None) == PLAIN


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        (
            "target.weights=random",
            {
                "load_format": "hydraspec",
                "model_loader_extra_config": {"seed": 0},
                "worker_extension_cls": "hydraspec.adapters.vllm.worker.Extension",
            },
        ),
        ("target.dtype=bfloat16", {"dtype": "bfloat16"}),
        ("engine.kv_cache.dtype=fp8", {"kv_cache_dtype": "fp8"}),
        ("target.max_model_len=512", {"max_model_len": 512}),
        ("seed=4294967301", {"seed": 5}),
        ("engine.max_num_seqs=64", {"max_num_seqs": 64}),
        ("engine.max_num_batched_tokens=999", {"max_num_batched_tokens": 999}),
        ("engine.async_scheduling=false", {"async_scheduling": False}),
        ("engine.prefix_caching=false", {"enable_prefix_caching": False}),
        ("engine.vllm.gpu_memory_utilization=0.5", {"gpu_memory_utilization": 0.5}),
        ("engine.vllm.record_steps=false", {"disable_log_stats": True}),
        ("parallelism.tensor=4", {"tensor_parallel_size": 4}),
        ("parallelism.pipeline=2", {"pipeline_parallel_size": 2}),
        ("parallelism.data=2", {"data_parallel_size": 2, "disable_log_stats": True}),
        (
            "engine.vllm.distributed_executor_backend=ray",
            {"distributed_executor_backend": "ray"},
        ),
        ("cudagraph=none", {"compilation_config": {"cudagraph_mode": "NONE"}}),
        (
            "cudagraph.capture_sizes=[1,8]",
            {
                "compilation_config": {
                    "cudagraph_mode": "FULL_AND_PIECEWISE",
                    "cudagraph_capture_sizes": [1, 8],
                }
            },
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_key_changes_one_argument(override: str, changed: dict[str, Any]) -> None:
    assert arguments("method=none", override, drafter=None) == PLAIN | changed


def test_ranks_of_several_hosts() -> None:
    """Ray's cluster is asked for replicas too; multiprocessing is told where the first host is."""
    ray = "engine.vllm.distributed_executor_backend=ray"
    found = arguments("method=none", "parallelism.data=4", ray, drafter=None)
    assert found["data_parallel_backend"] == found["distributed_executor_backend"] == "ray"
    two = ["parallelism.tensor=8", "parallelism.pipeline=2", "engine.vllm.nnodes=2"]
    one = "engine.vllm.node_rank=1"
    found = arguments("method=none", *two, one, "engine.vllm.master_addr=a", drafter=None)
    assert found == PLAIN | {
        "tensor_parallel_size": 8,
        "pipeline_parallel_size": 2,
        "nnodes": 2,
        "node_rank": 1,
        "master_addr": "a",
        "master_port": 29501,
    }


def test_capture_sizes_are_rows_to_vllm() -> None:
    """Taken as they are, vLLM would round [1, 8] up to 4 and 8 rows: batches of 1 and 2."""
    found = arguments("method=gemma4_mtp", "cudagraph.capture_sizes=[1,8]")
    assert found["compilation_config"]["cudagraph_capture_sizes"] == [4, 32]


def test_a_cache_of_fixed_size_goes_before_a_share_of_the_device() -> None:
    found = arguments("method=none", "engine.kv_cache.memory_gib=1.5", drafter=None)
    assert found["kv_cache_memory_bytes"] == 3 << 29
    assert "gpu_memory_utilization" not in found


DRAFTED = {
    "method": "mtp",
    "model": "/models/drafter",
    "num_speculative_tokens": 3,
    "rejection_sample_method": "standard",
    "draft_sample_method": "greedy",
}


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        (["method=gemma4_mtp"], {}),
        (["method=eagle3"], {"method": "eagle3"}),
        (["method=peagle"], {"method": "eagle3", "parallel_drafting": True}),
        (["target=tiny_mistral", "method=eagle"], {"method": "eagle"}),
        (["method=dflash"], {"method": "dflash"}),
        (["method=dspark"], {"method": "dspark"}),
        (["target=tiny_qwen3", "method=dflash2"], {"method": "dflash"}),
        (["method.num_speculative_tokens=7"], {"num_speculative_tokens": 7}),
        (
            ["method.num_speculative_tokens=auto", "method.max_speculative_tokens=5"],
            {"num_speculative_tokens": 5, "enable_adaptive_verification": True},
        ),
        (["method.verification=block"], {"rejection_sample_method": "block"}),
        (["method.draft_sampling=probabilistic"], {"draft_sample_method": "probabilistic"}),
        (
            ["method.verification=synthetic", "method.synthetic_acceptance_length=2.5"],
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5},
        ),
        (["method.weights=random"], {"draft_load_config": {"load_format": LOAD_FORMAT}}),
        (["target.weights=random"], {"draft_load_config": {"load_format": "auto"}}),
        (["target.weights=random", "method.weights=random"], {}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_speculative_configuration(overrides: list[str], changed: dict[str, Any]) -> None:
    assert arguments(*overrides)["speculative_config"] == DRAFTED | changed


def test_prompt_lookup_has_no_drafter() -> None:
    found = arguments("method=ngram", "method.options.prompt_lookup_max=4", drafter=None)
    assert found["speculative_config"] == {k: v for k, v in DRAFTED.items() if k != "model"} | {
        "method": "ngram",
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }


def test_a_random_drafter_brings_our_loader_to_every_worker() -> None:
    assert arguments("method=gemma4_mtp", "method.weights=random")["worker_extension_cls"]
    assert "worker_extension_cls" not in arguments("method=gemma4_mtp")


def test_a_target_that_drafts_itself_names_no_drafter() -> None:
    found = arguments("target=tiny_deepseek", "method=mtp", drafter=None)["speculative_config"]
    assert found == {k: v for k, v in DRAFTED.items() if k != "model"} | {
        "num_speculative_tokens": 1
    }


def test_no_configuration_of_ours_is_left_out() -> None:
    """Catches a key that is added to a group and never reaches vLLM."""
    known = {
        "target": {
            *("name", "checkpoint", "weights", "dtype", "max_model_len", "drafters"),
            "max_soft_tokens",  # with engine.vllm.images
        },
        "method": {
            *("name", "num_speculative_tokens", "checkpoint", "needs_checkpoint", "weights"),
            *("draft_sampling", "verification", "synthetic_acceptance_length"),
            *("synthetic_trace", "synthetic_category", "synthetic_undraftable"),  # refused
            *("max_speculative_tokens", "costs"),  # of lengths chosen per step: refused
            "options",  # of methods from other packages, which engine=vllm refuses
        },
        "engine": {
            *("name", "device", "max_num_seqs", "max_num_batched_tokens", "num_threads"),
            *("async_scheduling", "prefix_caching", "kv_cache", "vllm"),
            "max_mixing_cost",  # of engine=native alone
        },
        "parallelism": {
            *("name", "tensor", "pipeline", "data", "timeout_s"),
            "pipeline_layers",  # through the environment
            "check",  # refused
        },
        "cudagraph": {"name", "capture_sizes", "max_mixed_rows"},
    }
    config = planned()
    assert {group: set(type(getattr(config, group)).__slots__) for group in known} == known
    assert set(VllmConfig.__slots__) == {
        *("gpu_memory_utilization", "record_steps", "distributed_executor_backend"),
        *("nnodes", "node_rank", "master_addr", "master_port", "images"),
    }


# ------------------------------------------------------------------ refusals

VLLM = "engine.vllm"
TWO_HOSTS = (f"{VLLM}.nnodes=2", "parallelism.tensor=2")


@pytest.mark.parametrize(
    ("overrides", "key", "allowed"),
    [
        (["engine.device=cpu"], "engine.device=cpu", "auto, cuda"),
        (["target.dtype=float64"], "target.dtype=float64", "bfloat16"),
        (["+engine.kv_cache.block_size=32"], "engine.kv_cache.block_size=32", "memory_gib"),
        (["+engine.num_threads=2"], "engine.num_threads=2", "max_num_seqs"),
        (["engine.vllm.gpu_memory_utilization=1.5"], "engine.vllm.gpu_memory", "up to 1"),
        (["metrics.trace=true"], "metrics.trace=true", "false"),
        (["parallelism.check=true"], "parallelism.check=true", "false"),
        (["metrics.steps=true"], "metrics.steps=true", "false"),
        (["sampling=stochastic", "sampling.min_p=0.1"], "sampling.min_p=0.1", "0"),
        (["parallelism.tensor=0"], "parallelism.tensor=0", "1 or more"),
        (["parallelism.timeout_s=60"], "parallelism.timeout_s=60", "15"),
        (["method=eagle3", "method.weights=random"], "method.weights=random", "checkpoint"),
        (["method=suffix"], "method=suffix", "dflash2, dspark"),
        (["method=dspark", "method.options.min_survival=0.1"], "method.options.min", "null"),
        (["method=eagle3", "parallelism.pipeline=2"], "parallelism.pipeline=2", "method=none"),
        (["method=gemma4_mtp", "parallelism.pipeline=2"], "parallelism.pipeline=2", "SupportsPP"),
        (
            ["target=mimo_7b", "method=mtp", "parallelism.pipeline=2"],
            "parallelism.pipeline=2",
            "Pipeline parallelism is not supported for this model.",
        ),
        ([f"{VLLM}.distributed_executor_backend=uni"], f"{VLLM}.distributed", "mp (multi"),
        ([f"{VLLM}.nnodes=3", "parallelism.tensor=2"], f"{VLLM}.nnodes=3", "a divisor of"),
        ([f"{VLLM}.nnodes=0"], f"{VLLM}.nnodes=0", "1, or a divisor"),
        ([*TWO_HOSTS], f"{VLLM}.master_addr=null", "node_rank=0"),
        ([f"{VLLM}.master_addr=a"], f"{VLLM}.master_addr=a", "null on one host"),
        ([f"{VLLM}.node_rank=1"], f"{VLLM}.node_rank=1", "0 to 1 - 1"),
        ([*TWO_HOSTS, f"{VLLM}.distributed_executor_backend=ray"], f"{VLLM}.nnodes=2", "with Ray"),
        ([*TWO_HOSTS, "parallelism.data=2"], "parallelism.data=2", f"1 with {VLLM}.nnodes=2"),
        ([*TWO_HOSTS, "bench=decode"], f"{VLLM}.nnodes=2", "1 with bench=decode"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_it_cannot_do_is_refused(overrides: list[str], key: str, allowed: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        planned(*overrides)
    message = str(caught.value)
    assert message.startswith(key)
    assert allowed in message


def test_its_keys_and_sizes_are_refused_elsewhere() -> None:
    with pytest.raises(ConfigurationError, match="choose engine=vllm, or leave it out"):
        plan(["+engine.vllm.record_steps=false"])


def test_versions() -> None:
    for version in ("0.26.0", "0.26.1rc2", "0.27.0", "1.0.0", "dev"):
        check_version(version)
    with pytest.raises(ConfigurationError, match=r"finds vLLM 0\.25\.3"):
        check_version("0.25.3")
