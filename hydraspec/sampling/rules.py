"""Rules of requests on their logits, on the host: which ones a request has, and their place in
persistent tensors by slot, which steps and graphs read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from hydraspec_kernels.sampling.records import EVERYTHING
from hydraspec_kernels.sampling.rules import constrained
from torch import Tensor

from hydraspec.parameters import MAX_BAD_WORD_LENGTH, MAX_BAD_WORDS, MAX_BIASES, MAX_ENDS
from hydraspec.types import RequestState, SamplingParams, SlotRules, TokenMasks

MAX_DRAFT_BANS = 256  # that a drafter knows of; the verifier knows all
BANNING_BIAS = -100.0  # OpenAI's API calls it a ban
ALWAYS = 1 << 40  # more tokens than any text has


def has_penalties(sampling: SamplingParams) -> bool:
    """Returns whether logits depend on how often tokens have come."""
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
    )


def has_biases(sampling: SamplingParams) -> bool:
    """Returns whether logits of some tokens are raised, lowered or banned."""
    return bool(sampling.logit_bias or sampling.bad_words or sampling.min_tokens)


def early_ends(sampling: SamplingParams, eos_token_ids: Iterable[int]) -> list[int]:
    """Tokens that are banned while an output has fewer than min_tokens tokens."""
    if not sampling.min_tokens:
        return []
    return sorted({*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)})


def always_banned(sampling: SamplingParams) -> list[int]:
    """Tokens that are banned whatever comes before them: bad words of one token, and biases that
    count as bans, though they leave a token some little probability."""
    words = [word[0] for word in sampling.bad_words if len(word) == 1]
    return words + [token for token, bias in sampling.logit_bias if bias <= BANNING_BIAS]


def has_mask(sampling: SamplingParams) -> bool:
    """Returns whether a grammar says at each step which tokens are allowed."""
    return sampling.structured is not None


def has_rules(sampling: SamplingParams) -> bool:
    """Returns whether logits change before temperature and truncation."""
    return has_penalties(sampling) or has_biases(sampling) or has_mask(sampling)


def new_slot_rules(
    num_slots: int, num_speculative_tokens: int, vocab_size: int, device: torch.device
) -> SlotRules:
    """Rules of `num_slots` slots that change nothing."""
    places = num_speculative_tokens + 1, num_words(vocab_size)

    def filled(*shape: int, value: float = 0, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full((num_slots, *shape), value, dtype=dtype, device=device)

    return SlotRules(
        num_prompt=filled(),
        presence=filled(dtype=torch.float32),
        frequency=filled(dtype=torch.float32),
        repetition=filled(value=1, dtype=torch.float32),
        bias_ids=filled(MAX_BIASES),
        biases=filled(MAX_BIASES, dtype=torch.float32),
        num_least=filled(),
        end_ids=filled(MAX_ENDS, value=-1),
        bad_words=filled(MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH, value=-1),
        ban_ids=filled(MAX_DRAFT_BANS),
        ban_until=filled(MAX_DRAFT_BANS),
        masks=filled(*places, value=-1, dtype=torch.int32),
    )


@dataclass(slots=True)
class RuleWriter:
    """Writes the rules of requests to their slots, and takes back those of earlier owners."""

    rules: SlotRules
    eos_token_ids: tuple[int, ...]
    _with_rules: set[int] = field(default_factory=set)  # slots whose rules change something

    def write(self, slot: int, sampling: SamplingParams, num_prompt: int) -> None:
        """Give `slot` the rules of a request with so many prompt tokens. The host does not wait."""
        has_any = has_rules(sampling)
        if not has_any and slot not in self._with_rules:
            return
        (self._with_rules.add if has_any else self._with_rules.discard)(slot)
        rules = self.rules
        rules.num_prompt[slot].fill_(num_prompt)
        rules.presence[slot].fill_(sampling.presence_penalty)
        rules.frequency[slot].fill_(sampling.frequency_penalty)
        rules.repetition[slot].fill_(sampling.repetition_penalty)
        rules.num_least[slot].fill_(num_prompt + sampling.min_tokens)
        ids = [token for token, _ in sampling.logit_bias]
        biases = [bias for _, bias in sampling.logit_bias]
        _copy(rules.bias_ids[slot], _padded(ids, MAX_BIASES, 0))
        _copy(rules.biases[slot], _padded(biases, MAX_BIASES, 0.0))
        ends = early_ends(sampling, self.eos_token_ids)
        _copy(rules.end_ids[slot], _padded(ends, MAX_ENDS, -1))
        _copy(rules.bad_words[slot], _words(sampling.bad_words))
        bans = {token: ALWAYS for token in always_banned(sampling)}
        bans = dict.fromkeys(ends, num_prompt + sampling.min_tokens) | bans
        _copy(rules.ban_ids[slot], _padded([*bans][:MAX_DRAFT_BANS], MAX_DRAFT_BANS, 0))
        _copy(rules.ban_until[slot], _padded([*bans.values()][:MAX_DRAFT_BANS], MAX_DRAFT_BANS, 0))
        rules.masks[slot].fill_(-1)


def write_masks(state: RequestState, found: TokenMasks) -> None:
    """Write the masks of a step, and in place of the drafter's drafts those that grammars decide:
    one copy to the device, for which the host does not wait."""
    assert state.rules is not None
    masks, probs, (num_rows, width) = state.rules.masks, state.draft_probs, found.words.shape
    slots, columns, places, tokens = found.decided
    numbers = [found.rows, slots * state.token_ids.shape[1] + columns, tokens]
    numbers += [] if probs is None else [slots * probs.shape[1] + places]
    parts = [*(each.view(np.int32) for each in numbers), found.words.ravel()]
    sent = torch.from_numpy(np.concatenate(parts))
    if masks.is_cuda:
        sent = sent.pin_memory().to(masks.device, non_blocking=True)
    *sections, words = sent.split([len(part) for part in parts])
    rows, text, drafts, *certain = (each.view(torch.int64) for each in sections)
    masks.view(-1, width).index_copy_(0, rows, words.view(num_rows, width))
    if len(tokens):
        state.token_ids.view(-1).index_copy_(0, text, drafts)
    if len(tokens) and probs is not None:
        _make_certain(probs, state.draft_vocab_map, certain[0], drafts)


def _make_certain(probs: Tensor, vocab_map: Tensor | None, places: Tensor, tokens: Tensor) -> None:
    """Make the distributions [S, K, V'] at these places, slot * K + place, certain of their tokens:
    without mass, so that nothing is accepted, where the drafter's vocabulary lacks the token."""
    width = probs.shape[-1]
    ids = torch.arange(width, device=probs.device) if vocab_map is None else vocab_map
    rows = (ids == tokens.unsqueeze(1)).to(probs.dtype)
    probs.view(-1, width).index_copy_(0, places, rows)


def num_words(vocab_size: int) -> int:
    """Words of 32 bits that have a bit for each token."""
    return -(-vocab_size // 32)


@dataclass(slots=True, kw_only=True)
class _OneRow:
    """A step of one request with one row of logits and no drafts."""

    slots: Tensor
    seq_lens: Tensor
    num_drafts: Tensor
    samples: Tensor
    verify_rows: Tensor
    draft_tokens: Tensor
    token_ids: Tensor
    num_computed: Tensor


def constrained_row(
    logits: np.ndarray,
    token_ids: Sequence[int],
    num_prompt: int,
    sampling: SamplingParams,
    eos_token_ids: Iterable[int],
) -> np.ndarray:
    """Logits [V] after token_ids, of which the first num_prompt are the prompt, under a request's
    rules, but its grammar."""
    # The last slot belongs to no request.
    rules = new_slot_rules(2, 0, len(logits), torch.device("cpu"))
    RuleWriter(rules, tuple(eos_token_ids)).write(0, sampling, num_prompt)
    length = len(token_ids)
    row = _OneRow(
        slots=torch.zeros(1, dtype=torch.int64),
        seq_lens=torch.tensor([length]),
        num_drafts=torch.zeros(1, dtype=torch.int64),
        samples=torch.ones(1, dtype=torch.bool),
        verify_rows=torch.zeros(1, 1, dtype=torch.int64),
        draft_tokens=torch.zeros(1, 0, dtype=torch.int64),
        token_ids=torch.tensor([[*token_ids, 0]] * 2),
        num_computed=torch.tensor([length - 1, 0]),
    )
    found = constrained(torch.from_numpy(logits)[None], row, row, rules, EVERYTHING)
    return np.asarray(found[0])


def _padded(values: Sequence[float], width: int, value: float) -> np.ndarray:
    return np.array([*values, *[value] * (width - len(values))])


def _words(bad_words: Sequence[Sequence[int]]) -> np.ndarray:
    words = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH), -1, dtype=np.int64)
    for row, word in zip(words, bad_words, strict=False):
        row[-len(word) :] = word
    return words


def _copy(to: Tensor, values: np.ndarray) -> None:
    staged = torch.from_numpy(values).to(to.dtype)
    if to.is_cuda:
        staged = staged.pin_memory()  # given back once the copy is done
    to.copy_(staged, non_blocking=True)
