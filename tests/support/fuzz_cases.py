"""Random engine configurations with their requests. Case n is the same on every machine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from fuzz_stages import LONGEST_OUTPUT, PAIRS, ZOO_PAIRS, Pair, Stage, stage
from graph_runs import GRAPH_MODES

from hydraspec.config.options import SuffixOptions
from hydraspec.config.schema import DraftSampling, Dtype, RunConfig, Verification
from hydraspec.types import Request, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What is drawn from. Fewer shapes mean fewer kernels to compile on a device."""

    pairs: tuple[Pair, ...]
    dtypes: tuple[Dtype, ...]
    num_drafts: tuple[int, ...]
    block_sizes: tuple[int, ...]
    max_num_seqs: tuple[int, ...]
    max_num_batched_tokens: tuple[int, ...]


BLOCK_DRAFTS = 7  # K that the blocks of the zoo's drafters have rows for


ON_CPU = Choices(
    pairs=PAIRS,
    dtypes=(Dtype.float64, Dtype.float64, Dtype.float64, Dtype.float32),
    num_drafts=tuple(range(1, 9)),
    block_sizes=(8, 16, 32, 64),
    max_num_seqs=tuple(range(1, 21)),
    max_num_batched_tokens=(16, 17, 24, 32, 40, 63, 100, 256, 512),
)
ON_DEVICE = Choices(
    pairs=ZOO_PAIRS,
    dtypes=(Dtype.float32,),
    num_drafts=(1, 3, 4, 8),
    block_sizes=(16, 32),
    max_num_seqs=(1, 4, 7, 20),
    max_num_batched_tokens=(16, 40, 64, 256, 512),
)


GEMMA4 = tuple(pair for pair in ZOO_PAIRS if pair.stage.startswith("tiny_gemma4"))
OTHERS = tuple(pair for pair in PAIRS if pair not in GEMMA4)


@dataclass(kw_only=True)
class Case:
    """One configuration with its requests. `other` is a second engine of the process, if any."""

    number: int
    pair: Pair
    config: RunConfig
    requests: list[Request]
    concurrency: int | None
    # On a CPU: plain, launched (a device's runner), recorded or called (its graphs).
    runner: str
    room: int | None  # requests of full length that the cache holds; None: all
    company: str  # alone, baseline (takes turns) or beside (steps in between)
    other: Case | None = None

    @property
    def k(self) -> int:
        return self.config.method.num_speculative_tokens

    @property
    def drafts_alone(self) -> bool:
        """Whether drafts depend on the request alone, and not on outputs of others, on how often
        theirs are accepted or on how many of its tokens have arrived."""
        options = self.config.method.options
        if not isinstance(options, SuffixOptions):
            return True
        reads_others = options.max_cached_requests > 0 or options.min_acceptance > 0
        return not reads_others and not self.config.engine.async_scheduling

    @property
    def dtype(self) -> Dtype:
        return self.config.target.dtype

    def __str__(self) -> str:
        method, engine = self.config.method, self.config.engine
        parts = {
            "case": self.number,
            "target": self.pair.stage,
            "method": method.name,
            "k": self.k,
            "dtype": self.dtype.value,
            "verification": method.verification.value,
            "draft_sampling": method.draft_sampling.value,
            "cudagraph": self.config.cudagraph.name,
            "sizes": self.config.cudagraph.capture_sizes,
            "runner": self.runner,
            "block_size": engine.kv_cache.block_size,
            "block_sizes": engine.kv_cache.block_sizes,
            "max_num_seqs": engine.max_num_seqs,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "max_model_len": self.config.target.max_model_len,
            "async": engine.async_scheduling,
            "concurrency": self.concurrency,
            "room": self.room,
            "company": self.company,
        }
        lines = [" ".join(f"{key}={value}" for key, value in parts.items())]
        lines += [f"  {request.sampling} {request.prompt_token_ids}" for request in self.requests]
        return "\n".join(lines)


def draw(number: int, choices: Choices, seed: int = 10) -> Case:
    """Case `number`: pairs come in turn, everything else by chance."""
    rng = np.random.default_rng([seed, number])
    pair = choices.pairs[number % len(choices.pairs)]
    case = _draw_case(number, pair, choices, rng)
    case.company = str(rng.choice(["alone", "alone", "baseline", "beside"]))
    if case.company == "beside":
        same = [other for other in choices.pairs if other.stage == pair.stage]
        fellow = same[int(rng.integers(len(same)))]
        case.other = _draw_case(number, fellow, choices, rng, dtype=case.dtype)
    return case


