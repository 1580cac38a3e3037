"""Log probabilities of sampled tokens and of the M most probable ones, as one tensor: that of the
token, then M ids (exact in float32, see parallel.vocabulary), then those of the M ids.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hydraspec_kernels.sampling.records import SamplingTensors
from hydraspec_kernels.sampling.rules import constrained, row_places
from hydraspec_kernels.sampling.truncation import target_probs
from torch import Tensor

from hydraspec.parallel.vocabulary import Vocabulary
from hydraspec.parameters import MAX_LOGPROBS
from hydraspec.types import Batch, RequestState, Verdict

WIDTH = 1 + 2 * MAX_LOGPROBS


@dataclass(slots=True, frozen=True)
class LogprobRule:
    """Which distribution log probabilities are of: the target's own (raw), or that after rules,
    temperature and truncation (processed), which is sampled from. At temperature 0 the processed
    one is that after rules, at temperature 1."""

    is_processed: bool
    vocabulary: Vocabulary

    def rows(self, logits: Tensor, batch: Batch, state: RequestState) -> Tensor:
        """Log probabilities [N, V] of the rows of logits [N, V], or this rank's columns of them; a
        new tensor of float32 or wider. `state` is that before the step."""
        whole = self.vocabulary.whole(logits)
        whole = whole.to(torch.promote_types(whole.dtype, torch.float32))
        if not self.is_processed:
            return whole.log_softmax(-1)
        if batch.flags.any_rules and state.rules is not None:
            whole = constrained(whole, batch, state, state.rules, batch.flags)
        slot = row_places(batch, whole.shape[0], state.num_computed.shape[0]).slot
        temperature = state.temperature.index_select(0, slot)
        is_greedy = temperature <= 0

        def unless_greedy(values: Tensor, off: float) -> Tensor:
            return values.index_select(0, slot).masked_fill(is_greedy, off)

        sampling = SamplingTensors(
            temperature=temperature.masked_fill(is_greedy, 1.0),
            top_k=unless_greedy(state.top_k, 0),
            top_p=unless_greedy(state.top_p, 1.0),
            min_p=unless_greedy(state.min_p, 0.0),
        )
        return target_probs(whole, sampling, replace(batch.flags, any_greedy=False)).log()


def keep_logprobs(rows: Tensor, batch: Batch, state: RequestState, verdict: Verdict) -> None:
    """Write to `state.logprobs` those of a step's emitted tokens, from log probabilities [N, V]."""
    assert state.logprobs is not None
    found = scored(rows.index_select(0, batch.verify_rows.flatten()), verdict.tokens.flatten())
    kept = state.logprobs[:, : verdict.tokens.shape[1]]
    kept.index_copy_(0, batch.slots, found.view(*verdict.tokens.shape, WIDTH))


def scored(rows: Tensor, token_ids: Tensor) -> Tensor:
    """[N, WIDTH] float32 of the tokens [N] (any number below 0: no token) under log probabilities
    [N, V]."""
    count = min(MAX_LOGPROBS, rows.shape[1])
    own = rows.gather(1, token_ids.clamp(min=0).unsqueeze(1))
    top = rows.topk(count)
    missing = rows.new_full((rows.shape[0], MAX_LOGPROBS - count), -torch.inf)
    parts = (own, top.indices.to(own.dtype), missing, top.values, missing)
    return torch.cat(parts, 1).to(torch.float32)
