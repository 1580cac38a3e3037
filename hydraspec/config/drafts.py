"""Rules of the number of drafts: its choice for each step, and drafts that are left out."""

from __future__ import annotations

from hydraspec.config.engines import NATIVE, VLLM
from hydraspec.config.messages import refusal
from hydraspec.config.options import KEY, DSparkOptions, SuffixOptions
from hydraspec.config.rules import Rule
from hydraspec.config.schema import PerStep, RunConfig, Verification

# Draft buffers, verify rows and captured graphs are K+1 wide for every slot, and even where nine
# drafts in ten are accepted, the 32nd of a row is reached 3 times in 100.
MAX_SPECULATIVE_TOKENS = 32
CHOOSERS = (NATIVE, VLLM)  # engines that choose the number of drafts, and where it can be chosen
CHOSEN_IN = ("none", "context", "decode", "load")


def is_synthetic(c: RunConfig) -> bool:
    """Returns whether acceptance is drawn and not verified."""
    return c.method.verification is Verification.synthetic


def is_per_step(c: RunConfig) -> bool:
    """Returns whether the number of drafts is chosen for each step."""
    return c.method.num_speculative_tokens is PerStep.auto


K_PER_STEP = (
    Rule(
        "method.num_speculative_tokens",
        lambda k, c: c.engine.name in CHOOSERS,
        "a number, with engine={c.engine.name}",
        "is for engine=native and engine=vllm",
        "write a number, or choose one of these",
        when=is_per_step,
    ),
    Rule(
        "method.num_speculative_tokens",
        lambda k, c: c.bench.name in CHOSEN_IN,
        "a number, with bench={c.bench.name}",
        "is for runs (bench=none) and bench=context, decode and load",
        "write a number, or choose one of these",
        when=is_per_step,
    ),
    Rule(
        "method.costs",
        lambda costs, c: costs is None or c.engine.name != VLLM,
        "null with engine={c.engine.name}",
        "holds costs of the native engine's steps; vLLM measures its own",
        "leave the key out",
        when=is_per_step,
    ),
    Rule(
        "method.num_speculative_tokens",
        lambda k, c: not isinstance(c.method.options, SuffixOptions),
        f"1 to {MAX_SPECULATIVE_TOKENS} with method={{c.method.name}}",
        "is of no use where each request has its own number of drafts in each step",
        "write the most that a request may have",
        when=is_per_step,
    ),
    Rule(
        "method.max_speculative_tokens",
        lambda most, c: 1 <= most <= MAX_SPECULATIVE_TOKENS,
        f"1 to {MAX_SPECULATIVE_TOKENS}",
        remedy="most drafters pay off at 2 to 6",
        when=is_per_step,
    ),
    *(
        Rule(
            key,
            lambda value, c: value is None,
            "null",
            "has no meaning with method.num_speculative_tokens={c.method.num_speculative_tokens}",
            "leave the key out, or add method.num_speculative_tokens=auto",
            when=lambda c: not is_per_step(c),
        )
        for key in ("method.max_speculative_tokens", "method.costs")
    ),
)


TRACE = "method.synthetic_trace"
RECORDED = (
    Rule(
        TRACE,
        lambda trace, c: trace is None or is_synthetic(c),
        "null",
        "has no meaning with verification={c.method.verification.value}",
        "add method.verification=synthetic, or leave the key out",
    ),
    Rule(
        TRACE,
        lambda trace, c: trace is None or c.method.synthetic_acceptance_length is None,
        "null with method.synthetic_acceptance_length={c.method.synthetic_acceptance_length}",
        "gives the acceptance a second time",
        "leave one of the two keys out",
    ),
    Rule(
        TRACE,
        lambda trace, c: trace is None or c.engine.name == NATIVE,
        "null with engine={c.engine.name}",
        "is followed by engine=native alone",
        "choose engine=native, or method.synthetic_acceptance_length=<number>",
    ),
    *(
        Rule(
            key,
            lambda value, c: value is None or c.method.synthetic_trace is not None,
            "null without " + TRACE,
            "says which requests of a record are followed, and there is no record",
            f"add {TRACE}=<folder of a run>, or leave the key out",
        )
        for key in ("method.synthetic_category", "method.synthetic_undraftable")
    ),
    Rule(
        "method.synthetic_undraftable",
        lambda share, c: share is None or 0 <= share <= 1,
        "0 to 1, e.g. 0.5 for every second request",
    ),
)


def check_min_survival(config: RunConfig) -> None:
    """Raise ConfigurationError where min_survival is set beside what it does not go with."""
    options, problem = config.method.options, ""
    if not isinstance(options, DSparkOptions) or options.min_survival is None:
        return
    if is_per_step(config):
        problem = "leaves out drafts whose number the engine chooses already"
        other, remedy = "method.num_speculative_tokens=auto", "write a number there"
    elif is_synthetic(config):
        problem = "leaves out drafts whose acceptance is drawn"
        other, remedy = "method.verification=synthetic", "choose method.verification=standard"
    elif config.engine.name == VLLM:
        problem, other = "is an option of the native engine", f"engine={VLLM}"
        remedy = "choose engine=native"
    if problem:
        raise refusal(
            f"{KEY}.min_survival",
            options.min_survival,
            problem,
            allowed=f"null with {other}",
            remedy=f"{remedy}, or leave the key out",
        )
