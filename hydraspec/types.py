"""Records that flow through a step. The module also exports the kernels' records, the errors of
errors.py, prompts.py and the sampling of parameters.py; it imports no other room.

Shape legend, the same letters everywhere:

    B  requests in one step            T  token rows in one step       N  rows that need logits
    S  request slots of the engine     L  tokens a slot can hold       K  draft tokens per request
    V  vocabulary                      D  hidden width of the target   A  aux hidden states
    G  KV groups                       P  blocks in a block table row

Positions count from 0. "Row" is one token of one request in one forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from hydraspec_kernels.attention.plan import GroupShape as GroupShape
from hydraspec_kernels.attention.plan import RowSegment as RowSegment
from hydraspec_kernels.embedding.records import EncodedRows as EncodedRows
from hydraspec_kernels.sampling.records import EVERYTHING
from hydraspec_kernels.sampling.records import SamplingFlags as SamplingFlags
from hydraspec_kernels.sampling.records import SlotRules as SlotRules
from hydraspec_kernels.sampling.records import TokenMasks as TokenMasks
from hydraspec_kernels.sampling.records import Verdict as Verdict
from torch import Tensor

from hydraspec.errors import CheckpointError as CheckpointError
from hydraspec.errors import ConfigurationError as ConfigurationError
from hydraspec.errors import DraftError as DraftError
from hydraspec.errors import NotFiniteError as NotFiniteError
from hydraspec.errors import UserError as UserError
from hydraspec.errors import WorkloadError as WorkloadError
from hydraspec.parameters import SamplingParams as SamplingParams
from hydraspec.parameters import Structured as Structured
from hydraspec.parameters import TokenLogprob as TokenLogprob
from hydraspec.pictures import Picture as Picture
from hydraspec.prompts import IMAGE as IMAGE
from hydraspec.prompts import Image as Image
from hydraspec.prompts import ImageRows as ImageRows
from hydraspec.prompts import Prompt as Prompt
from hydraspec.prompts import Span as Span
from hydraspec.prompts import by_digest as by_digest
from hydraspec.prompts import image_rows as image_rows
from hydraspec.prompts import images_of as images_of


@dataclass(slots=True, kw_only=True)
class Request:
    """A workload line. Exactly one of prompt, messages, prompt_token_ids is given by the user.

    `Engine.tokenize` fills prompt_token_ids. `index` is the place in the workload, counted from 0.

    A later turn of a conversation (`after`) has in its prompt, messages or prompt_token_ids only
    what is new: the engine puts the previous turn's prompt and its answer in front.
    """

    index: int
    id: str
    sampling: SamplingParams
    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None  # content: text, or parts of it
    prompt_token_ids: list[int] | None = None
    spans: tuple[Span, ...] = ()  # of prompt_token_ids
    images: tuple[Image, ...] = ()  # of the spans of kind "image", in order
    category: str | None = None
    answer: str | None = None
    meta: object = None  # any JSON value of the user's; copied to requests.jsonl
    arrival_s: float | None = None  # seconds after the start of a run; None: offered at once
    after: int | None = None  # index of the previous turn, whose answer is waited for
    turn: int = 1  # number of the turn in its conversation, from 1
    thinking: bool | None = None  # the chat template's switch; None: as the template has it
    may_reason: bool = False  # set by `Engine.tokenize`: a grammar leaves out a reasoning section
    scoring: Literal["text", "number", "defines"] = "text"  # how `answer` is compared
    pictures: tuple[Picture, ...] = ()  # of the image parts of messages; become spans and images
    error: str | None = None  # why it cannot be served; engines end it with this error
    num_filled: int = 0  # leading prompt tokens with random KV: to time steps, not for output

    @property
    def tokens(self) -> Prompt:
        """The prompt of a tokenised request."""
        assert self.prompt_token_ids is not None, "call tokenize() first"
        return Prompt(self.prompt_token_ids, self.spans)


@dataclass(slots=True, kw_only=True)
class Completion:
    """A finished request. finish_reason is "stop", "length" or "error" (then `error` says why)."""

    index: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    text: str | None  # null without a tokenizer
    finish_reason: str
    error: str | None
    ttft_ms: float | None  # from being offered to the engine to the first token
    latency_ms: float  # from being offered to the engine to the last token
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    queue_ms: float | None = None  # from being offered to a slot; None: no slot, or unknown
    # Intervals between arrivals of tokens, one step's tokens at once; empty where unknown.
    inter_token_ms: list[float] = field(default_factory=list)
    spans: tuple[Span, ...] = ()  # of prompt_token_ids
    ended_by_token: bool = True  # where the reason is "stop": a stop token, not only a stop string
    logprobs: list[TokenLogprob] | None = None  # of output_token_ids; None: not asked for
    prompt_logprobs: list[TokenLogprob] | None = None  # of prompt_token_ids, from the second on

    @property
    def prompt(self) -> Prompt:
        """The prompt that this completion answers."""
        return Prompt(self.prompt_token_ids, self.spans)


@dataclass(slots=True, frozen=True, kw_only=True)
class PrefixCaching:
    """Limits of what may be taken from an engine's prefix cache."""

    block_size: int  # tokens: every hit is a multiple of it
    has_draft_kv: bool = False  # drafter KV is cached too; its blocks depend on the token after


