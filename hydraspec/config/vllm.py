"""Rules of the keys of engine=vllm, which a benchmark that starts vLLM takes too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hydraspec.config.benches import is_bench
from hydraspec.config.engines import VLLM, VLLM_KEYS
from hydraspec.config.rules import Rule
from hydraspec.config.schema import AUTO, Device, Dtype, ParallelismConfig, RunConfig

TIMEOUT_S = ParallelismConfig(name="").timeout_s
STAGES = (  # a warning
    "parallelism.pipeline with drafts: vLLM 0.26 does not send drafts to its first stage, so "
    "answers may be wrong; compare them with method=none"
)


def runs_vllm(config: RunConfig) -> bool:
    """Returns whether vLLM runs: as the engine, or as one that the benchmark starts."""
    return VLLM in (config.bench.engines if is_bench(config) else [config.engine.name])


def is_vllm_key(key: str) -> bool:
    """Returns whether a dotted key is VLLM_KEYS, or in it."""
    return f"{key}.".startswith(f"{VLLM_KEYS}.")


def _unavailable(key: str, is_taken: Callable[[Any], object], allowed: str) -> Rule:
    remedy = "choose one of these, or engine=native"
    problem = "is not available with engine=vllm"
    return Rule(key, lambda value, c: is_taken(value), allowed, problem, remedy)


_RULES = (
    _unavailable("engine.device", lambda device: device is not Device.cpu, "auto, cuda"),
    _unavailable(
        "target.dtype",
        lambda dtype: dtype is not Dtype.float64,
        "bfloat16, float16, float32",
    ),
    Rule(
        "engine.vllm.gpu_memory_utilization",
        lambda share, c: 0 < share <= 1,
        "above 0, up to 1 (the whole device)",
    ),
    Rule(
        "engine.vllm.distributed_executor_backend",
        lambda backend, c: backend in (None, "mp", "ray"),
        "mp (multiprocessing), ray, or null",
        "is unknown",
    ),
    Rule(
        "engine.vllm.nnodes",
        lambda nodes, c: nodes >= 1 and c.parallelism.tensor * c.parallelism.pipeline % nodes == 0,
        "1, or a divisor of parallelism.tensor * parallelism.pipeline = "
        "{c.parallelism.tensor} * {c.parallelism.pipeline}",
        "does not divide the ranks",
    ),
    Rule(
        "engine.vllm.nnodes",
        lambda nodes, c: nodes == 1 or c.engine.vllm.distributed_executor_backend != "ray",
        "1 with Ray, whose cluster says which hosts there are",
        "is not available with distributed_executor_backend=ray; vLLM 0.26 says: "
        '"nnodes > 1 can only be set when distributed executor backend is mp"',
        "leave it out, or choose distributed_executor_backend=mp",
    ),
    Rule(
        "engine.vllm.nnodes",
        lambda nodes, c: nodes == 1 or not is_bench(c),
        "1 with bench={c.bench.name}, which starts several engines",
        "is not available with a benchmark",
    ),
    Rule(
        "parallelism.data",
        lambda data, c: data == 1 or c.engine.vllm.nnodes == 1,
        "1 with engine.vllm.nnodes={c.engine.vllm.nnodes}",
        "is not available over several hosts without Ray",
        "choose engine.vllm.distributed_executor_backend=ray and leave nnodes out",
    ),
    Rule(
        "engine.vllm.node_rank",
        lambda rank, c: 0 <= rank < c.engine.vllm.nnodes,
        "0 to {c.engine.vllm.nnodes} - 1 (engine.vllm.nnodes)",
    ),
    Rule(
        "engine.vllm.master_addr",
        lambda address, c: bool(address) == (c.engine.vllm.nnodes > 1),
        lambda address, c: (
            "null on one host"
            if c.engine.vllm.nnodes == 1
            else "the name or address of the host with node_rank=0"
        ),
        "does not fit engine.vllm.nnodes={c.engine.vllm.nnodes}",
        "give it, and the same one, on every host of several, and only there",
    ),
    Rule(
        "engine.vllm.master_port", lambda port, c: 1024 <= port <= 65535, "1024 to 65535, if free"
    ),
    Rule(
        "target.max_soft_tokens",
        lambda most, c: most is None or c.engine.vllm.images,
        "null with engine.vllm.images=false",
        "has no meaning where vLLM is started for text alone",
        "add engine.vllm.images=true, or leave it out",
    ),
    # Steps and traces record draft token ids, and vLLM returns only those of accepted drafts.
    _unavailable("metrics.steps", lambda steps: not steps, "false"),
    _unavailable("parallelism.check", lambda check: not check, "false"),
    _unavailable("parallelism.timeout_s", lambda seconds: seconds == TIMEOUT_S, f"{TIMEOUT_S:g}"),
    _unavailable("metrics.trace", lambda trace: not trace, "false"),
    Rule(  # vLLM loads most drafters as it loads the target, whatever it is configured to do
        "method.weights",
        lambda weights, c: (
            weights is c.target.weights or c.method.name in ("none", "gemma4_mtp", "ngram", AUTO)
        ),
        "{c.target.weights.value}",
        "is not available with engine=vllm, method={c.method.name} and "
        "target.weights={c.target.weights.value}",
        "add method.weights={c.target.weights.value}, or choose engine=native",
    ),
    Rule(
        "sampling.min_p",
        lambda min_p, c: not (min_p and c.sampling.temperature and c.method.name != "none"),
        "0",
        "is not available with engine=vllm and drafts",
        "leave the key out, or choose method=none or engine=native",
    ),
    Rule(
        "sampling.logit_bias",
        lambda biases, c: not (biases and c.method.name != "none"),
        "{{}}",
        "is not available with engine=vllm and drafts",
        "leave the key out, or choose method=none or engine=native",
    ),
    Rule(
        "sampling.bad_words",
        lambda words, c: not words,
        "[]",
        "is not available with engine=vllm, which takes words as text alone",
        "leave the key out, or choose engine=native",
    ),
)
VLLM_RULES = tuple(
    replace(rule, when=runs_vllm if is_vllm_key(rule.key) else lambda c: c.engine.name == VLLM)
    for rule in _RULES
)
