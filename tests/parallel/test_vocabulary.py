"""Vocabularies split over ranks: what one rank would look up, gather and choose."""

import math

import pytest
import torch
from hydraspec_kernels.embedding import embed, embed_beside
from hydraspec_kernels.sampling.token_choice import greedy_tokens
from thread_ranks import as_ranks
from torch import Tensor

from hydraspec.parallel.layout import Layout
from hydraspec.parallel.ranks import Ranks
from hydraspec.parallel.vocabulary import Vocabulary

SPLITS = [(size, ranks) for ranks in (2, 3, 4) for size in range(1, 10)]
INF, NAN = math.inf, math.nan


def part_of(vocabulary: Vocabulary, whole: Tensor, dim: int) -> Tensor:
    """This rank's part of a tensor; NaN as padding, which must never show."""
    padding = vocabulary.num_rows - vocabulary.num_tokens
    part = whole.narrow(dim, vocabulary.first, vocabulary.num_tokens)
    shape = [*part.shape]
    shape[dim] = padding
    return torch.cat((part, torch.full(shape, NAN, dtype=whole.dtype)), dim)


@pytest.mark.parametrize(("size", "ranks"), SPLITS)
def test_ranks_look_up_and_gather_what_one_rank_has(size: int, ranks: int) -> None:
    """Every token on exactly one rank, also where some ranks have none."""
    torch.manual_seed(size)
    table = torch.randn(size, 3, dtype=torch.float64)
    ids = torch.randint(size, (2, 5))
    hidden, rows = torch.randn(7, 2, dtype=torch.float64), torch.tensor([6, 0, 3, 3, 1])
    logits = torch.randn(4, size, dtype=torch.float64)

    def work(rank: Ranks) -> tuple[list[int], list[Tensor]]:
        vocabulary = Vocabulary(size, rank.group)
        own = part_of(vocabulary, table, 0)
        tokens = [vocabulary.first + row for row in vocabulary.rows_of(range(-2, size + 2))]
        return tokens, [
            vocabulary.embed(ids, own, 1.5),
            vocabulary.embed_beside(ids[0], own, None, hidden[:5], None),
            vocabulary.embed_beside(ids[0], own, 0.5, hidden, rows),
            vocabulary.whole(part_of(vocabulary, logits, 1)),
        ]

    wanted = [
        embed(ids, table, 1.5),
        embed_beside(ids[0], table, None, hidden[:5], None),
        embed_beside(ids[0], table, 0.5, hidden, rows),
        logits,
    ]
    found = as_ranks(Layout(tensor=ranks), work)
    assert [token for tokens, _ in found for token in tokens] == list(range(size))
    for _, tensors in found:
        for ours, theirs in zip(tensors, wanted, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("marks", [False, True], ids=["plain", "marked"])
@pytest.mark.parametrize(("size", "ranks"), SPLITS)
def test_the_greedy_choice_is_that_of_one_rank(size: int, ranks: int, marks: bool) -> None:
    """Few different values, so that ties cross ranks; NaN, infinities and both zeros among them."""
    torch.manual_seed(size * ranks)
    values = torch.tensor([0.0, -0.0, 1.0, 1.0, -2.0, -INF, -INF, INF, NAN])
    plain = values[torch.randint(5, (40, size))]
    logits = torch.cat(
        (
            plain,
            values[torch.randint(7, (40, size))],
            values[torch.randint(9, (40, size))],
            torch.full((1, size), -INF),
            torch.full((1, size), NAN),
            torch.full((1, size), torch.finfo(torch.float32).min),
        )
    )
    wanted = greedy_tokens(logits, marks_not_finite=marks)

    def work(rank: Ranks) -> Tensor:
        vocabulary = Vocabulary(size, rank.group)
        own = part_of(vocabulary, logits, 1)
        return vocabulary.greedy_tokens(own, marks_not_finite=marks)

    for found in as_ranks(Layout(tensor=ranks), work):
        assert found.dtype == torch.int64
        assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_best_value_is_compared_in_its_own_type(dtype: torch.dtype) -> None:
    """The largest ids, and values that differ in the last bit."""
    size = 262_144
    logits = torch.zeros(3, size, dtype=dtype)
    one = torch.ones((), dtype=dtype)
    more = torch.nextafter(one, one + 1)
    logits[0, 5], logits[0, size - 1] = one, more
    logits[1, size // 2 - 1], logits[1, size // 2] = more, more
    logits[2, size - 1] = one

    def work(rank: Ranks) -> Tensor:
        vocabulary = Vocabulary(size, rank.group)
        return vocabulary.greedy_tokens(part_of(vocabulary, logits, 1))

    for found in as_ranks(Layout(tensor=2), work):
        assert found.tolist() == [size - 1, size // 2 - 1, size - 1]


def test_one_rank_gets_the_calls_of_before() -> None:
    """Logits themselves, no copy, and every row a token."""
    vocabulary, logits = Vocabulary(7), torch.randn(2, 7)
    assert vocabulary.whole(logits) is logits
    assert (vocabulary.num_rows, vocabulary.first, vocabulary.num_tokens) == (7, 0, 7)
    assert vocabulary.rows_of([0, 6, 7]) == [0, 6]
