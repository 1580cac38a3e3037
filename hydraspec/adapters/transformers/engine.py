"""transformers' generate() as an engine: the reference that a native run is compared with.

Plain decoding runs in static, left-padded batches, assisted decoding one request at a time. Batches
run to their end before their records are yielded. The only cost added to transformers is one read
of the newest tokens per step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch
from transformers import LogitsProcessor

from hydraspec.adapters.transformers.images import image_inputs
from hydraspec.adapters.transformers.loading import TransformersParts, load_parts
from hydraspec.adapters.transformers.rules import RuleProcessor
from hydraspec.adapters.transformers.watch import AssistedWatch, StepWatch, StreamSampler
from hydraspec.config.schema import MethodConfig, RunConfig
from hydraspec.engine.base import Engine, EngineInfo
from hydraspec.engine.finish import FinishCheck, OfferedRequest
from hydraspec.engine.machine import model_length
from hydraspec.engine.notes import log_once
from hydraspec.engine.prompts import LOGPROBS, refuse_sampling, tokenize
from hydraspec.engine.schedule.admission import Pending
from hydraspec.engine.turns import History
from hydraspec.sampling.rules import has_rules
from hydraspec.types import IMAGE, Completion, Image, Request, Span, StepRecord

ONE_AT_A_TIME = (
    "engine=transformers decodes method=gemma4_mtp one request at a time, and so its baseline: "
    "workload.concurrency and engine.max_num_seqs have no effect (assisted generation takes "
    "batches of 1 only)"
)
ROUNDS_OTHERWISE = (
    "engine=transformers reads quantised weights its own way, and may round the rows that they "
    "multiply otherwise than the checkpoint says, or not at all: outputs may differ from native "
    "ones"
)


class TransformersEngine(Engine):
    """Engine that runs generate() with an observer: method=none, or gemma4_mtp as assisted
    generation with a constant K."""

    def __init__(
        self,
        config: RunConfig,
        parts: TransformersParts | None = None,
        *,
        one_at_a_time: bool = False,
    ) -> None:
        """Loads what `config` names, or wraps `parts` that are loaded already (for `baseline`)."""
        self.parts = parts or load_parts(config)
        self.info = _info(self.parts)
        self._one_at_a_time = one_at_a_time or self.parts.assistant is not None
        decode = self.parts.tokenizer.decode if self.parts.tokenizer else None
        self._finish = FinishCheck(self.parts.eos_token_ids, self.info.max_model_len, decode)

    def tokenize(self, requests: Seq[Request]) -> None:
        parts = self.parts
        checkpoint = parts.config.target.checkpoint
        tokenize(requests, parts.tokenizer, self.info, checkpoint, parts.pictures)
        refuse_sampling(requests, dict.fromkeys(LOGPROBS, "engine=transformers keeps none"))

    def run(
        self, requests: Seq[Request], *, concurrency: int | None
    ) -> Iterator[StepRecord | Completion]:
        pending = Pending(requests, 1 if self._one_at_a_time else concurrency)
        history = History(requests)
        num_steps = 0
        while joining := pending.joining(0):
            offered = [
                history.offer(OfferedRequest, request, pending.offered_at(request))
                for request in joining
            ]
            for event in self._events(offered, num_steps):
                if isinstance(event, Completion):
                    history.add(event)
                    pending.ended(event.index)
                else:
                    num_steps = event.step + 1
                yield event

    def _events(
        self, offered: Seq[OfferedRequest], num_steps: int
    ) -> Iterator[StepRecord | Completion]:
        """Decodes the offered requests in batches; yields step records, numbered from `num_steps`,
        and completions.
        """
        for sequence in offered:
            sequence.fail_if_too_long(self.info.max_model_len)
            if sequence.finish_reason:
                yield self._finish.completion(sequence)
        waiting = [sequence for sequence in offered if not sequence.finish_reason]
        size = 1 if self._one_at_a_time else self.parts.config.engine.max_num_seqs
        for at in range(0, len(waiting), size):
            batch = waiting[at : at + size]
            records = self._decode(batch, num_steps)
            num_steps += len(records)
            yield from self._in_order(batch, records)

    def _in_order(
        self, batch: Seq[OfferedRequest], records: Seq[StepRecord]
    ) -> Iterator[StepRecord | Completion]:
        """Yields each record, then the completions of the requests whose last record it is."""
        last = {step.index: record.step for record in records for step in record.requests}
        for record in records:
            yield record
            for sequence in batch:
                if last[sequence.request.index] == record.step:
                    yield self._finish.completion(sequence)

    @torch.inference_mode()
    def _decode(self, batch: Seq[OfferedRequest], first_step: int) -> list[StepRecord]:
        """Runs a batch to the end of all its requests; returns the step records."""
        for sequence in batch:
            sequence.note_slot(time.perf_counter())
        ids, mask, num_padding = _left_padded(batch, self.parts.device)
        assistant = self.parts.assistant
        if assistant is not None:
            watch: StepWatch = AssistedWatch(batch[0], self._finish, first_step)
            max_length = self.info.max_model_len
        else:
            watch = StepWatch(batch, self._finish, first_step)
            max_length = ids.shape[1] + max(self._num_left(sequence) for sequence in batch)
        sampled = any(sequence.request.sampling.temperature > 0 for sequence in batch)
        requests = [sequence.request for sequence in batch]
        processors: list[LogitsProcessor] = []
        if any(map(has_rules, (sequence.request.sampling for sequence in batch))):
            processors.append(RuleProcessor(batch, num_padding, self.parts.eos_token_ids))
        if sampled:
            processors.append(StreamSampler(batch, num_padding, self.parts.device))
        self.parts.model.generate(
            ids,
            **self._image_inputs(requests, num_padding, ids.shape[1]),
            attention_mask=mask,
            assistant_model=assistant,
            max_length=max_length,
            do_sample=False,
            stopping_criteria=[watch],
            logits_processor=processors,
        )
        assert all(sequence.finish_reason for sequence in batch), "generate() stopped early"
        return watch.records

    def _image_inputs(
        self, requests: Seq[Request], num_padding: Seq[int], num_tokens: int
    ) -> dict[str, torch.Tensor]:
        """Arguments for the images of left-padded prompts; none for a model without an encoder."""
        if self.parts.pictures is None:
            return {}
        prompts = [
            (first, request.spans, request.images)
            for first, request in zip(num_padding, requests, strict=True)
        ]
        return image_inputs(prompts, num_tokens, self.parts.pictures, self.parts.device)

    def _num_left(self, sequence: OfferedRequest) -> int:
        room = self.info.max_model_len - sequence.num_tokens
        return min(sequence.request.sampling.max_tokens, room)

    def baseline(self) -> TransformersEngine:
        plain = MethodConfig(name="none", num_speculative_tokens=0)
        config = replace(self.parts.config, method=plain)
        parts = replace(self.parts, config=config, assistant=None)
        return TransformersEngine(config, parts, one_at_a_time=self._one_at_a_time)

    @torch.inference_mode()
    def next_token_logits(
        self,
        token_ids: Seq[int],
        spans: tuple[Span, ...] = (),
        images: tuple[Image, ...] = (),
    ) -> np.ndarray:
        parts, inputs = self.parts, dict[str, torch.Tensor]()
        if parts.pictures is not None:
            prompt = (0, spans, images)
            inputs = image_inputs([prompt], len(token_ids), parts.pictures, parts.device)
        ids = torch.tensor([list(token_ids)], device=parts.device)
        outputs = parts.model(ids, **inputs, use_cache=False)
        logits: torch.Tensor = outputs.logits[0, -1].double().cpu()
        logits[list(self.parts.suppress_token_ids)] = -torch.inf
        return logits.numpy()


def _left_padded(
    batch: Seq[OfferedRequest], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Token ids and attention mask [B, longest], and each row's number of padding tokens."""
    longest = max(sequence.num_tokens for sequence in batch)
    padding = [longest - sequence.num_tokens for sequence in batch]
    rows = list(zip(padding, batch, strict=True))
    ids = torch.tensor([[0] * count + sequence.token_ids for count, sequence in rows])
    mask = torch.tensor([[0] * count + [1] * (longest - count) for count in padding])
    return ids.to(device), mask.to(device), padding


