"""Rules of the metrics group: which runs can record drafts from every output position
(metrics.all_positions) and compare distributions of sampled outputs (metrics.distribution)."""

from __future__ import annotations

from hydraspec.config.messages import show
from hydraspec.config.rules import Rule, at_least
from hydraspec.config.schema import RunConfig, Verification

KEY, DISTRIBUTION = "metrics.all_positions", "metrics.distribution"


def _wanted(c: RunConfig) -> bool:
    return c.metrics.all_positions


METRICS_RULES = (
    Rule(
        "engine.name",
        lambda name, c: name == "native",
        "native",
        f"cannot draft from every position ({KEY}=true): only our own draft heads can",
        f"leave {KEY} out, or choose engine=native",
        when=_wanted,
    ),
    Rule(
        "parallelism.name",
        lambda name, c: c.parallelism.num_ranks == 1,
        "single",
        f"cannot draft from every position ({KEY}=true)",
        f"leave {KEY} out, or record on one device with a smaller target of the family",
        when=_wanted,
    ),
    Rule(
        "method.verification",
        lambda verification, c: verification is not Verification.synthetic,
        "standard, block",
        f"gives outputs that are not the target's, so {KEY}=true has nothing to compare with",
        f"leave {KEY} out, or choose another verification",
        when=_wanted,
    ),
    at_least(DISTRIBUTION, 50, "50 or more samples of each prompt, or null"),
    at_least("metrics.distribution_prompts", 1),
    Rule(
        "metrics.smallest_effect",
        lambda share, c: 0 <= share <= 0.5,
        "a share of the speed from 0 to 0.5, such as 0.03",
    ),
    Rule(
        "baseline",
        lambda baseline, c: baseline,
        "true",
        f"leaves no outputs to compare with ({DISTRIBUTION})",
        f"leave {DISTRIBUTION} out, or choose baseline=true",
        when=lambda c: c.metrics.distribution is not None and c.method.name != "none",
    ),
    Rule(
        "method.verification",
        lambda verification, c: verification is not Verification.synthetic,
        "standard, block",
        f"gives outputs that are not the target's, so {DISTRIBUTION} has nothing to compare",
        f"leave {DISTRIBUTION} out, or choose another verification",
        when=lambda c: c.metrics.distribution is not None,
    ),
)


def without_drafts(config: RunConfig) -> list[str]:
    """Warnings of metrics keys that ask for records of drafts with method=none."""
    if config.method.name != "none":
        return []
    asked = {KEY: config.metrics.all_positions, DISTRIBUTION: config.metrics.distribution}
    return [
        f"{key}={show(value)} has no effect with method=none"
        for key, value in asked.items()
        if value
    ]