@dataclass(slots=True, kw_only=True)
class RequestStep:
    """A request's part in a step, in plain numbers."""

    index: int
    num_rows: int
    is_prefill: bool  # true while prompt (or recomputed) tokens are being read
    num_computed_tokens: int  # tokens with valid target KV before the step
    draft_token_ids: list[int]  # the drafts verified in this step, in order
    num_accepted: int  # the verifier's count, before a stop or limit cuts the output
    output_token_ids: list[int]  # emitted tokens, after a stop or limit has cut them
    jump_forward_places: list[int] = field(default_factory=list)  # of drafts a grammar decided
    draft_survivals: list[float] | None = None  # estimates of each draft; None: there are none


@dataclass(slots=True, frozen=True, kw_only=True)
class PositionScores:
    """The drafter's proposals from each of the N places of a finished request's output where a
    step may verify drafts, teacher-forced: each draft reads the target's own tokens before it.

    Place i is that of a step with `first` + i computed tokens. The target's tokens go on after the
    end of a greedy output; unknown ones are -1, and the scores there mean nothing. A token that the
    drafter cannot propose has rank 0 and probability 0.
    """

    index: int  # of the request
    first: int
    target_token_ids: np.ndarray  # [N, K] int64
    target_ranks: np.ndarray  # [N, K] int64, of the target's token in the drafter's logits, from 1
    target_probs: np.ndarray  # [N, K] float32, of the target's token, at temperature 1
    draft_token_ids: np.ndarray  # [N, K] int64, the drafter's best token
    draft_probs: np.ndarray  # [N, K] float32, of that token
    target_entropies: np.ndarray  # [N] float32 nats, of the target's next token


# Phases of a step, in order; commit is timed as a part of verify.
PHASES = ("schedule", "prepare", "forward", "verify", "propose")


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """A step in plain numbers; metrics are computed from these and `Completion`s alone."""

    step: int
    phase_ms: dict[str, float | None]  # by name in PHASES; null where not measured
    total_ms: float
    requests: list[RequestStep]
    num_preempted: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0  # share of KV blocks in use, 0..1
    kv_usage_per_group: dict[str, float] = field(default_factory=dict)  # that share by KV group
    replica: int = 0  # number of the replica, whose requests and cache the figures above are of
    num_replicas: int = 1  # replicas at work: the step took 1 / num_replicas of the run's time
    draft_length: int | None = None  # drafts per request of this step; None: K in every step
    device_ms: float | None = None  # device's clock, from the end of the step in flight before


@dataclass(slots=True, frozen=True, kw_only=True)
class KVGroupSpec:
    """Layers that share a block table."""

    name: str  # "full" or "sliding"
    layers: tuple[int, ...]  # indices into KVCache.caches: target layers, then a drafter's own
    shape: GroupShape
    dtype: torch.dtype | None = None  # of keys and values in the cache; None: the target's
    num_following_tokens: int = 0  # later tokens a row's KV depends on: a draft row t reads t + 1

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.shape.block_size

    @property
    def window(self) -> int | None:
        """Sliding window in tokens: a query at p sees positions > p - window; None: all."""
        return self.shape.window


# --------------------------------------------------------------------------- a step


