"""What a benchmark takes; bench/run.py says what it does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hydraspec.config.choices import choices_of
from hydraspec.config.messages import listing
from hydraspec.config.rules import Rule, at_least
from hydraspec.config.schema import RunConfig

PLAIN = "none"


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


def _num_tokens(c: RunConfig) -> int:
    return c.bench.prompt_tokens + c.bench.output_tokens


def _is_one_part(c: RunConfig) -> bool:
    return (c.bench.engines, methods_of(c)) == ([c.engine.name], [c.method.name])


_RULES = (
    Rule(
        "bench.name",
        lambda name, c: name in choices_of("bench"),
        lambda name, c: listing(choices_of("bench")),
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
    ),
    at_least("bench.prompt_tokens", 1),
    at_least("bench.output_tokens", 2),
    at_least("bench.repeats", 1),
    at_least("bench.timeout_s", 1),
    Rule(
        "bench.batches",
        lambda batches, c: max(batches) <= c.engine.max_num_seqs,
        "up to {c.engine.max_num_seqs}",
        "holds more requests than engine.max_num_seqs={c.engine.max_num_seqs}",
        lambda batches, c: f"add engine.max_num_seqs={max(batches)}",
    ),
    Rule(
        "target.max_model_len",
        lambda most, c: most is None or _num_tokens(c) <= most,
        lambda most, c: f"{_num_tokens(c)} or more, or null",
        lambda most, c: (
            f"has no room for bench.prompt_tokens + bench.output_tokens = {_num_tokens(c)}"
        ),
    ),
    Rule(
        "bench.isolate",
        lambda isolate, c: isolate or _is_one_part(c),
        "true, or false with engine and method as in bench.engines and bench.methods",
        "is for one engine and one method",
        "leave the key out",
    ),
)
BENCH = tuple(replace(rule, when=is_bench) for rule in _RULES)
