"""Reading a workload: JSON lines from a file, the zoo or another package.

Every line is checked before a run starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import EntryPoint
from pathlib import Path

from hydraspec import plugins
from hydraspec.config.choices import added_workload, packaged
from hydraspec.config.messages import refusal, show
from hydraspec.config.schema import (
    LogprobsMode,
    RunConfig,
    SamplingConfig,
    Verification,
    Weights,
    WorkloadConfig,
)
from hydraspec.config.structured import by_kind
from hydraspec.config.workloads import DRAWN, is_random
from hydraspec.types import Request, SamplingParams, WorkloadError
from hydraspec.workloads import drawn, published
from hydraspec.workloads import files as workload_files
from hydraspec.workloads.conversations import conversations_of_lines, num_turns_in_all
from hydraspec.workloads.lines import as_params, parse_line

MASK_64 = (1 << 64) - 1


@dataclass(slots=True, kw_only=True)
class Workload:
    """Requests in workload order, and where each came from ("file:line") for messages."""

    requests: list[Request]
    places: dict[str, str]  # request id -> "file:line"
    num_lines: int = 0  # lines read; a line with turns has several requests
    num_lines_in_all: int | None = None  # those beyond workload.limit too; None: not known
    warnings: list[str] = field(default_factory=list)

    def with_place(self, error: WorkloadError) -> WorkloadError:
        """An error about a request, beginning with the place where that request was written."""
        place = self.places.get(error.request_id or "")
        if place is None:
            return error
        return WorkloadError(f"{place}: {error}", request_id=error.request_id)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse prompt and stop token ids that the target does not have.

        Raises:
            WorkloadError: with file and line of the first one.
        """
        with_next = {request.after for request in self.requests}
        for request in self.requests:
            has_turns = request.after is not None or request.index in with_next
            key = f"turns[{request.turn - 1}]" if has_turns else "prompt_token_ids"
            given = (
                (key, request.prompt_token_ids or (), "tokenise the prompt with"),
                *((f"sampling.{k}", t, "give ids of") for k, t in token_ids_of(request.sampling)),
            )
            for name, tokens, to_do in given:
                if (token := max(tokens, default=0)) >= vocab_size:
                    raise WorkloadError(
                        f"{self.places[request.id]}: {name}: {token} is outside the target's "
                        f"vocabulary of {vocab_size} tokens (ids 0 to {vocab_size - 1}); {to_do} "
                        "the target's own tokenizer"
                    )


def token_ids_of(sampling: SamplingParams) -> list[tuple[str, list[int]]]:
    """Keys of sampling that hold token ids, with these."""
    return [
        ("stop_token_ids", list(sampling.stop_token_ids)),
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ("bad_words", [token for word in sampling.bad_words for token in word]),
    ]


def check_configured_ids(config: RunConfig, vocab_size: int) -> None:
    """Refuse token ids in the sampling keys that the target does not have.

    Raises:
        ConfigurationError: naming the first one.
    """
    for key, ids in token_ids_of(default_sampling(config.sampling, seed=0)):
        if (token := max(ids, default=0)) >= vocab_size:
            place = f"[{ids.index(token)}]" if key == "stop_token_ids" else " (token)"
            raise refusal(
                f"sampling.{key}{place}",
                token,
                "is outside the target's vocabulary",
                allowed=f"0 to {vocab_size - 1}",
                remedy="give ids of the target's own tokenizer",
            )


