"""What a benchmark takes; bench/run.py says what it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from hydraspec.config.choices import choices_of
from hydraspec.config.messages import listing
from hydraspec.config.rules import Rule, at_least
from hydraspec.config.schema import RunConfig

PLAIN, DECODE, LOAD = "none", "decode", "load"
# Of random prompts, which share nothing: engines would find what an earlier repeat has left.
UNCACHED = {DECODE, LOAD}


def is_bench(config: RunConfig) -> bool:
    """Whether a table of timings is made, in place of a run."""
    return config.bench.name != PLAIN


def methods_of(config: RunConfig) -> list[str]:
    """The methods of the table: those given, else plain decoding and the method chosen."""
    if config.bench.methods is not None:
        return config.bench.methods
    return list(dict.fromkeys([PLAIN, config.method.name]))


def is_rising(sizes: Sequence[int]) -> bool:
    """Whether these are whole numbers from 1 on, at least one, each larger than the one before."""
    return bool(sizes) and min(sizes) >= 1 and sorted(set(sizes)) == sizes


def _known(given: Sequence[str], known: Iterable[str]) -> bool:
    """Whether a list holds known words, each once, and one at least."""
    return bool(given) and len(set(given)) == len(given) and set(given) <= set(known)


def _is(name: str) -> Callable[[RunConfig], bool]:
    """Whether a configuration chooses this benchmark."""
    return lambda config: config.bench.name == name


def _at_least_the_median(key: str) -> Rule:
    return Rule(
        f"bench.max_{key}",
        lambda most, c: most >= getattr(c.bench, key),
        f"bench.{key}={{c.bench.{key}}} or more",
        when=_is(LOAD),
    )


def _of_a_bench(rule: Rule) -> Rule:
    return replace(rule, when=lambda config: is_bench(config) and rule.when(config))


def _longest(c: RunConfig) -> tuple[str, int]:
    """The keys that bound a request's tokens, for messages, and their sum."""
    keys = ("prompt_tokens", "output_tokens")
    if c.bench.name == LOAD:
        keys = ("max_prompt_tokens", "max_output_tokens")
    return " + ".join(f"bench.{key}" for key in keys), sum(getattr(c.bench, key) for key in keys)


def _is_one_part(c: RunConfig) -> bool:
    return (c.bench.engines, methods_of(c)) == ([c.engine.name], [c.method.name])


_RULES = (
    Rule(
        "bench.name",
        lambda name, c: name in (DECODE, LOAD),
        listing((PLAIN, DECODE, LOAD)),
        "is unknown",
    ),
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
        when=_is(DECODE),
    ),
    at_least("bench.prompt_tokens", 1),
    replace(at_least("bench.output_tokens", 2), when=_is(DECODE)),
    at_least("bench.output_tokens", 1),
    at_least("bench.repeats", 1),
    at_least("bench.timeout_s", 1),
    replace(at_least("bench.num_requests", 1), when=_is(LOAD)),
    _at_least_the_median("prompt_tokens"),
    _at_least_the_median("output_tokens"),
    Rule(
        "bench.batches",
        lambda batches, c: max(batches) <= c.engine.max_num_seqs,
        "up to {c.engine.max_num_seqs}",
        "holds more requests than engine.max_num_seqs={c.engine.max_num_seqs}",
        lambda batches, c: f"add engine.max_num_seqs={max(batches)}",
        when=_is(DECODE),
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
