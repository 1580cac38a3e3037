"""Settings that are decided before the run folder is written: the device, and what the
checkpoints' own configurations say.

Imports no torch by itself: the command line calls it before a run is certain.
"""

from __future__ import annotations

from hydraspec import factory
from hydraspec.config.schema import RunConfig
from hydraspec.speculators.registry import check_speculator


def resolve(config: RunConfig) -> None:
    """Check the device and fill in, in place, what checkpoints decide; see `factory`."""
    check_speculator(config)
    factory.check_device(config)
    factory.resolve_drafter(config)