def read(config: RunConfig) -> Workload | None:
    """Read and check the lines of a workload. Returns None for a workload of random tokens, which
    needs the vocabulary's size first.

    The workload's warnings name, among others, sampling keys that every line overrides.

    Raises:
        WorkloadError: with file and line (exit status 3).
    """
    if is_random(config.workload):
        return None
    workload = Workload(requests=[], places={})
    makes_turns = config.workload.name == "multi_turn"
    limit = num_turns_in_all(config) if makes_turns else config.workload.limit
    found = _lines(config)
    left: int | None = 0
    for place, line in found.lines:
        if workload.num_lines == limit:
            left = found.num_left(line)
            break
        if line.strip():
            _add(workload, place, line, config, found.folder)
    workload.num_lines_in_all = None if left is None else workload.num_lines + left
    if not workload.requests:
        raise WorkloadError(f"{found.name}: there is no request in it; write a JSON object a line")
    workload.warnings = found.warnings + _overridden(config.sampling, workload.requests)
    workload.warnings += _set_thinking(config.workload, workload.requests)
    workload.warnings += _unread_mode(config.sampling, workload.requests)
    if makes_turns:
        workload.requests, workload.places = conversations_of_lines(
            workload.requests, workload.places, config
        )
    return workload


@dataclass(slots=True, frozen=True)
class _Lines:
    """A workload's name for messages, its lines with their places, warnings, and the folder of its
    file.

    Attributes:
        not_encoded: the entries that `lines` takes its lines from, if each is a line.
        has_end: whether the lines can be counted; a function may yield them for ever.
    """

    name: str
    lines: Iterator[tuple[str, bytes]]
    warnings: list[str] = field(default_factory=list)
    folder: Path | None = None
    not_encoded: Iterator[object] | None = None
    has_end: bool = True

    def num_left(self, line: bytes) -> int | None:
        """Lines with a request that are left, `line` included, which was taken already; None where
        they cannot be counted, or not be read."""
        if not self.has_end:
            return None
        if self.not_encoded is None:
            return sum(bool(each.strip()) for each in (line, *(other for _, other in self.lines)))
        try:
            return 1 + sum(1 for _ in self.not_encoded)
        except WorkloadError:
            return None


def _lines(config: RunConfig) -> _Lines:
    size = config.workload
    added, folder = added_workload(size.name), None
    if added is not None:
        name, lines = f"workload={added.name}", _lines_of(added, config)
    elif size.name == DRAWN:
        name, questions = f"workload={DRAWN}", drawn.lines(size, config.seed)
        lines = (json.dumps(line).encode() for line in questions)
    else:
        name, content = workload_files.of_workload(size)
        if size.name in published.FORMATS:
            found = published.records(name, content)
            made = published.FORMATS[size.name](size, found, workload_files.of_shots)
            encoded = ((place, json.dumps(line).encode()) for place, line in made)
            warnings = published.left_out(size, found)
            return _Lines(name, encoded, warnings, not_encoded=made)
        lines, folder = iter(content.split(b"\n")), workload_files.folder_of(size)
    places = ((f"{name}:{i}", line) for i, line in enumerate(lines, start=1))
    has_end = added is None and size.name != DRAWN
    return _Lines(name, places, folder=folder, has_end=has_end)


def _unread_mode(config: SamplingConfig, requests: Sequence[Request]) -> list[str]:
    """A warning if sampling.logprobs_mode is set and no request asks for log probabilities of its
    output."""
    mode = config.logprobs_mode
    if mode is LogprobsMode.raw or any(r.sampling.logprobs is not None for r in requests):
        return []
    return [f"sampling.logprobs_mode={mode.value} has no effect: no request has logprobs"]


def _set_thinking(config: WorkloadConfig, requests: Sequence[Request]) -> list[str]:
    """Set workload.thinking on requests with messages; returns a warning if it is set and no
    request has messages."""
    chats = [request for request in requests if request.messages is not None]
    for request in chats:
        request.thinking = config.thinking
    if config.thinking is None or chats:
        return []
    value = show(config.thinking)
    return [f"workload.thinking={value} has no effect: no line has messages or turns of text"]


def _lines_of(added: EntryPoint, config: RunConfig) -> Iterator[bytes]:
    """The lines of another package's workload, whose function gets the group's configuration and
    the seed, and yields JSON objects as in a workload file.
    """
    function = plugins.load(added)
    for line in function(config.workload, config.seed):
        try:
            yield json.dumps(line).encode()
        except (TypeError, ValueError) as error:
            raise plugins.broken(added, f"it yields no JSON object: {error}") from error


