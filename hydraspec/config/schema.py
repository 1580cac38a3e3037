"""The typed configuration: one dataclass per config group.

The module has types only: values live in conf/, checks in checks.py.

A field marked DERIVED is filled in by `to_run_config` and is no key of the configuration. A field
marked OF_CHOICES stands in the YAML of choices only. A field marked OF_METHOD has the keys that the
chosen method declares (options.py). Choices of engine, workload and bench have the keys that their
YAML spells out; a key of another choice keeps its default (`_check_own_keys` in build.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

DERIVED = {"derived": True}
OF_CHOICES = {"of_choices": True}
OF_METHOD = {"of_method": True}
AUTO = "auto"  # method.name until the drafter's folder has said which method it is for


class Weights(Enum):
    """Source of a model's weights: its files, or seeded random numbers."""

    checkpoint = "checkpoint"
    random = "random"


class Dtype(Enum):
    """The floating-point type of weights, activations and KV."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class KVDtype(Enum):
    """The type of the target's keys and values in the cache: auto is target.dtype, fp8 e4m3 numbers
    with a scale for each layer and KV head."""

    auto = "auto"
    fp8 = "fp8"


class LogprobsMode(Enum):
    """sampling.logprobs_mode: the distribution that logprobs are of, the target's own or the one
    that is sampled from."""

    raw = "raw"
    processed = "processed"


class DraftSampling(Enum):
    """Choice of a draft token: the most likely one, or a sample."""

    greedy = "greedy"
    probabilistic = "probabilistic"


class PerStep(Enum):
    """A number that is chosen for each request and step while requests run."""

    auto = "auto"

    def __str__(self) -> str:
        return self.value


class Verification(Enum):
    """The rule that accepts drafts."""

    standard = "standard"
    block = "block"
    synthetic = "synthetic"


class Device(Enum):
    """Device of the engine; auto is a GPU if there is one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class TrackerMode(Enum):
    """Modes of Weights & Biases: record locally, upload, or do nothing."""

    offline = "offline"
    online = "online"
    disabled = "disabled"


@dataclass(slots=True, kw_only=True)
class TargetConfig:
    """target=…: the model whose outputs are produced."""

    name: str
    checkpoint: str  # a folder, a Hugging Face hub id, or "zoo:<name>" for one of the package's
    weights: Weights = Weights.checkpoint
    dtype: Dtype = Dtype.float32
    max_model_len: int | None = None  # null: the checkpoint's own limit
    max_soft_tokens: int | None = None  # of a picture; null: as the checkpoint's processor says
    drafters: dict[str, str] = field(default_factory=dict)  # method -> default checkpoint


@dataclass(slots=True, kw_only=True)
class MethodConfig:
    """method=…: how tokens are drafted and verified."""

    name: str
    num_speculative_tokens: int | PerStep  # 0 with name=auto: what the drafter proposes
    max_speculative_tokens: int | None = None  # num_speculative_tokens=auto only: K at most
    costs: str | None = None  # likewise: costs.json of an earlier run; null: measured in warm-up
    checkpoint: str | None = None  # null: what target.drafters names for the method
    needs_checkpoint: bool = field(default=True, metadata=OF_CHOICES)  # false: without weights
    weights: Weights = Weights.checkpoint
    draft_sampling: DraftSampling = DraftSampling.greedy
    verification: Verification = Verification.standard
    synthetic_acceptance_length: float | None = None
    synthetic_trace: str | None = None  # a run whose acceptance is followed, in place of a length
    synthetic_category: str | None = None  # of the requests of that run; null: all
    synthetic_undraftable: float | None = None  # share of requests whose drafts are all rejected
    # The method's own keys, an instance of the dataclass it declares; null for one without any.
    options: Any = field(default=None, metadata=OF_METHOD)

    @property
    def most_drafts(self) -> int:
        """K, or the largest K if it is chosen per step."""
        if isinstance(self.num_speculative_tokens, PerStep):
            return self.max_speculative_tokens or 0
        return self.num_speculative_tokens


@dataclass(slots=True, kw_only=True)
class KVCacheConfig:
    """engine.kv_cache: type, block size and memory of the paged cache."""

    dtype: KVDtype = KVDtype.auto
    block_size: int = 16
    block_sizes: dict[str, int] = field(default_factory=dict)  # of some KV groups, by their names
    memory_gib: float | None = None  # null: enough for max_num_seqs requests, within free memory
    memory_fraction: float | None = None  # of the memory that is free once the weights are loaded

    def block_size_of(self, group: str) -> int:
        """Tokens of a block in the KV group of this name."""
        return self.block_sizes.get(group, self.block_size)


