"""Commands that are refused, as typed, and the error of each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hydraspec.cli.compose import plan
from hydraspec.config import RunConfig
from hydraspec.errors import UserError
from hydraspec.factory import resolve_drafter

TYPED = ["tracker=none", "engine.device=cpu", "target.dtype=float32"]


def config_of(*typed: str) -> RunConfig:
    (job,) = plan([*TYPED, *typed]).jobs
    return job.config


def refused(use: Callable[[RunConfig], object], *typed: str) -> UserError:
    """The error at which a command ends, whose job does no more than `use`."""

    def run() -> None:
        config = config_of(*typed)
        resolve_drafter(config)
        use(config)

    with pytest.raises(UserError) as caught:
        run()
    return caught.value
