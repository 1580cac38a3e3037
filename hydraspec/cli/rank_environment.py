"""The environment that makes a process a rank of torchrun, which sets it; people may, too."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hydraspec.config.messages import refusal
from hydraspec.errors import ConfigurationError
from hydraspec.parallel.launch import PARENT

REMEDY = (
    "start ranks by torchrun, which sets it, or unset RANK and WORLD_SIZE for a run of one command"
)
MAX_PORT = 65535


def num_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """How many ranks torchrun started; 0 where this process is none of them: a run of one process,
    or a rank that hydraspec itself started.

    Raises:
        ConfigurationError: WORLD_SIZE is no whole number from 1.
    """
    if PARENT in environment or not {"RANK", "WORLD_SIZE"} <= environment.keys():
        return 0
    return _number(environment, "WORLD_SIZE", 1, None)


def check(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse values that name no rank, or no place where ranks meet.

    Raises:
        ConfigurationError: for the first such variable.
    """
    size = num_ranks(environment)
    if size:
        _number(environment, "RANK", 0, size - 1)
    if size < 2:
        return
    if "LOCAL_RANK" in environment:
        _number(environment, "LOCAL_RANK", 0, size - 1)
    if not environment.get("MASTER_ADDR"):
        raise _refusal(environment, "MASTER_ADDR", "names no host", "the address of rank 0's host")
    _number(environment, "MASTER_PORT", 1, MAX_PORT)


def _number(environment: Mapping[str, str], name: str, least: int, most: int | None) -> int:
    allowed = f"a whole number, {least} or more" if most is None else f"{least} to {most}"
    try:
        number = int(environment.get(name, ""))
    except ValueError:
        raise _refusal(environment, name, "is no whole number", allowed) from None
    if number < least or (most is not None and number > most):
        raise _refusal(environment, name, "is out of range", allowed)
    return number


def _refusal(
    environment: Mapping[str, str], name: str, problem: str, allowed: str
) -> ConfigurationError:
    if name not in environment:
        rank, size = environment["RANK"], environment["WORLD_SIZE"]
        problem = f"is not set, and RANK={rank} and WORLD_SIZE={size} are"
        return ConfigurationError(
            f"{name} {problem}\n  allowed: {allowed}\n  to do: {REMEDY}", key=name
        )
    return refusal(name, environment[name], problem, allowed=allowed, remedy=REMEDY)