@dataclass(slots=True, kw_only=True)
class VllmConfig:
    """engine.vllm: the keys of engine=vllm only."""

    gpu_memory_utilization: float = 0.9  # vLLM's share of device memory if memory_gib is null
    record_steps: bool = True  # false: finished requests only, without acceptance
    images: bool = False  # true: started with the target's image encoder and processor
    # Starter of vLLM's processes; null: on this host, multiprocessing if there are several.
    distributed_executor_backend: str | None = None
    nnodes: int = 1  # hosts; each is given the same command and its own node_rank
    node_rank: int = 0
    master_addr: str | None = None  # of the host with node_rank=0, as the others reach it
    master_port: int = 29501


@dataclass(slots=True, kw_only=True)
class EngineConfig:
    """engine=…: the engine that runs the models, its device and its limits."""

    name: str
    device: Device = Device.auto
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    max_mixing_cost: float | None = None  # that decodes add to reading prompts; null: no bound
    num_threads: int | None = None  # null: chosen from the target's width (CPU only)
    async_scheduling: bool | None = None  # schedule a step ahead of the device; null: on CUDA
    prefix_caching: bool = True  # requests of a run share the KV of equal leading tokens
    kv_cache: KVCacheConfig = field(default_factory=KVCacheConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)


@dataclass(slots=True, kw_only=True)
class ParallelismConfig:
    """parallelism=…: devices per axis. Each device is a process, a rank, on a GPU or on a CPU."""

    name: str
    tensor: int = 1  # ranks that share every layer
    pipeline: int = 1  # stages, each with some of the layers
    pipeline_layers: list[int] | None = None  # layers of each stage; null: balanced
    data: int = 1  # replicas, each with some of the requests
    timeout_s: float = 15.0  # a rank that stands still for so long in a step ends the run
    check: bool = False  # tensor-parallel ranks compare their results after every step

    @property
    def num_ranks(self) -> int:
        """Ranks of all axes together."""
        return self.tensor * self.pipeline * self.data

    @property
    def largest_axis(self) -> tuple[str, int]:
        """Key of the axis with the most ranks, for a message about too many ranks, and the number
        of ranks along the axis."""
        axes = {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.data}
        axis = max(axes, key=axes.__getitem__)
        return f"parallelism.{axis}", axes[axis]


@dataclass(slots=True, kw_only=True)
class CudagraphConfig:
    """cudagraph=…: which parts of a step are CUDA graphs."""

    name: str
    capture_sizes: list[int] | None = None
    max_mixed_rows: int = 2048


@dataclass(slots=True, kw_only=True)
class StructuredConfig:
    """sampling.structured: the grammar of outputs, one of these."""

    json: dict[str, Any] | str | None = None  # a JSON schema
    regex: str | None = None
    grammar: str | None = None  # EBNF
    choice: list[str] | None = None


@dataclass(slots=True, kw_only=True)
class SamplingConfig:
    """sampling=…: sampling parameters of requests, unless their workload line gives others."""

    name: str
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 128
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = field(default_factory=dict)  # by token id
    bad_words: list[list[int]] = field(default_factory=list)  # token ids of each
    min_tokens: int = 0
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode = LogprobsMode.raw
    structured: StructuredConfig = field(default_factory=StructuredConfig)


@dataclass(slots=True, kw_only=True)
class GoodputConfig:
    """workload.goodput and bench.goodput: latency limits of requests that count; null: no limit."""

    ttft_ms: float | None = None  # to the first token, from its arrival
    inter_token_ms: float | None = None  # per token after the first, on average


@dataclass(slots=True, kw_only=True)
class WorkloadConfig:
    """workload=…: the requests of a run."""

    name: str
    path: str | None = None  # JSON lines; "zoo:tiny" is the one that ships with the package
    limit: int | None = None
    concurrency: int | None = None  # requests unfinished at once, in all replicas; null = all
    request_rate: float | None = None  # requests that arrive per second; null: all at once
    burstiness: float = 1.0  # of arrivals: 1 is Poisson, below 1 in bursts, above 1 more evenly
    goodput: GoodputConfig = field(default_factory=GoodputConfig)
    output_tokens: int = 256  # of each request; random, shared_prefix, multi_turn without a path
    num_requests: int = 32  # workload=random and workload=images only
    prompt_tokens: int = 512  # workload=random only
    num_prefixes: int = 10  # workload=shared_prefix only, and the next three
    requests_per_prefix: int = 8
    prefix_tokens: int = 256
    suffix_tokens: int = 256
    num_conversations: int = 8  # workload=multi_turn only
    num_turns: int = 4  # workload=multi_turn only
    turn_tokens: int = 200  # workload=multi_turn without a path
    # Keys of workloads of text, each with those in its YAML.
    thinking: bool | None = None  # the chat template's switch; null: the template's default
    chat: bool = True  # false: as plain text, for targets that know no chat
    num_shots: int = 0  # solved examples before each question
    max_turns: int | None = None  # of each conversation, the first ones; null: all
    category: str | None = None  # of the file's; null: all
    shots_path: str | None = None  # file of examples; null: first lines of path, not asked then