@dataclass(slots=True, frozen=True)
class BlockTable:
    """The blocks of B requests in one KV group, as they were when this was made.

    An entry is never written again once it holds a block, so rows are shared, not copied. Two rows
    of the same owner (a request while it holds a slot) have the same entries where both are live.
    """

    rows: list[np.ndarray]  # B times [P] block ids; entries that are not live hold anything
    live: np.ndarray  # [B, 3] owner (0: none), first live entry, end of the live entries
    width: int  # entries that the step can name

    def dense(self) -> np.ndarray:
        """The block ids as one array [B, width]; entries that are not live are block 0."""
        table = np.zeros((len(self.rows), self.width), dtype=np.int64)
        for entries, row, (_, first, end) in zip(table, self.rows, self.live.tolist(), strict=True):
            entries[first:end] = row[first : min(end, self.width)]
        return table

    def part(self, requests: slice) -> BlockTable:
        """The table of some of the requests."""
        return BlockTable(self.rows[requests], self.live[requests], self.width)


@dataclass(slots=True, frozen=True, kw_only=True)
class Continuations:
    """Tokens that may follow texts, which the host proposes before a launch (docs/adr/0047)."""

    numbers: np.ndarray  # [N, 2K+3] int64: slot, known tokens of the text, tokens (-1: no more)
    is_ahead: bool  # a step in flight samples tokens that the host does not know


@dataclass(slots=True, frozen=True, kw_only=True)
class ScoredRows:
    """Rows of prompts whose next tokens are known and get log probabilities."""

    rows: np.ndarray  # [R] int64 rows of T
    token_ids: np.ndarray  # [R] int64, the prompts' own next tokens


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """The scheduler's decision, as plain numbers. Requests of a segment are adjacent."""

    slots: np.ndarray  # [B] request slots
    num_rows: np.ndarray  # [B] rows of each request
    num_drafts: np.ndarray  # [B] drafts under verification, 0..K
    samples: np.ndarray  # [B] bool: a token is sampled, as the last row is the newest token
    segments: tuple[RowSegment, ...]
    block_tables: list[BlockTable]  # per KV group
    all_greedy: bool
    num_speculative_tokens: int  # K, the width of draft tensors (0 without a drafter)
    flags: SamplingFlags = EVERYTHING
    draft_length: int | None = None  # chosen for this step, at most K; None: K in every step
    proposes: np.ndarray | None = None  # [B] bool: drafts are wanted after it; None: for all
    continuations: Continuations | None = None  # drafts to verify, where the host proposes any
    images: tuple[ImageRows, ...] = ()  # rows of images
    next_images: tuple[ImageRows, ...] = ()  # rows before tokens of images, if the drafter asks
    masks: TokenMasks | None = None  # of the requests with a grammar that sample
    scored: ScoredRows | None = None  # such a step runs eagerly, and every row through every layer
    num_late: np.ndarray | None = None  # [B] rows before these that a drafter has not run over
    drafter_rests: bool = False  # it does not run over these either, one row of each request

    @property
    def decode_rows(self) -> int:
        """Rows of a request that verifies all drafts of this step."""
        length = self.draft_length
        return 1 + (self.num_speculative_tokens if length is None else length)


@dataclass(slots=True, kw_only=True)
class RequestState:
    """Per-slot state that changes every step; it lives on the device and is never read by the host.

    The last slot belongs to no request: padding requests of graphs share it, with nothing computed.
    token_ids holds prompt and sampled tokens, then drafts under verification after the newest one
    (number num_computed of a decoding request). Column L takes masked writes.
    """

    token_ids: Tensor  # [S, L+1] int64
    num_computed: Tensor  # [S] int64, tokens with valid target KV
    temperature: Tensor  # [S] float32
    top_k: Tensor  # [S] int64
    top_p: Tensor  # [S] float32
    min_p: Tensor  # [S] float32
    seed: Tensor  # [S] int64
    accepts: Tensor | None = None  # [S, L+1] int8, see SlotSampling; synthetic verification only
    draft_probs: Tensor | None = None  # [S, K, V_draft] float32, probabilistic drafts only
    draft_vocab_map: Tensor | None = None  # [V_draft] int64 target ids; None: V_draft is V
    draft_survivals: Tensor | None = None  # [S, K] float32, see Draft; None: not estimated
    rules: SlotRules | None = None  # on logits; None: no request may have any
    logprobs: Tensor | None = None  # [S, K+1, 1+2M] float32 of the last step, see sampling.logprobs


