"""The schema of summary.json, version 1: its keys and their types.

docs/outputs/ explains every key; tests compare it with this schema and with what a run writes.
Keys are added, never renamed. The module computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NotRequired, TypedDict

from hydraspec.metrics.grammars import Grammars
from hydraspec.metrics.kv_agreement import KVCacheAgreement
from hydraspec.metrics.run_facts import RunFacts
from hydraspec.metrics.survival import DraftSurvival

SCHEMA_VERSION = 1
Status = Literal["ok", "interrupted", "failed"]
# Values of `time_breakdown_from`.
ALL_STEPS = "all steps"
PROFILE = "decode steps of a profiling run: eager, without graphs, not part of the measured rounds"


class Interval(TypedDict):
    """An estimate with its 95 % interval [low, high], which is null with too few requests."""

    mean: float
    ci95: Sequence[float] | None


class Length(TypedDict):
    """Tokens per verification over some of the requests, or all."""

    mean: float | None
    ci95: Sequence[float] | None


class AcceptanceLength(Length):
    """Tokens per verification, pooled and as a mean over requests."""

    mean_over_requests: float | None


class CategoryFigures(TypedDict):
    """Acceptance and speedup of the requests of one category."""

    num_requests: int
    acceptance_length: Length
    speedup: Interval | None
    speedup_measured: NotRequired[float | None]  # runs of earlier versions lack it


class PlaceFigures(TypedDict):
    """Acceptance of the verifications whose first output token has a place in first..last."""

    first: int
    last: int
    num_requests: int
    num_drafts: int
    acceptance_length: Length


class Assessment(TypedDict):
    """The judgement of a method, in a word and in a sentence."""

    says: Literal["worth_it", "cannot_tell", "slower"]
    sentence: str


class CategoryAccuracy(TypedDict):
    """Share of correct outputs among the scored requests of one category."""

    exact_match: float
    num_scored: int


class Accuracy(CategoryAccuracy):
    """Share of correct outputs among all scored requests, and by category; see metrics.accuracy.

    `exact_match` is the share that `scoring` calls correct; "defines" compares no answer.
    """

    scoring: NotRequired[Literal["text", "number", "defines"]]  # runs of earlier versions lack it
    by_category: dict[str, CategoryAccuracy]


class StepProfile(TypedDict):
    """Wall time of a decode step on a device, and its parts, in milliseconds."""

    step_ms: float
    device_ms: float
    schedule_ms: float
    launch_ms: float


class Percentiles(TypedDict):
    """Percentiles of a latency in milliseconds, or of the figure named; null without values."""

    p50: float | None
    p90: float | None
    p99: float | None


class Latencies(TypedDict):
    """Percentiles of the times that users waited, in milliseconds."""

    ttft: Percentiles
    inter_token: Percentiles
    queue: Percentiles


class TurnFigures(TypedDict):
    """Figures of the turns of conversations whose number, from 1, is in first..last."""

    first: int
    last: int
    num_requests: int
    mean_acceptance_length: float | None
    time_to_first_token_ms: float | None


class Goodput(TypedDict):
    """Latency limits that were set, and the share and rate of requests that meet all of them."""

    ttft_ms: float | None
    inter_token_ms: float | None
    share: float | None
    requests_per_second: float | None


class BuiltInRounds(TypedDict):
    """Numbers of kernels compiled and graphs captured inside the measured rounds."""

    kernels: int
    graphs: int


class Divergence(TypedDict):
    """The place at which two outputs of one request first differ."""

    request: str  # id
    index: int  # place in the workload
    position: int  # output tokens before it are equal
    # The target's best logit minus its second best, after the common prefix; NaN (null in files)
    # if its best is not finite, which is beyond rounding; null if the engine gives no logits.
    target_margin: float | None
    allowed_margin: float | None  # there: (8 · eps(dtype), 1/8 with e4m3 inputs) · max|logit|
    method_token: int | None  # null: the output had ended
    baseline_token: int | None


class Distribution(TypedDict):
    """The test of sampled outputs against the baseline's; see metrics/distribution.py."""

    says: Literal["same", "different", "cannot_tell"]  # the last: the test has no power
    p: float
    chi2: float
    degrees_of_freedom: int
    level: float
    detectable: float | None  # total variation distance that is told with `power`, if any is
    power: float
    num_prompts: int
    num_samples: int  # of each prompt, on each side
    num_tokens: int  # the first ones of an output


class Lossless(TypedDict):
    """The verdict on the outputs, and the comparisons that it rests on."""

    verdict: Literal["identical", "numerical", "diverged", "not_checked"]
    reason: str | None  # why the verdict is "not_checked"; null with any other
    num_requests_checked: int
    num_requests_diverged: int
    num_requests_sampled: int  # finished at a temperature above 0: not compared
    num_turns_not_checked: int  # greedy turns whose prompts differ, as answers before them do
    first_divergence: Divergence | None  # lowest request index
    first_beyond_margin: Divergence | None  # the one that decided "diverged"
    num_failed_with_method_only: int  # requests, greedy or not, that the baseline finished
    num_failed_with_baseline_only: int
    distribution: Distribution | None  # with metrics.distribution
    kv_cache: NotRequired[KVCacheAgreement | None]  # with an FP8 cache; earlier versions lack it
    not_finite_in: str | None  # id of a request in which the target's logits are NaN


class Cudagraph(TypedDict):
    """The CUDA graph mode that was requested, and the modes of target and drafter."""

    requested: str
    target: str
    draft: str
    reason: str | None


