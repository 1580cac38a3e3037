"""Words between host memory and a device, against a copy."""

from __future__ import annotations

import pytest
import torch
from hydraspec_kernels.step_inputs import copy_words
from torch import Tensor

kernels = pytest.importorskip("hydraspec_kernels.step_inputs.copy_kernel")
SIZES = [1, 511, 512, 513, 5000]


def words(count: int) -> Tensor:
    return torch.randint(-(1 << 62), 1 << 62, (count,))


@pytest.mark.parametrize("from_host", [True, False])
@pytest.mark.parametrize("count", SIZES)
def test_the_kernel_copies_every_word_and_no_other(count: int, from_host: bool) -> None:
    given, found = words(count), torch.full((count + 3,), -7)
    kernels.copy_words_kernel(found[:count], given, from_host=from_host)
    assert torch.equal(found[:count], given)
    assert found[count:].tolist() == [-7] * 3


def test_rows_are_words_too() -> None:
    given, found = words(50).view(5, 10)[:, 2:8], torch.zeros(9, 6, dtype=torch.int64)
    kernels.copy_words_kernel(found[:5], given, from_host=False)
    copy_words(found[5:], given[:4])
    assert torch.equal(found, torch.cat((given, given[:4])))


def test_other_shapes_and_types_are_refused() -> None:
    for other in (torch.zeros(5, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)):
        with pytest.raises(AssertionError, match="to"):
            kernels.copy_words_kernel(other, torch.zeros(4, dtype=torch.int64), from_host=True)


@pytest.mark.gpu
@pytest.mark.parametrize("count", SIZES)
def test_the_newest_words_arrive_in_stream_order(count: int) -> None:
    """The host fills one of four buffers while the device is still busy with earlier ones."""
    sent = [torch.zeros(count, dtype=torch.int64, pin_memory=True) for _ in range(4)]
    back = [torch.zeros(count, dtype=torch.int64, pin_memory=True) for _ in range(4)]
    done = [torch.cuda.Event() for _ in range(4)]
    on_device = torch.zeros(count + 1, dtype=torch.int64, device="cuda")
    busy = torch.randn(2048, 2048, device="cuda")
    wanted: list[Tensor] = []
    for turn in range(40):
        place = turn % 4
        if turn >= 4:
            done[place].synchronize()
            assert torch.equal(back[place], wanted[turn - 4])
        given = words(count)
        wanted.append(given + turn % 2)
        sent[place].copy_(given)
        busy = busy @ busy * 1e-3
        copy_words(on_device[:count], sent[place])
        if turn % 2:
            on_device[:count] += 1
        copy_words(back[place], on_device[:count])
        done[place].record()
    torch.cuda.synchronize()
    assert on_device[count] == 0
    for turn in range(36, 40):
        assert torch.equal(back[turn % 4], wanted[turn])
