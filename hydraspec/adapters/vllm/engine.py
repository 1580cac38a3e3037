"""vLLM as an engine, to measure native runs against, and to run on several machines.

It runs in this process, step by step, so that times are comparable. Acceptance is what vLLM counts
(steps.py). Samples are drawn from vLLM's random streams: seeds are passed on, tokens differ.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import torch

from hydraspec.adapters.vllm import images
from hydraspec.adapters.vllm.loading import VllmParts, load_parts
from hydraspec.adapters.vllm.steps import Part, StepStats, drafts_of, share_out
from hydraspec.config.schema import KVDtype, RunConfig
from hydraspec.engine.base import Engine, EngineInfo
from hydraspec.engine.finish import FinishCheck, OfferedRequest
from hydraspec.engine.prompts import LOGPROBS, refuse_sampling, tokenize
from hydraspec.engine.rounded_kv import KV_IS_ROUNDED, with_fp8_cache
from hydraspec.engine.schedule.admission import Pending
from hydraspec.engine.turns import History
from hydraspec.types import (
    IMAGE,
    PHASES,
    Completion,
    ConfigurationError,
    Image,
    Picture,
    PrefixCaching,
    Request,
    RequestStep,
    SamplingParams,
    Span,
    StepRecord,
)

log = logging.getLogger(__name__)

ONE_ENGINE = (
    "engine=vllm takes the device for one engine\n  allowed: baseline=false\n"
    "  to do: compare with a sweep: -m method=none,<method>"
)
NOT_RECORDED = (
    "vLLM ran without step records ({why}): no acceptance, no queue times, no times to "
    "first token and per token"
)


class VllmEngine(Engine):
    """Engine that runs vLLM's loop: method=none, or what its speculative configuration offers."""

    def __init__(self, config: RunConfig, parts: VllmParts | None = None) -> None:
        """Starts vLLM as `config` says, or wraps a running one."""
        self.parts = parts or load_parts(config)
        self.info = _info(self.parts)
        decode = self.parts.tokenizer.decode if self.parts.tokenizer else None
        self._finish = FinishCheck(self.parts.eos_token_ids, self.info.max_model_len, decode)
        self._num_steps = 0
        self._num_runs = 0
        self._pictures: dict[str, Picture] = {}  # of the newest run, by the digests of their spans

    def tokenize(self, requests: Seq[Request]) -> None:
        parts = self.parts
        checkpoint = parts.config.target.checkpoint
        tokenize(requests, parts.tokenizer, self.info, checkpoint, parts.pictures)
        why = dict.fromkeys(LOGPROBS, "engine=vllm keeps none")
        refuse_sampling(requests, {"bad_words": "engine=vllm takes words as text alone"} | why)

    def run(
        self, requests: Seq[Request], *, concurrency: int | None
    ) -> Iterator[StepRecord | Completion]:
        pending, history = Pending(requests, concurrency), History(requests)
        offered: dict[str, OfferedRequest] = {}
        self._pictures = images.by_content(requests)
        self._num_runs += 1
        if self.parts.config.engine.prefix_caching:
            self._empty_prefix_cache()
        if self.parts.pictures is not None:  # as in the native engine: each run encodes its images
            self.parts.engine.reset_encoder_cache()
        try:
            while (joining := pending.joining(len(offered))) is not None:
                sequences = [
                    history.offer(OfferedRequest, request, pending.offered_at(request))
                    for request in joining
                ]
                for event in self._events(sequences, offered):
                    if isinstance(event, Completion):
                        history.add(event)
                        pending.ended(event.index)
                    yield event
        finally:
            if offered:
                self.parts.engine.abort_request(list(offered))

    def _empty_prefix_cache(self) -> None:
        """Empties the prefix cache: every run begins without hits, as in the native engine."""
        if self.parts.engine.reset_prefix_cache() is False:
            log.warning("vLLM kept its prefix cache: requests of an earlier run still hold blocks")

    def _events(
        self, joining: Seq[OfferedRequest], offered: dict[str, OfferedRequest]
    ) -> Iterator[StepRecord | Completion]:
        """Offers the requests that join, then runs a step; yields records and completions."""
        for sequence in joining:
            name = f"{self._num_runs}-{sequence.request.index}"
            self._offer(name, sequence)
            if sequence.finish_reason:
                yield self._finish.completion(sequence)
            else:
                offered[name] = sequence
        if offered:
            yield from self._step(offered)

    def _offer(self, name: str, sequence: OfferedRequest) -> None:
        """Hands a request over to vLLM; if vLLM refuses, the reason becomes the request's error."""
        sequence.fail_if_too_long(self.info.max_model_len)
        if sequence.finish_reason:
            return
        sampling, streamed = sequence.request.sampling, self.parts.stats is not None
        request, ids = sequence.request, sequence.token_ids[: sequence.num_prompt]
        try:
            prompt = images.prompt_of(request, ids, self.parts.pictures, self._pictures)
            params = sampling_params(sampling, self.parts.eos_token_ids, streamed=streamed)
            self.parts.engine.add_request(name, prompt, params)
        except ValueError as error:
            sequence.fail(f"vLLM refuses the request: {error}")

    def _step(self, offered: dict[str, OfferedRequest]) -> Iterator[StepRecord | Completion]:
        """Runs a step; yields its record, if records are kept, and the completions it brought."""
        stats = self.parts.stats
        if stats is not None:
            stats.clear()
        started = time.perf_counter()
        outputs = self.parts.engine.step()
        now = time.perf_counter()
        news = [
            _News(offered[output.request_id], output)
            for output in outputs
            if output.request_id in offered
        ]
        ended = [new for new in news if self._keep(new, now, stats)]
        if stats is not None:
            yield self._record(news, stats, (now - started) * 1e3)
        early = [new.name for new in ended if not new.finished]  # a stop string, found here
        if early:
            self.parts.engine.abort_request(early)
        for new in ended:
            del offered[new.name]
            yield self._finish.completion(new.sequence)

    def _keep(self, new: _News, now: float, stats: StepStats | None) -> bool:
        """Adds a step's new tokens to their request; returns whether the request ended."""
        sequence = new.sequence
        new.kept = self._finish.append(sequence, new.emitted)
        if new.emitted:
            if stats is not None:
                if new.slot_at is not None:
                    sequence.note_slot(new.slot_at)
                sequence.note_tokens(now)
            sequence.last_token_at = now
        if new.reads_other_tokens:
            sequence.fail(images.OTHER_TOKENS)
        if new.finished and sequence.finish_reason is None:
            sequence.fail(f"vLLM ended the request early, with finish_reason {new.finish_reason!r}")
        return sequence.finish_reason is not None

    def _record(self, news: Seq[_News], stats: StepStats, total_ms: float) -> StepRecord:
        with_tokens = [new for new in news if new.emitted]
        decoding = [new for new in with_tokens if not new.is_first]
        for new in decoding:
            new.part = Part(
                num_emitted=len(new.emitted), finished=new.sequence.finish_reason is not None
            )
        share_out([new.part for new in decoding if new.part], stats)
        record = StepRecord(
            step=self._num_steps,
            phase_ms=dict.fromkeys(PHASES),
            total_ms=total_ms,
            requests=[new.as_step() for new in with_tokens],
            num_preempted=stats.num_preempted,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            kv_usage=stats.kv_usage,
        )
        self._num_steps += 1
        return record

    def baseline(self) -> Engine:
        raise ConfigurationError(ONE_ENGINE)

    def next_token_logits(
        self,
        token_ids: Seq[int],
        spans: tuple[Span, ...] = (),
        images: tuple[Image, ...] = (),
    ) -> None:
        """Returns None: vLLM hands out tokens, no logits over the whole vocabulary."""
        return None

    def close(self) -> None:
        """Stops vLLM, frees the device, and restores the environment."""
        engine = self.parts.engine
        self.parts.engine = None
        if engine is not None:
            (getattr(engine, "engine_core", None) or engine).shutdown()
        del engine
        self.parts.environment.restore()
        gc.collect()
        torch.cuda.empty_cache()


