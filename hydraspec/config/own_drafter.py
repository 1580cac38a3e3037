"""Checks shared by the doctor and the prediction: one native drafter, on one device."""

from __future__ import annotations

from hydraspec.config.messages import refusal
from hydraspec.config.schema import RunConfig


def check_own_drafter(
    config: RunConfig, *, verb: str, none: tuple[str, str], engine: str, ranks: str
) -> None:
    """Refuse a configuration without a drafter, of another engine or of several ranks.

    verb: what is not done with it. none: what is wrong with method=none, and the remedy. engine:
    why another engine is refused. ranks: the remedy for several.

    Raises:
        ConfigurationError: naming the key.
    """
    if config.method.name == "none":
        raise refusal(
            "method.name", "none", none[0], allowed="a method with a drafter", remedy=none[1]
        )
    if config.engine.name != "native":
        raise refusal(
            "engine.name",
            config.engine.name,
            f"is not {verb}: {engine}",
            allowed="native",
            remedy="leave engine out",
        )
    if config.parallelism.num_ranks > 1:
        raise refusal(
            "parallelism",
            config.parallelism.name,
            f"is not {verb}",
            allowed="single",
            remedy=ranks,
        )