@dataclass(slots=True, kw_only=True)
class TrackerConfig:
    """tracker=…: the record of the run in Weights & Biases, and whether a report is made."""

    name: str  # of the choice; with tracker=wandb any other text is the run's own name
    project: str = "hydraspec"
    entity: str | None = None
    group: str | None = None
    job_type: str = "run"
    tags: list[str] = field(default_factory=list)  # besides target, method and engine
    notes: str | None = None  # null: the run's assessment
    mode: TrackerMode = TrackerMode.offline
    report: bool = False  # study.html at the end of a run or sweep

    @property
    def records(self) -> bool:
        """Returns whether Weights & Biases records the run."""
        return self.name != "none" and self.mode is not TrackerMode.disabled


@dataclass(slots=True, kw_only=True)
class MetricsConfig:
    """metrics: which further files a run writes, and the prediction it is compared with."""

    steps: bool = False
    trace: bool = False
    all_positions: bool = False  # drafts from every output position too
    distribution: int | None = None  # samples of each prompt and side, to compare distributions
    distribution_prompts: int = 4  # the number of these prompts
    prediction: str | None = None  # a predict.json, or a folder of them, to compare with
    smallest_effect: float = 0.03  # share of the speed; a smaller difference counts as none
    compare_formats: bool = False  # a sweep's targets are one model in several number formats


@dataclass(slots=True, kw_only=True)
class BenchConfig:
    """bench=…: a table of timings in place of a run. A key that a choice lacks is zero or empty."""

    name: str = "none"  # none: an ordinary run
    engines: list[str] = field(default_factory=list)
    methods: list[str] | None = None  # null: none, and the method chosen
    batches: list[int] = field(default_factory=list)  # bench=decode and bench=context only
    contexts: list[int] = field(default_factory=list)  # bench=context only, and the next two
    drafts: list[int] | None = None  # fixed K; null: see benches.drafts_of
    cell_timeout_s: int = 0
    num_requests: int = 0  # bench=load and bench=serve only
    prompt_tokens: int = 0  # bench=load, bench=serve: the median
    output_tokens: int = 0  # bench=load, bench=serve: the median
    max_prompt_tokens: int = 0  # bench=load and bench=serve only, and the next one
    max_output_tokens: int = 0
    equal_lengths: bool = False  # bench=load and bench=serve only: the medians, for all requests
    rates: list[float] = field(default_factory=list)  # bench=serve only: shares of peak_rate
    peak_rate: float | None = None  # bench=serve only: requests per second; null: measured
    goodput: GoodputConfig = field(default_factory=GoodputConfig)  # bench=serve only
    num_conversations: int = 0  # bench=turns only, and the next three
    num_turns: int = 0
    turn_tokens: int = 0
    cold_turns: list[int] | None = None  # turns whose prompts are also read cold; null: all
    repeats: int = 0  # timings per figure, of which the median counts; load and turns: passes
    isolate: bool = True  # every engine and method in its own process
    vllm_pythonpath: str | None = None  # prepended to PYTHONPATH of processes with vLLM
    timeout_s: int = 0  # limit of one process


@dataclass(slots=True, kw_only=True)
class RunConfig:
    """The whole configuration of a run, which `to_run_config` builds from a DictConfig and
    `from_dict` from plain values."""

    target: TargetConfig
    method: MethodConfig
    engine: EngineConfig
    parallelism: ParallelismConfig
    cudagraph: CudagraphConfig
    sampling: SamplingConfig
    workload: WorkloadConfig
    tracker: TrackerConfig
    bench: BenchConfig = field(default_factory=BenchConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    baseline: bool = True
    seed: int = 0
    warnings: list[str] = field(default_factory=list, metadata=DERIVED)  # for summary.json
