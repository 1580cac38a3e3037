"""Scores of drafts from every place of finished outputs, by a pass over whole texts that is no part
of a run's steps: it has its own KV caches, and replays no graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from hydraspec.engine.run.loading import Loaded
from hydraspec.speculators.draft_model import DraftModelSpeculator
from hydraspec.speculators.teacher_forcing.scores import chain_scores
from hydraspec.speculators.teacher_forcing.texts import Text, Texts, read_texts
from hydraspec.speculators.teacher_forcing.trial import Trial
from hydraspec.types import PositionScores

MAX_ROWS = 4096  # rows of the texts that are read at once, unless a single text has more
PADDING = 0  # token id in place of unknown tokens


def position_scores(parts: Loaded, texts: Seq[Text]) -> Iterator[PositionScores]:
    """Yields the scores of each text, computed for a few texts at once."""
    speculator = parts.runner.speculator
    assert isinstance(speculator, DraftModelSpeculator), "see can_be_forced"
    trial, k = Trial.of(speculator.head), speculator.num_speculative_tokens
    keep = sorted(set(trial.aux_ids))
    for group in _groups(texts):
        with torch.inference_mode():
            padded = [_padded(text, k) for text in group]
            encode = parts.runner.images.rows
            read = read_texts(parts.target, padded, k=k, keep=keep, encode=encode)
            found = list(_scored(trial, read, group, k))
        del read  # before the next group is computed
        yield from found


def _groups(texts: Seq[Text]) -> Iterator[list[Text]]:
    group: list[Text] = []
    num_rows = 0
    for text in texts:
        num_rows += len(text.token_ids)
        if group and num_rows > MAX_ROWS:
            yield group
            group, num_rows = [], len(text.token_ids)
        group.append(text)
    if group:
        yield group


def _padded(text: Text, k: int) -> Text:
    """The text up to the last token that a chain is compared with, padded where it is unknown."""
    missing = max(0, k - text.num_more)
    length = text.num_prompt + text.num_output + k
    return replace(text, token_ids=[*text.token_ids[:length], *[PADDING] * missing])


def _scored(trial: Trial, texts: Texts, group: Seq[Text], k: int) -> Iterator[PositionScores]:
    found, chains = chain_scores(trial, texts, k), texts.chains
    lengths = torch.tensor([len(text.token_ids) for text in group], device=chains.text.device)
    place = chains.position[:, None] + torch.arange(2, 2 + k, device=chains.text.device)
    is_known = place < lengths[chains.text][:, None]
    entropies = texts.target.entropy[chains.row + 1]
    # Finite minima stand for tokens that a head does not score: their probability is 0.
    ranks = found.ranks.masked_fill(found.probs == 0, 0)
    columns = [
        column.cpu().split(chains.num_of)
        for column in (
            chains.truth.masked_fill(~is_known, -1),
            ranks,
            found.probs,
            found.draft_tokens,
            found.draft_probs,
            entropies,
        )
    ]
    for text, *values in zip(group, *columns, strict=True):
        truth, rank, prob, tokens, draft_prob, entropy = (v.numpy() for v in values)
        yield PositionScores(
            index=text.index,
            first=text.num_prompt,
            target_token_ids=truth,
            target_ranks=rank,
            target_probs=prob,
            draft_token_ids=tokens,
            draft_probs=draft_prob,
            target_entropies=entropy,
        )
