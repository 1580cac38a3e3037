"""Penalties, biases and bans of requests with transformers' own logits processors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from hydraspec.engine.finish import OfferedRequest
from hydraspec.sampling.rules import early_ends
from hydraspec.types import SamplingParams


class RuleProcessor(LogitsProcessor):  # type: ignore[misc]
    """Logits processor that applies each row's own processors to its tokens without padding."""

    def __init__(
        self,
        sequences: Sequence[OfferedRequest],
        num_padding: Sequence[int],
        eos_token_ids: Iterable[int],
    ) -> None:
        self._num_padding = list(num_padding)
        ends = tuple(eos_token_ids)
        self._processors = [
            processors(sequence.request.sampling, sequence.num_prompt, ends)
            for sequence in sequences
        ]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Changed scores [B, V] of the next tokens after input_ids [B, any]."""
        rows = zip(self._num_padding, self._processors, strict=True)
        return torch.cat(
            [
                processed(input_ids[i : i + 1, padding:], scores[i : i + 1])
                for i, (padding, processed) in enumerate(rows)
            ]
        )


class OutputPenalties(LogitsProcessor):  # type: ignore[misc]
    """Frequency and presence penalties on tokens of the output, which transformers lacks, by
    vLLM's definition."""

    def __init__(self, frequency: float, presence: float, num_prompt: int) -> None:
        self._frequency, self._presence, self._num_prompt = frequency, presence, num_prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Changed scores [1, V] of the next token after input_ids [1, any]."""
        output = input_ids[:, self._num_prompt :]
        counts = torch.zeros_like(scores).scatter_add_(
            1, output, torch.ones_like(output, dtype=scores.dtype)
        )
        return scores - self._frequency * counts - self._presence * (counts > 0)


def processors(
    sampling: SamplingParams, num_prompt: int, eos_token_ids: Iterable[int]
) -> LogitsProcessorList:
    """The processors of one request, in transformers' order, then the penalties it lacks."""
    found: list[LogitsProcessor] = []
    if sampling.logit_bias:
        found.append(SequenceBiasLogitsProcessor({(t,): bias for t, bias in sampling.logit_bias}))
    if sampling.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.bad_words:
        found.append(NoBadWordsLogitsProcessor([list(word) for word in sampling.bad_words]))
    if ends := early_ends(sampling, eos_token_ids):
        found.append(MinNewTokensLengthLogitsProcessor(num_prompt, sampling.min_tokens, ends))
    if sampling.frequency_penalty or sampling.presence_penalty:
        frequency, presence = sampling.frequency_penalty, sampling.presence_penalty
        found.append(OutputPenalties(frequency, presence, num_prompt))
    return LogitsProcessorList(found)
