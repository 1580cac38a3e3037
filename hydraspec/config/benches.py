"""Rules of the keys of benchmarks. bench/run.py runs the benchmarks."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from hydraspec.config.choices import choices_of, has_key
from hydraspec.config.drafts import is_per_step
from hydraspec.config.engines import NATIVE, VLLM, VLLM_KEYS
from hydraspec.config.messages import listing, refusal
from hydraspec.config.rules import Rule, at_least, goodput_limits
from hydraspec.config.schema import RunConfig
from hydraspec.errors import ConfigurationError

BENCHES = PLAIN, CONTEXT, DECODE, LOAD, SERVE, TURNS = (
    *("none", "context", "decode", "load", "serve", "turns"),
)
# Benchmarks whose random prompts share no prefix: a cache would only hold those of earlier repeats.
UNCACHED = {CONTEXT, DECODE, LOAD, SERVE}
FIXED = (1, 3, 5)  # drafts that bench=context compares a choice for each step with
MOST_RATE = 1e6  # requests per second, far past what an engine can take


def is_bench(config: RunConfig) -> bool:
    """Returns whether the configuration is for a benchmark, which writes a table of timings."""
    return config.bench.name != PLAIN


def methods_of(config: RunConfig) -> list[str]:
    """The methods to time: bench.methods, or by default plain decoding and the chosen method;
    bench=context times plain decoding beside its method."""
    if config.bench.methods is not None:
        return config.bench.methods
    if config.bench.name == CONTEXT:
        return [config.method.name]
    return list(dict.fromkeys([PLAIN, config.method.name]))


def is_rising(sizes: Sequence[int]) -> bool:
    """Returns whether `sizes` is not empty and holds whole numbers from 1 on, each larger than the
    one before."""
    return bool(sizes) and min(sizes) >= 1 and sorted(set(sizes)) == sizes


def _known(given: Sequence[str], known: Iterable[str]) -> bool:
    """Returns whether `given` is not empty and holds words of `known` only, each once."""
    return bool(given) and len(set(given)) == len(given) and set(given) <= set(known)


def _at_least_the_median(key: str) -> Rule:
    return Rule(
        f"bench.max_{key}",
        lambda most, c: most >= getattr(c.bench, key),
        f"bench.{key}={{c.bench.{key}}} or more",
    )


def _of_a_bench(rule: Rule) -> Rule:
    """The rule, limited to benchmarks that have its key."""

    def applies(c: RunConfig) -> bool:
        has_it = has_key(c.bench.name, rule.key) or not rule.key.startswith("bench.")
        return is_bench(c) and has_it and rule.when(c)

    return replace(rule, when=applies)


def _longest(c: RunConfig) -> tuple[str, int]:
    """The keys that bound a request's tokens, as text for messages, and the bound in tokens."""
    keys, count = ("prompt_tokens", "output_tokens"), 1
    if c.bench.name in (LOAD, SERVE):
        keys = ("max_prompt_tokens", "max_output_tokens")
    if c.bench.name == TURNS:
        keys, count = ("turn_tokens", "output_tokens"), c.bench.num_turns
    if c.bench.name == CONTEXT:
        # One more, as no request may come to its end.
        text = "bench.contexts + bench.output_tokens x (K + 1) + 1"
        return text, c.bench.contexts[-1] + context_tokens(c) + 1
    text = " + ".join(f"bench.{key}" for key in keys)
    total = count * sum(getattr(c.bench, key) for key in keys)
    return f"bench.num_turns x ({text})" if c.bench.name == TURNS else text, total


def check_room(config: RunConfig, limit: int) -> None:
    """Refuse a benchmark with requests longer than the loaded target takes.

    Raises:
        ConfigurationError: a request of the benchmark has more than `limit` tokens.
    """
    keys, total = _longest(config)
    if total > limit:
        raise ConfigurationError(
            f"{keys} = {total}: target {config.target.name} takes {limit} tokens of a request\n"
            f"  allowed: up to {limit}\n  to do: choose shorter requests"
        )


def uncached(config: RunConfig, typed: Container[str]) -> list[str]:
    """The warning, if any, that a benchmark ignores the engine.prefix_caching=true that was typed;
    `typed` are the keys of the overrides."""
    if "engine.prefix_caching" not in typed or config.bench.name not in UNCACHED:
        return []
    return [
        f"engine.prefix_caching=true has no effect with bench={config.bench.name}: no engine "
        f"caches prefixes there (bench={TURNS} measures them)"
    ]


def not_passed_on(config: RunConfig, key: str, value: object) -> ConfigurationError:
    """The error for a key of engine.vllm with a benchmark that does not start vLLM."""
    engines = config.bench.engines
    remedy = "leave it out"
    if config.bench.name != CONTEXT:  # which vLLM cannot run
        remedy = f"add bench.engines=[{','.join([*engines, VLLM])}], or leave it out"
    return refusal(
        key,
        value,
        f"is for vLLM, which bench.engines=[{','.join(engines)}] does not have",
        allowed=f"no key of {VLLM_KEYS}, or bench.engines with {VLLM}",
        remedy=remedy,
    )


def _is_one_part(c: RunConfig) -> bool:
    return (c.bench.engines, methods_of(c)) == ([c.engine.name], [c.method.name])


