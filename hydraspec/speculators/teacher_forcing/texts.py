"""Texts that the target wrote, computed once: states of its layers, KV, and where chains of drafts
start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hydraspec.models.base import TargetModel
from hydraspec.types import (
    Completion,
    EncodedRows,
    ImageRows,
    KVGroupSpec,
    NotFiniteError,
    Request,
    Rows,
    RowSegment,
    SamplingParams,
    Span,
    StepRecord,
    image_rows,
)

BLOCK = 16  # cache rows a block
LOGIT_ROWS = 256  # rows whose logits are computed at a time
NUM_LIKELY = 16  # most likely tokens that are kept of the target's distribution


Run = Callable[[Sequence[Request]], Iterable[StepRecord | Completion]]
# Encoder outputs of image rows; T, the number of all rows, of the target, None of a drafter.
Encode = Callable[[Sequence[ImageRows], int | None], EncodedRows | None]


@dataclass(slots=True, frozen=True, kw_only=True)
class Text:
    """A prompt, the target's answer to it, and tokens with which the target goes on."""

    index: int  # of the request
    token_ids: list[int]
    num_prompt: int
    num_output: int
    is_greedy: bool
    spans: tuple[Span, ...] = ()  # of the prompt

    @property
    def num_chains(self) -> int:
        """Places from which a step may draft: after each output token but the last."""
        return max(0, self.num_output - 1)

    @property
    def num_more(self) -> int:
        """Known tokens after the output."""
        return len(self.token_ids) - self.num_prompt - self.num_output


def finished_texts(
    requests: Sequence[Request], completions: Mapping[int, Completion]
) -> list[Text]:
    """Texts of the requests that finished with two output tokens or more, in their order."""
    return [
        Text(
            index=request.index,
            token_ids=[*done.prompt_token_ids, *done.output_token_ids],
            num_prompt=len(done.prompt_token_ids),
            num_output=len(done.output_token_ids),
            is_greedy=request.sampling.temperature == 0,
            spans=done.spans,
        )
        for request in requests
        if (done := completions.get(request.index)) is not None
        and done.finish_reason != "error"
        and len(done.output_token_ids) > 1
    ]


def continued(texts: Sequence[Text], num_more: int, run: Run) -> list[Text]:
    """The texts, each greedy output followed by up to `num_more` further tokens of the target, with
    which drafts of the last places are compared. There are none after sampled outputs, or where the
    model length or the cache leaves no room.
    """
    onward = [
        Request(
            index=i,
            id=f"after request {text.index}",
            prompt_token_ids=text.token_ids,
            spans=text.spans,
            sampling=SamplingParams(max_tokens=num_more, ignore_eos=True),
        )
        for i, text in enumerate(texts)
        if text.is_greedy
    ]
    found = list(texts)
    with suppress(NotFiniteError):  # the tokens after it stay unknown
        for event in run(onward):
            if isinstance(event, Completion) and event.finish_reason != "error":
                text = texts[event.index]
                more = [*text.token_ids, *event.output_token_ids]
                found[event.index] = replace(text, token_ids=more)
    return found


@dataclass(slots=True, kw_only=True)
class Chains:
    """A chain of K drafts from every place of the texts where a step may start: N chains, ordered
    by text and place.

    A chain at position p knows the tokens up to p + 1 and the target's states up to p; its drafts
    are compared with the tokens at p + 2 and after.
    """

    text: Tensor  # [N] which text
    position: Tensor  # [N] p
    row: Tensor  # [N] the row of p among all rows
    truth: Tensor  # [N, K] the target's tokens
    num_of: list[int]  # chains of each text

    @property
    def count(self) -> int:
        """Number of chains, N."""
        return self.text.shape[0]


@dataclass(slots=True, kw_only=True)
class NextTokens:
    """The target's distribution of the token after each row."""

    ids: Tensor  # [T, NUM_LIKELY] its most likely tokens, the best first
    probs: Tensor  # [T, NUM_LIKELY] float32
    entropy: Tensor  # [T] float32, nats


@dataclass(slots=True, kw_only=True)
class Texts:
    """The target's states over some texts, T rows in all."""

    texts: list[Text]
    rows: Rows  # all rows in one pass, a segment a text, in the target's groups
    first_row: Tensor  # [R], with R texts
    table: Tensor  # [R, P] block ids of each text, 0 after its last one
    num_blocks: int  # block 0 included
    final: Tensor  # [T, D] after the final norm
    states: dict[int, Tensor]  # [T, D] after that many layers
    caches: list[Tensor | None]  # of the target's layers
    specs: list[KVGroupSpec]  # of the target, with blocks of BLOCK rows
    chains: Chains
    target: NextTokens  # of every row
    num_layers: int
    vocab_size: int
    next_encoded: EncodedRows | None = None  # rows whose following token is an image's
    encode: Encode | None = None  # with which they were read


