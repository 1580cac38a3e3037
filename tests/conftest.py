"""What every test shares: one thread, no network, no drawn seeds."""

import os

# Before torch is imported anywhere. One thread each: xdist gives every core its own worker.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")

# Workers of pytest-xdist take turns at the GPUs of TEST_DEVICES, which CUDA reads when it starts.
if devices := os.environ.get("TEST_DEVICES"):
    turn = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.environ["CUDA_VISIBLE_DEVICES"] = devices.split(",")[turn % len(devices.split(","))]

import gc
import logging
import signal
from collections.abc import Iterator

import pytest
import torch

# Where no GPU compiles them, kernels run in Triton's interpreter, which has to know before its
# import.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell that starts a suite in the background has it ignore interrupts, which tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import composed_once
import device_record
from hypothesis import HealthCheck, settings

from hydraspec.signals import INTERRUPTS

# The same examples on every run and machine; how long one takes says nothing on a shared one.
settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")

composed_once.install()
gc.disable()  # until the tests are collected: next to nothing that imports make is garbage


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Commands run in this process configure the log; their handlers keep a stream that is closed
    when the test ends."""
    root, ours = logging.getLogger(), logging.getLogger("hydraspec")
    before, levels = root.handlers[:], (root.level, ours.level)
    yield
    for handler in [found for found in root.handlers if found not in before]:
        root.removeHandler(handler)
        handler.close()
    root.level, ours.level = levels


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> Iterator[None]:
    """Commands run in this process ignore interrupts once they end; later tests send some."""
    before = {number: signal.getsignal(number) for number in INTERRUPTS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _device_memory_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers share devices: engines that a test has left in cycles, and what torch's allocator
    keeps, would be missing in the tests of other workers."""
    yield
    if (
        any(map(request.node.get_closest_marker, ("gpu", "multi_gpu")))
        and torch.cuda.is_available()
    ):
        gc.collect()
        torch.cuda.empty_cache()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say where no device has seen these sources: a warning, once, and no failure."""
    if hasattr(terminalreporter.config, "workerinput"):
        return
    if said := device_record.warning():
        terminalreporter.write_line(f"warning: {said}", yellow=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A kernel without end holds the main thread, where no signal is heard: on a device another
    thread watches the time limit, and ends the process with the test's stack."""
    for item in items:
        if any(map(item.get_closest_marker, ("gpu", "multi_gpu"))):
            limit = pytest.mark.timeout(*_own_limit(item), method="thread")
            item.add_marker(limit, append=False)  # before its own


def pytest_collection_finish() -> None:
    """What imports and collection have made stays: the collector need not look at it again, nor as
    often at what tests make (a tenth of the time where they compose a configuration)."""
    gc.set_threshold(20_000, 10, 10)
    gc.enable()
    gc.unfreeze = _nothing_unfrozen


def _nothing_unfrozen() -> None:
    """Runs call `gc.unfreeze` when they end, which gives all objects of the process back to the
    collector: every later collection of the worker would take a second."""


@pytest.fixture(autouse=True, scope="module")
def _collected_once() -> None:
    """What earlier modules left alive (imports, caches, checkpoints) is looked at once."""
    gc.collect()
    gc.freeze()


def _own_limit(item: pytest.Item) -> tuple[float, ...]:
    """Seconds that the test asks for; none: those of the command line or of `pyproject.toml`."""
    own = item.get_closest_marker("timeout")
    return own.args[:1] if own else ()