class _News:
    """New tokens of one request in a step."""

    def __init__(self, sequence: OfferedRequest, output: Any) -> None:
        (completion,) = output.outputs
        self.name: str = output.request_id
        self.sequence = sequence
        self.emitted = [int(token) for token in completion.token_ids]
        self.finished: bool = output.finished
        sequence.num_cached = output.num_cached_tokens or 0
        self.finish_reason: str | None = completion.finish_reason
        # On Linux vLLM's clock, time.monotonic, is time.perf_counter.
        self.slot_at: float | None = (
            getattr(getattr(output, "metrics", None), "scheduled_ts", None) or None
        )
        self.num_tokens_before = sequence.num_tokens
        prompt = getattr(output, "prompt_token_ids", None)
        own = sequence.token_ids[: sequence.num_prompt]
        self.reads_other_tokens = bool(sequence.request.images) and prompt not in (None, own)
        self.kept: list[int] = []
        self.part: Part | None = None

    @property
    def is_first(self) -> bool:
        return self.num_tokens_before == self.sequence.num_prompt

    def as_step(self) -> RequestStep:
        """The step's record of this request. Prompts count as read in the step that brings the
        first token: vLLM does not say how it chunked them."""
        part, cached = self.part, self.sequence.num_cached
        return RequestStep(
            index=self.sequence.request.index,
            num_rows=self.num_tokens_before - cached if part is None else 1 + part.num_drafted,
            is_prefill=part is None,
            num_computed_tokens=cached if part is None else self.num_tokens_before - 1,
            draft_token_ids=[] if part is None else drafts_of(part, self.emitted),
            num_accepted=0 if part is None else part.num_accepted,
            output_token_ids=self.kept,
        )