class DraftLengths(TypedDict):
    """Drafts per request of decode steps, where the engine chooses them."""

    mean: float
    histogram: list[int]  # steps with 0, 1, … K


class Acceptance(TypedDict):
    """Counts and rates of the drafts that the verifier accepted."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_jump_forward_tokens: NotRequired[int]  # runs of earlier versions lack it
    acceptance_length: AcceptanceLength
    acceptance_length_percentiles: Percentiles
    acceptance_rate: float | None
    acceptance_rate_per_position: list[float | None]
    conditional_acceptance_rate_per_position: list[float | None]
    acceptance_length_by_category: dict[str, float | None]
    num_reached_per_position: list[int]
    num_drafts_by_category: dict[str, int]
    num_speculative_tokens_used: DraftLengths | None
    draft_survival: NotRequired[DraftSurvival | None]  # runs of earlier versions lack it


class Speed(TypedDict):
    """Speed and accuracy of one side: the method, or the baseline."""

    output_tokens_per_second: float | None
    output_tokens_per_second_ci95: Sequence[float] | None
    time_per_output_token_ms: float | None
    time_to_first_token_ms: float | None
    latency_ms: Latencies
    by_turn: list[TurnFigures] | None
    goodput: Goodput | None
    time_breakdown_ms: Mapping[str, float | None]
    time_breakdown_from: str | None
    total_step_time_s: float
    step_profile_ms: StepProfile | None
    built_in_rounds: BuiltInRounds
    accuracy: Accuracy | None


class PrefixCache(TypedDict):
    """Tokens taken from the prefix cache; metrics.prefix_cache defines every figure."""

    queried_tokens: int
    hit_tokens: int
    hit_rate: float | None
    eligible_hit_rate: float | None
    border_tokens: int
    recomputed_tokens: int


class Counts(TypedDict):
    """Counts of one side: the method, or the baseline."""

    num_requests: int
    num_errors: int
    num_output_tokens: int
    num_image_tokens: NotRequired[int]  # runs of earlier versions lack it
    num_steps: int
    num_preemptions: int
    prefix_cache: PrefixCache | None
    kv_peak_usage_per_group: dict[str, float]


class Baseline(Speed, Counts):
    """Figures of method=none on the same prompts, in the same process."""


class Parallelism(TypedDict):
    """Ranks along each axis, and devices in all."""

    tensor: int
    pipeline: int
    data: int
    num_devices: int


class Quantization(TypedDict):
    """Number formats of quantised matrices by kind, such as q_proj; None: all are float."""

    target: Mapping[str, str] | None
    drafter: Mapping[str, str] | None


class Settings(TypedDict):
    """The settings that figures depend on."""

    workload: str
    num_requests_in_workload: int
    concurrency: int | None
    request_rate: float | None
    burstiness: float
    temperature: float
    verification: str
    draft_sampling: str
    device: str
    dtype: str
    max_model_len: int
    async_scheduling: bool | None
    parallelism: Parallelism
    devices: list[str]
    seed: int
    quantization: Quantization
    grammars: NotRequired[Grammars | None]  # runs of earlier versions lack it
    draft_spec: dict[str, object] | None


class Prediction(TypedDict):
    """The prediction for the run's K and concurrency; `error`: predicted / measured - 1."""

    speedup: float
    acceptance_length: float
    break_even_acceptance_length: float
    error: float | None


class DraftStep(TypedDict):
    """Ranks of the target's token for one of the K drafts, over all places."""

    step: int
    top_1: float
    top_5: float
    median_rank: float | None
    mean_probability: float


class Ceilings(TypedDict):
    """Acceptance lengths that the drafter could reach; metrics.draft_figures defines them."""

    acceptance: float
    oracle_features: float
    top_5: float
    draft_vocabulary: float


class StartFigures(TypedDict):
    """Drafts accepted per start, over some of the places."""

    accepted_per_start: float | None
    ci95: Sequence[float] | None
    num_starts: int


StartBucket = TypedDict(  # "from" is a keyword
    "StartBucket",
    {
        "from": float | None,
        "below": float | None,
        "accepted_per_start": float | None,
        "ci95": Sequence[float] | None,
        "num_starts": int,
    },
)


class TeacherForced(TypedDict):
    """Figures of the drafter over the target's own tokens, from every place of the outputs."""

    num_places: int
    by_step: list[DraftStep]
    # Runs of earlier versions lack these three.
    by_context: NotRequired[list[StartBucket]]
    by_target_entropy: NotRequired[list[StartBucket]]
    by_token_class: NotRequired[dict[str, StartFigures] | None]
    ceilings: Ceilings


class Summary(Speed, Counts, Acceptance, Settings, RunFacts):
    """The content of summary.json."""

    schema_version: int
    status: Status
    engine: str
    target: str
    target_checkpoint: str
    method: str
    drafter: str | None
    num_speculative_tokens: int
    peak_kv_usage: float
    baseline: Baseline | None
    speedup: Interval | None
    speedup_measured: NotRequired[float | None]  # runs of earlier versions lack these two
    speedup_from: NotRequired[Literal["step costs", "timings: few steps", "timings: drift"] | None]
    assessment: Assessment | None
    prediction: Prediction | None
    by_category: dict[str, CategoryFigures]
    acceptance_by_output_place: list[PlaceFigures]
    teacher_forced: TeacherForced | None
    lossless: Lossless
    cudagraph: Cudagraph
    warnings: list[str]
    reused_from: NotRequired[str]  # the equal job of a sweep that gave its results
