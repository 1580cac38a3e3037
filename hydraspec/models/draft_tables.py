"""Embedding and output projection of a draft head: the checkpoint's own or the target's, and the
draft vocabulary that they are in.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors import safe_open
from torch import Tensor

from hydraspec.errors import CheckpointError
from hydraspec.models.base import TargetModel
from hydraspec.models.checkpoint.reader import TensorEntry
from hydraspec.models.draft_place import head_place, target_place
from hydraspec.models.linear import Table
from hydraspec.models.parts import Tensors, Weights, prefixed
from hydraspec.parallel.vocabulary import Vocabulary

Entries = Mapping[str, TensorEntry]

COMPARED_ROWS = 1 << 14  # rows of two embeddings compared at a time


class DraftTables(Weights):
    """The part of a draft head that looks tokens up and chooses them.

    Attributes:
        hidden_size: width of both tables, D.
        embedding: table of the target's vocabulary, unscaled; the checkpoint's or the target's.
        head: output projection of the draft's vocabulary; the checkpoint's or the target's.
        own: weights of these two tables as far as they are the checkpoint's.
        vocab_map: ids [V_draft] of the target; None: the same.
        logit_scale: factor of all logits.
        softcap: soft cap of the logits; None: none.
    """

    embedding: Table
    head: Table

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size
        self.own: Tensors = {}
        self.vocab_map: Tensor | None = None
        self.banned: Tensor | None = None  # columns of draft ids that the target never samples
        self.logit_scale = 1.0
        self.softcap: float | None = None

    @property
    def vocabulary(self) -> Vocabulary:
        """The draft's vocabulary, as ranks divide it."""
        return self.head.vocabulary

    def tensors(self) -> Tensors:
        """Every weight the checkpoint holds, by its canonical name."""
        return super().tensors() | self.own

    def ban(self, suppressed: Tensor) -> None:
        """Sets the draft ids never to propose, suppressed [n]."""
        columns = suppressed - self.vocabulary.first
        columns = columns[(columns >= 0) & (columns < self.vocabulary.num_tokens)]
        self.banned = columns if columns.shape[0] else None

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [B, V_draft] of hidden [B, D]; tokens that the target never samples get the
        dtype's minimum.
        """
        return self.vocabulary.whole(self.columns(hidden))

    def columns(self, hidden: Tensor) -> Tensor:
        """This rank's columns of the logits."""
        logits = self.head.logits(hidden, self.softcap)
        if self.logit_scale != 1.0:
            logits.mul_(self.logit_scale)
        return self.without_banned(logits)

    def without_banned(self, logits: Tensor) -> Tensor:
        """This rank's columns of logits, in place with the dtype's minimum for tokens that the
        target never samples."""
        if self.banned is not None:
            logits.index_fill_(1, self.banned, torch.finfo(logits.dtype).min)
        return logits

    def greedy_tokens(self, hidden: Tensor) -> Tensor:
        """Best tokens [B] of hidden [B, D], as ids of the target's vocabulary; of equal scores the
        lowest draft id wins.
        """
        return self.target_ids(self.vocabulary.greedy_tokens(self.columns(hidden)))

    def target_ids(self, tokens: Tensor) -> Tensor:
        """Ids [B] of the target's vocabulary for draft ids [B]."""
        return tokens if self.vocab_map is None else self.vocab_map.index_select(0, tokens)


def place_tables(
    head: DraftTables,
    entries: Entries,
    target: TargetModel,
    where: str,
    *,
    num_rows: int | None,
    brings_head: bool,
) -> None:
    """Set a head's embedding and output projection: the checkpoint's own if it has them, else the
    target's. An embedding of another width is the head's own too.

    num_rows: size of the draft vocabulary, if the config states it. brings_head: heads of this kind
    bring an output projection, so that one with random weights draws it.
    """
    size, place = head.hidden_size, target_place(target)
    lm_head, head.embedding = entries.get("lm_head.weight"), target.table
    if "embed_tokens.weight" in entries or size != target.hidden_size:
        head.embedding = Table(place, target.vocabulary, size)
        head.own |= prefixed("embed_tokens.", head.embedding.tensors())
    rows = num_rows
    if rows is None:
        rows = target.vocab_size if lm_head is None else lm_head.shape[0]
    if lm_head is not None or (not entries and brings_head):
        place = head_place(target, rows, size)
        head.head = Table(place, Vocabulary(rows, place.group), size)
        head.own |= prefixed("lm_head.", head.head.tensors())
    elif rows == target.vocab_size and size == target.hidden_size:
        head.head = target.head
    else:
        raise CheckpointError(
            f"drafter {where!r} has no lm_head.weight, and its head of {rows} tokens and width "
            f"{size} cannot be the target's ({target.vocab_size}, {target.hidden_size}): download "
            "it again"
        )


