"""Checks shared by the doctor and the prediction: one native drafter, on one device."""

from __future__ import annotations

from hydraspec.config.messages import refusal
from hydraspec.config.schema import RunConfig


def check_own_drafter(
    config: RunConfig, *, verb: str, none: tuple[str, str], engine: str, ranks: str
) -> None:
    """Refuse a configuration without a drafter, with another engine or with several ranks.

    Args:
        verb: the participle in messages, "examined" or "predicted".
        none: problem and remedy of method=none.
        engine: the reason why another engine is refused.
        ranks: the remedy for several ranks.

    Raises:
        ConfigurationError: naming the key.
    """
    if config.method.name == "none":
        raise refusal("method", "none", none[0], allowed="a method with a drafter", remedy=none[1])
    if config.engine.name != "native":
        raise refusal(
            "engine",
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
