"""What a run settles before its folder is written: the device, and the checkpoints' say in the
configuration.

Light to import: the command line asks here before it knows whether anything is to run.
"""

from __future__ import annotations

from hydraspec import factory
from hydraspec.config.schema import RunConfig


def resolve(config: RunConfig) -> None:
    """Fill in, in place, what checkpoints decide; see `factory`."""
    factory.check_speculator(config)
    factory.check_device(config)
    factory.resolve_drafter(config)
