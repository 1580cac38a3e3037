"""Log probabilities of prompts on the device, and the records of tokens on the host."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from hydraspec.engine.run.results import StepResult
from hydraspec.engine.schedule.sequence import Scheduled
from hydraspec.models.base import TargetModel
from hydraspec.sampling.logprobs import scored
from hydraspec.types import ScoredRows, TokenLogprob

ROWS_AT_ONCE = 256  # whose logits are held together


def prompt_logprobs(target: TargetModel, hidden: Tensor, wanted: ScoredRows) -> Tensor:
    """[R, 1+2M], as in sampling.logprobs, of prompts' tokens from hidden states [T, D] of all rows
    of a step."""
    numbers = torch.from_numpy(np.stack([wanted.rows, wanted.token_ids]))
    if hidden.is_cuda:
        numbers = numbers.pin_memory()
    places = numbers.to(hidden.device, non_blocking=True)
    found = []
    for rows, tokens in (part.unbind(0) for part in places.split(ROWS_AT_ONCE, dim=1)):
        logits = target.vocabulary.whole(target.compute_logits(hidden.index_select(0, rows)))
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        found.append(scored(wide.log_softmax(-1), tokens))
    return torch.cat(found)


def note_logprobs(item: Scheduled, result: StepResult, place: int, kept: Seq[int]) -> None:
    """Keep those of the tokens of a request, which has this place in the step's plan."""
    count = item.sequence.request.sampling.logprobs
    if count is not None and result.logprobs is not None:
        rows = result.logprobs[place]
        item.sequence.logprobs += [_record(t, rows[i], count) for i, t in enumerate(kept)]


def note_prompt_logprobs(scheduled: Seq[Scheduled], result: StepResult) -> None:
    """Keep those of prompts' tokens, in the order of the plan's ScoredRows."""
    first, found = 0, result.prompt_logprobs
    if found is None:
        return
    for item in scheduled:
        sequence, positions = item.sequence, item.scored
        numbers = found[first : first + len(positions)]
        first += len(positions)
        count = sequence.request.sampling.prompt_logprobs or 0
        if positions and sequence.finish_reason is None:
            # A preempted request reads its prompt again.
            sequence.prompt_logprobs[positions.start - 1 :] = [
                _record(sequence.token_ids[at], row, count)
                for at, row in zip(positions, numbers, strict=True)
            ]


def _record(token_id: int, numbers: np.ndarray, count: int) -> TokenLogprob:
    """The record of a token from its numbers [1+2M], with `count` alternatives at most."""
    most = len(numbers) // 2
    ids, values = numbers[1 : 1 + count], numbers[1 + most :][:count]
    possible = np.isfinite(values)
    top = zip(ids[possible].astype(int).tolist(), values[possible].tolist(), strict=True)
    return TokenLogprob(token_id, float(numbers[0]), list(top))
