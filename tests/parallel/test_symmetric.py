"""The group of CUDA devices: which way it takes, and on devices what the ways compute."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from device_checks import CHECKS
from device_ranks import checked, num_devices
from hydraspec_kernels import collectives
from hydraspec_kernels.norms import AddNorm, add_norm
from hydraspec_kernels.runtime import ahead
from torch import Tensor

from hydraspec.parallel import symmetric
from hydraspec.parallel.group import LostPeerError
from hydraspec.parallel.symmetric import Sizes, SymmetricGroup

LAST = CHECKS[-1]
LIMIT_S = 150.0
COUNTS = [
    pytest.param(count, marks=pytest.mark.skipif(num_devices() < count, reason="fewer devices"))
    for count in (2, 4)
]


@pytest.fixture(scope="module")
def said() -> dict[int, dict[str, list[str]]]:
    """What was checked already, by number of ranks: they are started once."""
    return {}


@pytest.mark.multi_gpu
@pytest.mark.timeout(LIMIT_S + 120)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("count", COUNTS)
def test_on_devices(count, check, said):
    if count not in said:
        said[count] = checked(count, CHECKS, LIMIT_S)
    for rank, error in enumerate(said[count][check]):
        if check != LAST or rank != count - 1:  # which was killed
            assert not error, f"rank {rank}: {error}"


class Calls(list[str]):
    """The ways that were taken."""

    def all_reduce(self, x: Tensor, group: object = None) -> None:
        self.append("nccl")
        x.mul_(2)

    def two_shot(self, x: Tensor, group: object) -> None:
        self.append("two-shot")
        x.mul_(2)

    def gather(self, into: Tensor, x: Tensor, group: object = None) -> None:
        self.append("nccl gather")
        into.copy_(x.repeat(2))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Two ranks that send the same, on a CPU."""
    calls = Calls()

    def by_messages(boxes: object, x: Tensor) -> Tensor:
        calls.append("messages")
        return x * 2

    def gathered(boxes: object, x: Tensor) -> Tensor:
        calls.append("messages gather")
        return torch.stack((x, x))

    def with_norms(boxes: object, h: Tensor, x: Tensor, **options: object) -> AddNorm:
        calls.append("messages")
        return add_norm(h, x * 2, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(collectives, "all_reduce", by_messages)
    monkeypatch.setattr(collectives, "all_gather", gathered)
    monkeypatch.setattr(collectives, "add_norm_over_ranks", with_norms)
    monkeypatch.setattr(dist, "all_reduce", calls.all_reduce)
    monkeypatch.setattr(dist, "all_gather_into_tensor", calls.gather)
    monkeypatch.setattr(
        symmetric, "_two_shot", lambda x, group: calls.append("two-shot") or x.mul_(2)
    )
    return calls


def group_of_two(*, reachable: bool = True) -> SymmetricGroup:
    group = SymmetricGroup.__new__(SymmetricGroup)
    group.rank, group.size = 0, 2
    group._group, group._wait_s = None, 5.0  # type: ignore[assignment]
    group._sizes = Sizes(messages=64, two_shot=256, gather=64)
    fault = torch.zeros(1, dtype=torch.int64)
    boxes = collectives.Mailboxes(0, 2, fault, (0, 0), fault, fault, fault)
    group._boxes = boxes if reachable else None
    group._workspace = torch.empty(256, dtype=torch.uint8) if reachable else None
    return group


WAYS = [(16, "messages"), (17, "two-shot"), (63, "two-shot"), (64, "two-shot"), (65, "nccl")]


@pytest.mark.parametrize(("n", "way"), WAYS)
def test_sums_take_the_way_of_their_size(n, way, calls):
    x = torch.arange(float(n))
    assert torch.equal(group_of_two().all_reduce(x.clone()), 2 * x)
    assert calls == [way]


@pytest.mark.parametrize(("n", "way"), WAYS)
def test_sums_with_norms_too(n, way, calls):
    options = {
        "post_weight": torch.ones(n),
        "next_weight": torch.ones(n),
        "eps": 1e-6,
        "scale": None,
        "has_post_norm": True,
    }
    x, h = torch.randn(1, n), torch.randn(1, n)
    expected = add_norm(h.clone(), 2 * x, **options)
    found = group_of_two().add_norm(h, x.unsqueeze(0) if way != "messages" else x, **options)
    assert found is not None
    assert found.h is h
    torch.testing.assert_close(found, expected)
    assert calls == [way]


def test_what_messages_cannot_carry_goes_by_nccl(calls):
    group = group_of_two()
    assert group.all_reduce(torch.ones(2, dtype=torch.int64)).tolist() == [2, 2]
    assert group.all_gather(torch.ones(2, dtype=torch.uint8)).tolist() == [[1, 1], [1, 1]]
    assert group.all_gather(torch.ones(17)).shape == (2, 17)
    assert group_of_two(reachable=False).all_reduce(torch.ones(2)).tolist() == [2, 2]
    assert group.all_gather(torch.ones(3, 2)).shape == (2, 3, 2)
    assert calls == ["nccl", "nccl gather", "nccl gather", "nccl", "messages gather"]


def test_a_rehearsal_waits_for_nobody(calls, monkeypatch):
    monkeypatch.setattr(ahead, "_is_rehearsing", True)
    group = group_of_two()
    assert group.all_reduce(torch.ones(17)).shape == (17,)
    assert group.all_reduce(torch.ones(100)).shape == (100,)
    assert group.all_gather(torch.ones(17)).shape == (2, 17)
    assert calls == []


def test_a_fault_names_the_rank_of_the_run(monkeypatch):
    group = group_of_two()
    group.check()
    assert group._boxes is not None
    group._boxes.fault[0] = 9 << 32 | 1 << 8 | 1
    monkeypatch.setattr(dist, "get_global_rank", lambda group, peer: 6 + peer)
    with pytest.raises(LostPeerError, match="rank 7 sent nothing for 5 s") as raised:
        group.check()
    assert raised.value.silent_rank == 7