def read_texts(
    target: TargetModel,
    texts: Sequence[Text],
    *,
    k: int,
    keep: Sequence[int],
    encode: Encode | None = None,
) -> Texts:
    """Run the target over the texts; `keep` are the layers whose states are kept, ascending, and
    `encode` yields the images of their prompts."""
    target = copy(target)  # kv_groups sets this copy's block size
    specs = target.kv_groups(BLOCK)
    device = target.device
    rows, first_row, table, num_blocks = _lay_out(texts, len(specs), device)
    rows.encoded, next_encoded = _encoded(texts, encode)
    caches: list[Tensor | None] = [None] * target.num_layers
    for spec in specs:
        for layer in spec.layers:
            shape = (num_blocks * BLOCK, *spec.shape.page_row)
            caches[layer] = torch.zeros(shape, dtype=spec.dtype or target.dtype, device=device)
    final, aux = target.forward(rows, caches, keep)
    chains = _chains(texts, first_row, rows.input_ids, k)
    return Texts(
        texts=list(texts),
        rows=rows,
        first_row=first_row,
        table=table,
        num_blocks=num_blocks,
        final=final,
        states=dict(zip(keep, [x.clone() for x in aux], strict=True)),
        caches=caches,
        specs=specs,
        chains=chains,
        target=_next_tokens(target, final),
        num_layers=target.num_layers,
        vocab_size=target.vocab_size,
        next_encoded=next_encoded,
        encode=encode,
    )


def _encoded(
    texts: Sequence[Text], encode: Encode | None
) -> tuple[EncodedRows | None, EncodedRows | None]:
    """Encoder outputs of rows that are images', and of those whose following token is one's."""
    if encode is None:
        return None, None
    parts: tuple[list[ImageRows], list[ImageRows]] = [], []
    row = 0
    for text in texts:
        for ahead, found in enumerate(parts):
            found += image_rows(text.spans, ahead, len(text.token_ids), row)
        row += len(text.token_ids)
    return encode(parts[0], row), encode(parts[1], None)


def _lay_out(
    texts: Sequence[Text], num_groups: int, device: torch.device
) -> tuple[Rows, Tensor, Tensor, int]:
    """The rows of all texts, each text's first row [R] and blocks [R, P], and the block count."""
    lens = [len(text.token_ids) for text in texts]
    starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
    width = -(-max(lens) // BLOCK)
    table = torch.zeros(len(texts), width, dtype=torch.int64)
    num_blocks = 1
    for i, length in enumerate(lens):
        count = -(-length // BLOCK)
        table[i, :count] = torch.arange(num_blocks, num_blocks + count)
        num_blocks += count
    positions = torch.cat([torch.arange(length) for length in lens])
    owner = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))
    slots = table[owner, positions // BLOCK] * BLOCK + positions % BLOCK
    table, slots = table.to(device), slots.to(device)
    rows = Rows(
        segments=tuple(RowSegment(starts[i], i, 1, n, n) for i, n in enumerate(lens)),
        input_ids=torch.tensor([t for text in texts for t in text.token_ids], device=device),
        positions=positions.to(device),
        seq_lens=torch.tensor(lens, device=device),
        slot_mapping=[slots] * num_groups,
        block_tables=[table] * num_groups,
        query_start_loc=torch.tensor(starts, device=device),
    )
    return rows, torch.tensor(starts[:-1], device=device), table, num_blocks


def _chains(texts: Sequence[Text], first_row: Tensor, tokens: Tensor, k: int) -> Chains:
    device = tokens.device
    num_of = [text.num_chains for text in texts]
    owner = torch.repeat_interleave(torch.arange(len(texts)), torch.tensor(num_of))
    position = torch.cat(
        [torch.arange(t.num_prompt - 1, t.num_prompt - 1 + t.num_chains) for t in texts]
    )
    owner, position = owner.to(device), position.to(device)
    row = first_row[owner] + position
    after = torch.arange(2, 2 + k, device=device)
    return Chains(
        text=owner,
        position=position,
        row=row,
        truth=tokens[row[:, None] + after],
        num_of=num_of,
    )


def _next_tokens(target: TargetModel, hidden: Tensor) -> NextTokens:
    """The distributions of hidden states [T, D], computed a few rows at a time."""
    ids, probs, entropy = [], [], []
    for part in hidden.split(LOGIT_ROWS):
        found = target.vocabulary.whole(target.compute_logits(part)).float().softmax(-1)
        best = found.topk(min(NUM_LIKELY, found.shape[-1]), dim=-1)
        ids.append(best.indices)
        probs.append(best.values)
        entropy.append(torch.special.entr(found).sum(-1))
    return NextTokens(ids=torch.cat(ids), probs=torch.cat(probs), entropy=torch.cat(entropy))