def share_equal_embedding(head: DraftTables, target: TargetModel) -> bool:
    """Shares the target's embedding if the head's is equal, since some formats always save a copy;
    returns whether it is shared.
    """
    if "embed_tokens.weight" not in head.own:
        return True
    ours, theirs = head.embedding.weight, target.table.weight
    group, is_equal = target.vocabulary.group, ours.shape == theirs.shape
    is_equal = is_equal and _are_equal(ours, theirs)
    if not group.all_gather(torch.tensor(int(is_equal), device=theirs.device)).all():
        return False
    del head.own["embed_tokens.weight"]
    head.embedding = target.table
    return True


def _are_equal(ours: Tensor, theirs: Tensor) -> bool:
    """Returns whether two tables are equal. They are compared in pieces: the mask of a comparison
    takes a byte per element, 1 GB for a large table.
    """
    pieces = zip(ours.split(COMPARED_ROWS), theirs.split(COMPARED_ROWS), strict=True)
    return all(torch.equal(a, b) for a, b in pieces)


def vocab_map(
    head: DraftTables, entries: Entries, target: TargetModel, weights: str, where: str
) -> Tensor | None:
    """Target ids [V_draft] of the draft vocabulary: k + d2t[k] for draft id k. None if they are
    the draft ids themselves.
    """
    rows, vocab_size = head.vocabulary.size, target.vocab_size
    k = torch.arange(rows, device=target.device)
    if "d2t" in entries:
        d2t = _read(entries["d2t"]).to(target.device)
        if tuple(d2t.shape) != (rows,):
            raise CheckpointError(
                f"drafter {where!r}: d2t has {d2t.shape[0]} entries and the draft's head {rows} "
                "tokens: the files do not belong together"
            )
        ids = k + d2t.to(torch.int64)
    elif rows == vocab_size:
        return None
    elif weights == "random":
        ids = k * vocab_size // rows
    else:
        raise CheckpointError(
            f"drafter {where!r} has a head of {rows} tokens for a vocabulary of {vocab_size} and "
            "no d2t that maps them: download it again"
        )
    inside = (ids >= 0) & (ids < vocab_size)
    if not bool(inside.all()) or ids.unique().shape[0] != rows:
        raise CheckpointError(
            f"drafter {where!r}: d2t does not map its {rows} tokens to different ids below "
            f"{vocab_size}, the target's vocabulary: download it again"
        )
    if "t2d" in entries:
        _check_t2d(_read(entries["t2d"]).to(target.device), ids, where)
    return None if rows == vocab_size and torch.equal(ids, k) else ids


def _check_t2d(t2d: Tensor, ids: Tensor, where: str) -> None:
    """Check that t2d, a mask over the target's vocabulary, marks the tokens that d2t lists."""
    marked = torch.zeros_like(t2d, dtype=torch.bool)
    marked[ids[ids < t2d.shape[0]]] = True
    if not torch.equal(marked, t2d.to(torch.bool)):
        raise CheckpointError(
            f"drafter {where!r}: t2d and d2t name different tokens: the files do not belong "
            "together"
        )


def _read(entry: TensorEntry) -> Tensor:
    with safe_open(entry.file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(entry.name)
        return tensor


def suppressed(head: DraftTables, target: TargetModel) -> Tensor:
    """Draft ids of the tokens that the target never samples."""
    banned = torch.tensor(target.suppress_token_ids, dtype=torch.int64, device=target.device)
    if head.vocab_map is None or not banned.shape[0]:
        return banned
    draft_ids = torch.arange(head.vocab_map.shape[0], device=target.device)
    return draft_ids[torch.isin(head.vocab_map, banned)]