def drafts_of(c: RunConfig) -> list[int]:
    """The fixed numbers of drafts that bench=context times: bench.drafts, or by default the
    method's, or with a number chosen for each step some up to the largest."""
    if c.bench.drafts is not None:
        return c.bench.drafts
    most = c.method.most_drafts
    return [k for k in FIXED if k <= most] if is_per_step(c) else [most]


def context_tokens(c: RunConfig) -> int:
    """The most tokens that a request of bench=context may emit until all have emitted
    bench.output_tokens on average."""
    return c.bench.output_tokens * (1 + c.method.most_drafts)


def _is_context(c: RunConfig) -> bool:
    return c.bench.name == CONTEXT


_OF_CONTEXT = (
    Rule(
        "bench.engines",
        lambda engines, c: engines == [NATIVE],
        f"[{NATIVE}]",
        "holds engines whose KV cache cannot be filled without reading prompts",
    ),
    Rule(
        "method.name",
        lambda name, c: name != PLAIN,
        "a method with drafts, which is measured beside none",
        "has nothing to measure with bench=context",
        "choose method=<choice>",
    ),
    Rule(
        "bench.methods",
        lambda methods, c: methods in (None, [c.method.name]),
        "[{c.method.name}], or null",
        "is not the method chosen, which is measured beside none",
        "leave the key out",
    ),
    Rule(
        "parallelism.name",
        lambda name, c: c.parallelism.num_ranks == 1,
        "single, with bench=context",
        "has several ranks, which take no fixed number of drafts in turn",
        "leave parallelism out",
    ),
    Rule(
        "bench.contexts",
        lambda contexts, c: is_rising(contexts) and contexts[0] >= 2,
        "rising whole numbers from 2 on, e.g. [512, 4096, 32768]",
        "is no list of context lengths",
    ),
    Rule(
        "bench.drafts",
        lambda drafts, c: drafts is None or is_per_step(c) or drafts == [c.method.most_drafts],
        "[{c.method.most_drafts}] (method.num_speculative_tokens), or null",
        "holds other numbers than the one that the engine has",
        "add method.num_speculative_tokens=auto",
    ),
    Rule(
        "bench.drafts",
        lambda drafts, c: (
            drafts is None or (is_rising(drafts) and drafts[-1] <= c.method.most_drafts)
        ),
        "rising whole numbers from 1 to {c.method.most_drafts} (method.max_speculative_tokens), "
        "or null",
        "is no list of numbers of drafts",
    ),
    at_least("bench.cell_timeout_s", 1),
)

_RULES = (
    *(replace(rule, when=_is_context) for rule in _OF_CONTEXT),
    Rule(
        "bench.engines",
        lambda engines, c: _known(engines, choices_of("engine")),
        lambda engines, c: f"a list, each once, of {listing(choices_of('engine'))}",
        "is no such list",
    ),
    Rule(
        "bench.methods",
        lambda methods, c: methods is None or _known(methods, {PLAIN, c.method.name}),
        lambda methods, c: f"a list, each once, of {listing({PLAIN, c.method.name})}",
        "is no such list",
        "choose the other with method=<choice>",
    ),
    Rule(
        "bench.batches",
        lambda batches, c: is_rising(batches),
        "rising whole numbers from 1 on, e.g. [1, 8, 32]",
        "is no list of batch sizes",
    ),
    replace(at_least("bench.output_tokens", 2), when=lambda c: c.bench.name == DECODE),
    *(
        at_least(f"bench.{key}", 1)
        for key in (
            *("prompt_tokens", "output_tokens", "repeats", "timeout_s", "num_requests"),
            *("num_conversations", "num_turns", "turn_tokens"),
        )
    ),
    Rule(
        "bench.cold_turns",
        lambda turns, c: turns is None or (is_rising(turns) and turns[-1] <= c.bench.num_turns),
        "rising whole numbers from 1 to {c.bench.num_turns} (bench.num_turns), or null for all",
        "is no list of turns",
    ),
    Rule(
        "bench.rates",
        lambda rates, c: bool(rates) and rates[0] > 0 and sorted(set(rates)) == rates,
        "rising numbers above 0, e.g. [0.25, 0.5, 0.75, 0.9]",
        "is no list of shares of bench.peak_rate",
    ),
    Rule(
        "bench.peak_rate",
        lambda rate, c: rate is None or 1 / MOST_RATE <= rate <= MOST_RATE,
        "requests per second above 0, or null to measure it",
    ),
    *goodput_limits("bench"),
    _at_least_the_median("prompt_tokens"),
    _at_least_the_median("output_tokens"),
    Rule(
        "bench.batches",
        lambda batches, c: max(batches) <= c.engine.max_num_seqs,
        "up to {c.engine.max_num_seqs}",
        "holds more requests than engine.max_num_seqs={c.engine.max_num_seqs}",
        lambda batches, c: f"add engine.max_num_seqs={max(batches)}",
    ),
    Rule(
        "target.max_model_len",
        lambda most, c: most is None or _longest(c)[1] <= most,
        lambda most, c: f"{_longest(c)[1]} or more, or null",
        lambda most, c: "has no room for {} = {}".format(*_longest(c)),
    ),
    Rule(
        "bench.isolate",
        lambda isolate, c: isolate or _is_one_part(c),
        "true, or false with engine and method as in bench.engines and bench.methods",
        "is for one engine and one method",
        "leave the key out",
    ),
)
BENCH = tuple(map(_of_a_bench, _RULES))