def _info(parts: TransformersParts) -> EngineInfo:
    config, warnings = parts.config, []
    requested = config.cudagraph.name
    reason = None
    if requested != "none":
        reason = "engine=transformers runs its steps eagerly"
        log_once(f"cudagraph={requested} is not used: {reason}")
    if parts.quantization is not None:
        warnings.append(ROUNDS_OTHERWISE)
    spec: dict[str, object] | None = None
    if parts.assistant is not None:
        if config.workload.concurrency != 1:
            warnings.append(ONE_AT_A_TIME)
        spec = {
            "drafter": type(parts.assistant).__name__,
            "num_assistant_tokens": config.method.most_drafts,
            "schedule": "constant",
            "confidence_threshold": 0.0,
        }
    memory = {"weights": parts.model.get_memory_footprint()}
    if parts.assistant is not None:
        memory["draft_weights"] = parts.assistant.get_memory_footprint()
    return EngineInfo(
        engine="transformers",
        target=config.target.name,
        method=config.method.name,
        num_speculative_tokens=config.method.most_drafts,
        device=str(parts.device),
        dtype=config.target.dtype.value,
        vocab_size=parts.vocab_size,
        max_model_len=model_length(config, parts.max_positions),
        greedy_is_exact=False,
        cudagraph={"requested": requested, "target": "none", "draft": "none", "reason": reason},
        memory_bytes=memory,
        draft_spec=spec,
        quantization=parts.quantization,
        encoded_kinds=() if parts.pictures is None else (IMAGE,),
        eos_token_ids=list(parts.eos_token_ids),
        warnings=warnings,
    )