def sampling_params(sampling: SamplingParams, eos_token_ids: Seq[int], *, streamed: bool) -> Any:
    """vLLM's sampling parameters. End-of-sequence ids are passed as stop ids, so that every engine
    ends at the same tokens; stop strings are looked for here, since vLLM has no tokenizer."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind

    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_token_ids))
    return VllmSamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sorted(ends),
        ignore_eos=True,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        min_tokens=min(sampling.min_tokens, sampling.max_tokens),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY,
    )


def _info(parts: VllmParts) -> EngineInfo:
    config, warnings = parts.config, []
    if parts.stats is None:
        why = "engine.vllm.record_steps=false" if config.parallelism.data == 1 else "data parallel"
        warnings.append(NOT_RECORDED.format(why=why))
    warnings += parts.warnings
    has_fp8_cache = config.engine.kv_cache.dtype is KVDtype.fp8
    if has_fp8_cache:
        warnings.append(KV_IS_ROUNDED.format(config.target.dtype.value))
    drafts = config.method.name != "none"
    return EngineInfo(
        engine="vllm",
        target=config.target.name,
        method=config.method.name,
        num_speculative_tokens=config.method.most_drafts,
        device="cuda",
        dtype=config.target.dtype.value,
        vocab_size=parts.vocab_size,
        max_model_len=parts.max_model_len,
        greedy_is_exact=False,
        cudagraph=_cudagraph(config.cudagraph.name, parts.cudagraph_mode, drafts),
        prefix_caching=_prefix_caching(parts),
        memory_bytes=parts.memory_bytes,
        encoded_kinds=() if parts.pictures is None else (IMAGE,),
        quantization=with_fp8_cache(parts.quantization) if has_fp8_cache else parts.quantization,
        draft_spec={"drafter": config.method.checkpoint, "read_by": "vllm"} if drafts else None,
        warnings=warnings,
    )


def _prefix_caching(parts: VllmParts) -> PrefixCaching | None:
    """Facts of the prefix cache; None if it is off. Hits are multiples of the block size; where a
    hybrid cache aligns them further, not all tokens that count as eligible can be taken."""
    if not parts.config.engine.prefix_caching:
        return None
    return PrefixCaching(
        block_size=parts.engine.vllm_config.cache_config.block_size,
        has_draft_kv=parts.config.method.name not in ("none", "gemma4_mtp"),
    )


def _cudagraph(requested: str, found: str, drafts: bool) -> dict[str, str | None]:
    """The graph mode requested, and the mode that vLLM resolved; vLLM does not say how its drafter
    is captured (None)."""
    reason = None
    if found != requested:
        reason = "vLLM resolved it so for its attention backend"
        log.info("cudagraph=%s became %s: %s", requested, found, reason)
    draft = None if drafts else "none"
    return {"requested": requested, "target": found, "draft": draft, "reason": reason}