def _draw_case(
    number: int,
    pair: Pair,
    choices: Choices,
    rng: np.random.Generator,
    dtype: Dtype | None = None,
) -> Case:
    dtype = dtype or choices.dtypes[int(rng.integers(len(choices.dtypes)))]
    found = stage(pair.stage, dtype)
    k = 0 if pair.method == "none" else int(rng.choice(choices.num_drafts))
    k = min(k, BLOCK_DRAFTS) if pair.method in ("dflash", "dspark", "dflash2") else k
    sampled = bool(rng.random() < 0.45)
    max_num_seqs = int(rng.choice(choices.max_num_seqs))
    requests = _draw_requests(found, rng, sampled)
    longest = max(len(request.prompt_token_ids or ()) for request in requests)
    config = found.config(
        pair,
        k=k,
        max_model_len=_draw_length(found, rng, longest),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=int(rng.choice(choices.max_num_batched_tokens)),
        block_size=int(rng.choice(choices.block_sizes)),
        draft_sampling=rng.choice(list(DraftSampling)),
        verification=rng.choice([Verification.standard, Verification.block]),
        seed=int(rng.integers(1 << 20)),
    )
    config.engine.async_scheduling = bool(rng.random() < 0.4)
    if pair.method == "suffix":
        config.method.options = SuffixOptions(
            max_cached_requests=int(rng.choice([0, 4, 100])),
            max_spec_factor=float(rng.choice([1.0, 8.0])),
            min_token_prob=float(rng.choice([0.0, 0.1])),
            min_acceptance=float(rng.choice([0.0, 0.15])),
        )
    runner = str(rng.choice(["plain", "launched", "recorded", "recorded", "recorded", "called"]))
    if runner in ("recorded", "called"):
        config.cudagraph.name = str(rng.choice(GRAPH_MODES))
        config.cudagraph.capture_sizes = _draw_sizes(rng, max_num_seqs)
    if dtype is not Dtype.float64:  # a CPU's graphs are of float64: kernels would be interpreted
        runner = "plain"
    return Case(
        number=number,
        pair=pair,
        config=config,
        requests=requests,
        concurrency=int(rng.integers(1, 9)) if rng.random() < 0.4 else None,
        runner=runner,
        room=int(rng.integers(1, 4)) if rng.random() < 0.35 else None,
        company="alone",
    )


def _draw_length(found: Stage, rng: np.random.Generator, longest: int) -> int:
    """target.max_model_len: some outputs reach it."""
    more = int(rng.choice([2, 9, LONGEST_OUTPUT, LONGEST_OUTPUT + 9]))
    return min(longest + more, found.target.max_position_embeddings)


def _draw_sizes(rng: np.random.Generator, max_num_seqs: int) -> list[int]:
    """cudagraph.capture_sizes: one or two, so that batches are padded and some have no graph."""
    sizes = {int(size) for size in rng.choice([1, 2, 3, 4, 8, 16, 20], 2)}
    return sorted(size for size in sizes if size <= max_num_seqs) or [max_num_seqs]


def _draw_requests(found: Stage, rng: np.random.Generator, sampled: bool) -> list[Request]:
    requests = []
    for index in range(int(rng.integers(1, 9))):
        prompt = found.prompts[int(rng.integers(len(found.prompts)))]
        sampling = _draw_ends(found, rng, prompt)
        if sampled and rng.random() < 0.7:
            sampling.temperature = float(rng.choice([0.3, 0.8, 1.3]))
            sampling.top_k = int(rng.choice([0, 0, 1, 5, 40]))
            sampling.top_p = float(rng.choice([1.0, 1.0, 0.9, 0.5]))
            sampling.min_p = float(rng.choice([0.0, 0.0, 0.05]))
        requests.append(
            Request(index=index, id=str(index), sampling=sampling, prompt_token_ids=list(prompt))
        )
    return requests


def _draw_ends(found: Stage, rng: np.random.Generator, prompt: tuple[int, ...]) -> SamplingParams:
    """Limits and stops; a greedy request meets many of these."""
    continuation = found.continuations[prompt]
    sampling = SamplingParams(
        max_tokens=int(rng.integers(1, LONGEST_OUTPUT + 1)),
        seed=int(rng.integers(1 << 30)),
        ignore_eos=bool(rng.random() < 0.5),
    )
    if rng.random() < 0.25:
        sampling.stop_token_ids = (continuation[int(rng.integers(LONGEST_OUTPUT))],)
    if rng.random() < 0.25:
        first = int(rng.integers(LONGEST_OUTPUT - 3))
        piece = found.tokenizer.decode(continuation[first : first + int(rng.integers(1, 4))])
        sampling.stop = (piece,) if piece else ()
    return sampling
