"""Waiting for room on a device, without one."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from device_room import GIB, room_on_device


@pytest.fixture
def free(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path
) -> list[float]:
    """GiB that are free at each look, the last one for good."""
    left = [1.0, 50.0]

    def mem_get_info() -> tuple[int, int]:
        return int((left.pop(0) if len(left) > 1 else left[0]) * GIB), 140 * GIB

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    device = SimpleNamespace(uuid=request.node.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    return left


def test_it_begins_when_memory_is_free(free: list[float]) -> None:
    with room_on_device(40, limit_s=30):
        assert free == [50.0]


def test_too_little_memory_fails_the_test(free: list[float]) -> None:
    said = r"50\.0 GiB of the device are free, not 60"
    with pytest.raises(pytest.fail.Exception, match=said), room_on_device(60, limit_s=0):
        pass


def test_a_second_one_waits_for_the_first(free: list[float]) -> None:
    with room_on_device(40, limit_s=30):
        began = time.monotonic()
        with pytest.raises(pytest.fail.Exception), room_on_device(40, limit_s=0.1):
            pass
        assert time.monotonic() - began >= 0.1
    with room_on_device(40, limit_s=30):
        pass
