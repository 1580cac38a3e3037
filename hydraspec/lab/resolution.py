"""Settings that are decided before the run folder is written: the device, and what the
checkpoints' own configurations say.

The module imports no torch itself: the command line calls it before a run is certain.
"""

from __future__ import annotations

import os

from hydraspec import factory
from hydraspec.config.checks import MAX_NUM_THREADS
from hydraspec.config.choices import has_key
from hydraspec.config.schema import RunConfig
from hydraspec.speculators.registry import check_speculator


def resolve(config: RunConfig) -> None:
    """Check the device, and complete the configuration, in place, from its checkpoints and the
    environment; see `factory.resolve_drafter`."""
    check_speculator(config)
    factory.check_device(config)
    _take_threads(config)
    factory.resolve_drafter(config)


def _take_threads(config: RunConfig) -> None:
    """Set engine.num_threads, if it is null, to OMP_NUM_THREADS above 1 on a CPU: engines would
    choose one thread for a narrow target."""
    asked, engine = os.environ.get("OMP_NUM_THREADS", ""), config.engine
    if engine.num_threads is not None or not has_key(engine.name, "engine.num_threads"):
        return
    is_several = asked.isdecimal() and 1 < int(asked) <= MAX_NUM_THREADS
    if is_several and factory.device_type(config) == "cpu":
        engine.num_threads = int(asked)