def depends_on_seed(config: RunConfig) -> bool:
    """Returns whether another `seed` changes any output: random prompts, random weights, synthetic
    acceptance, or a request that samples with the run's seed.

    Raises:
        WorkloadError: as `read`.
    """
    has_seed = Weights.random in (config.target.weights, config.method.weights)
    name = config.workload.name
    has_seed |= name == DRAWN or added_workload(name) is not None  # its function is given the seed
    if has_seed or config.method.verification is Verification.synthetic:
        return True
    workload = read(config)
    return workload is None or any(
        r.sampling.temperature > 0 and r.sampling.seed == request_seed(config.seed, r.index)
        for r in workload.requests
    )


def _overridden(config: SamplingConfig, requests: Sequence[Request]) -> list[str]:
    """Warnings of sampling keys that differ from the choice's values, and that every request
    overrides."""
    own, given = packaged("sampling", config.name), default_sampling(config, seed=0)
    values = asdict(config)
    return [
        f"sampling.{key}={show(values[key])} has no effect: every line of the workload has its own"
        for key, value in own.items()
        if hasattr(given, key)  # lines have it too
        and values[key] != value
        and all(getattr(r.sampling, key) != getattr(given, key) for r in requests)
    ]


def _add(
    workload: Workload, place: str, raw: bytes, config: RunConfig, folder: Path | None
) -> None:
    found = parse_line(
        raw,
        place=place,
        index=len(workload.requests),
        number=workload.num_lines,
        defaults=lambda i: default_sampling(config.sampling, seed=request_seed(config.seed, i)),
        folder=folder,
    )
    for request in found:
        if request.id in workload.places:
            raise WorkloadError(
                f"{place}: id: {request.id!r} is the id of {workload.places[request.id]} already; "
                "ids must differ (a line without one is called by its place, from 0)"
            )
        workload.places[request.id] = place
        request.scoring = published.SCORINGS.get(config.workload.name, "text")
    workload.requests += found
    workload.num_lines += 1


def default_sampling(config: SamplingConfig, *, seed: int) -> SamplingParams:
    """The sampling parameters of a line that gives none."""
    return SamplingParams(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        seed=seed,
        max_tokens=config.max_tokens,
        stop=tuple(config.stop),
        stop_token_ids=tuple(config.stop_token_ids),
        ignore_eos=config.ignore_eos,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        repetition_penalty=config.repetition_penalty,
        logit_bias=as_params("logit_bias", config.logit_bias),
        bad_words=as_params("bad_words", config.bad_words),
        min_tokens=config.min_tokens,
        n=config.n,
        logprobs=config.logprobs,
        prompt_logprobs=config.prompt_logprobs,
        structured=as_params("structured", by_kind(config.structured)),
    )


def fixed_length_sampling(config: RunConfig, index: int, num_tokens: int) -> SamplingParams:
    """Sampling as configured for request `index`, which decodes exactly `num_tokens`."""
    sampling = default_sampling(config.sampling, seed=request_seed(config.seed, index))
    no_stop: tuple[str, ...] = ()
    return replace(
        sampling, max_tokens=num_tokens, ignore_eos=True, stop=no_stop, stop_token_ids=()
    )


def request_seed(seed: int, index: int) -> int:
    """The seed of request `index` in a run with `seed`: splitmix64(splitmix64(seed) + index + 1)
    >> 1.

    The result has 63 bits, so that it fits a signed int64. Before the shift, different indices of
    one run get different 64-bit words.
    """
    return _splitmix64(_splitmix64(seed & MASK_64) + index + 1) >> 1


def _splitmix64(x: int) -> int:
    """The splitmix64 output for state `x` (Steele, Lea and Flood, 2014, "Fast splittable
    pseudorandom number generators").
    """
    x = (x + 0x9E3779B97F4A7C15) & MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
    return x ^ (x >> 31)
