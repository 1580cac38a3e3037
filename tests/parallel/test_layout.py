"""Ranks, their coordinates, and groups that add up the same bits everywhere."""

import pytest
import torch
from thread_ranks import as_ranks

from hydraspec.parallel.group import SOLO
from hydraspec.parallel.layout import Coordinates, Layout
from hydraspec.parallel.ranks import ALONE, Ranks, current


def test_tensor_parallel_ranks_are_neighbours_then_stages_then_replicas() -> None:
    layout = Layout(tensor=2, pipeline=3, data=2)
    found = [layout.coordinates(rank) for rank in range(layout.num_ranks)]
    assert found[:4] == [
        Coordinates(0, 0, 0),
        Coordinates(0, 0, 1),
        Coordinates(0, 1, 0),
        Coordinates(0, 1, 1),
    ]
    assert found[6] == Coordinates(1, 0, 0)
    assert [layout.rank_at(at) for at in found] == list(range(12))


def test_a_process_is_alone_until_it_is_told() -> None:
    assert current() is ALONE
    x = torch.ones(3)
    assert SOLO.all_reduce(x) is x
    assert SOLO.all_gather(x).shape == (1, 3)


def test_ranks_add_up_and_gather() -> None:
    def work(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
        assert current() is ranks
        x = torch.full((2,), float(ranks.rank + 1))
        return ranks.group.all_reduce(x), ranks.group.all_gather(x)

    for total, gathered in as_ranks(Layout(tensor=3), work):
        assert total.tolist() == [6.0, 6.0]
        assert gathered[:, 0].tolist() == [1.0, 2.0, 3.0]
    assert current() is ALONE


def test_the_rank_that_raised_is_named_not_those_that_waited_for_it() -> None:
    def work(ranks: Ranks) -> None:
        if ranks.rank == 1:
            raise ValueError("rank 1 broke")
        ranks.group.all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match="rank 1 broke"):
        as_ranks(Layout(tensor=2), work)
