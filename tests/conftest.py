"""What every test shares: one thread, no network, no drawn seeds."""

import os

# Before torch is imported anywhere. One thread each: xdist gives every core its own worker.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")

import torch

# Where no GPU compiles them, kernels run in Triton's interpreter, which has to know before its
# import.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import device_record
import pytest
from hypothesis import HealthCheck, settings

# The same examples on every run and machine; how long one takes says nothing on a shared one.
settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say where no device has seen these sources: a warning, once, and no failure."""
    if hasattr(terminalreporter.config, "workerinput"):
        return
    if said := device_record.warning():
        terminalreporter.write_line(f"warning: {said}", yellow=True)