@dataclass(slots=True, kw_only=True)
class Rows:
    """Inputs of one forward pass of a target or a draft head, on the device.

    Row r of a request with R rows has position seq_len - R + r. The G groups are those of the model
    that runs: a target reads the first entries, a draft head with its own KV reads the others.
    """

    segments: tuple[RowSegment, ...]
    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    seq_lens: Tensor  # [B] int64, computed tokens plus the rows of this pass
    slot_mapping: list[Tensor]  # per KV group [T] int64: cache row each token row writes
    block_tables: list[Tensor]  # per KV group [B, P] int64
    query_start_loc: Tensor  # [B+1] int64, first row of each request; the last entry is T
    has_padding: bool = False  # some requests or rows are padding
    encoded: EncodedRows | None = None  # rows that no token is embedded for; None: there are none


@dataclass(slots=True, frozen=True, kw_only=True)
class NeededRows:
    """Rows whose hidden states are needed after the last layer that writes KV: the last few of some
    requests, in order. That layer and those after it compute only keys and values of other rows.

    Graphs have room for K+1 rows of each of their requests: `targets` says which of the N rows are
    padding, and requests that need none have no rows.
    """

    rows: Tensor  # [N] int64 rows of T; padding has any row
    targets: Tensor | None = None  # [N] int64 as `rows`, but T for padding; None: no padding
    requests: Tensor  # [B'] int64 batch indices of the requests they belong to
    query_start_loc: Tensor  # [B'+1] int64, counted in the N rows
    segments: tuple[RowSegment, ...]  # of the N rows


@dataclass(slots=True, kw_only=True)
class Batch(Rows):
    """Inputs of a step: the target's rows, and what verification and drafting need beside them.

    slot_mapping and block_tables hold the target's groups first, then those a drafter owns.
    """

    slots: Tensor  # [B] int64
    row_request: Tensor  # [T] int64, batch index of the request a row belongs to
    logits_rows: Tensor | None  # [N] int64 rows of T that need logits; None means every row
    verify_rows: Tensor  # [B, K+1] int64 rows of N; entries past num_drafts repeat a valid row
    draft_tokens: Tensor  # [B, K] int64, -1 where there is no draft
    num_drafts: Tensor  # [B] int64
    samples: Tensor  # [B] bool: a token is sampled, as the rows reach the newest token
    all_greedy: bool  # known on the host: every request that samples has temperature 0
    flags: SamplingFlags = EVERYTHING
    needed: NeededRows | None = None  # rows that verification reads, where they are not all rows
    draft_length: int | None = None  # drafts to propose after the step; None: K
    proposes: Tensor | None = None  # [B] bool, see StepPlan; None: for all
    next_encoded: EncodedRows | None = None  # rows whose following token is none of text

    @property
    def num_requests(self) -> int:
        """Number of requests, B, padding included."""
        return self.slots.shape[0]


@dataclass(slots=True, kw_only=True)
class TargetStep:
    """Outputs of the target's forward pass."""

    hidden_states: Tensor  # [T, D] after the final norm
    # [N, V] after the soft cap, before temperature; a tensor-parallel rank has some of the columns
    logits: Tensor
    # A times [T, D], in the order of aux_layer_ids: id i is the residual stream after i layers.
    aux_hidden_states: list[Tensor] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class IntermediateTensors:
    """Tensors that a pipeline stage hands to the next one. An aux state at the border is left out:
    it is the residual stream itself, which the next stage captures."""

    hidden_states: Tensor  # [T, D] the residual stream after the stage's last layer
    # [T, D] each: ids below the number of layers so far, in the order of aux_layer_ids.
    aux_hidden_states: list[Tensor] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Draft:
    """A speculator's proposal for the next step."""

    tokens: Tensor  # [B, K] int64
    probs: Tensor | None = None  # [B, K, V_draft] float32 the drafts were sampled from
    # [B, K] float32 estimated probabilities that a draft and all before it are accepted
    survivals: Tensor | None = None


DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
