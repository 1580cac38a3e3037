"""What a benchmark may be asked for; see lab/bench.py for what it does."""

from __future__ import annotations

from hydraspec.config.choices import choices_of
from hydraspec.config.messages import listing, refusal
from hydraspec.config.schema import BenchConfig, RunConfig

PLAIN = "none"


def is_bench(config: RunConfig) -> bool:
    """Whether a table of timings is asked for, in place of a run."""
    return config.bench.name != PLAIN


def methods_of(config: RunConfig) -> list[str]:
    """The methods of the table: those given, else plain decoding and the method chosen."""
    if config.bench.methods is not None:
        return config.bench.methods
    return list(dict.fromkeys([PLAIN, config.method.name]))


def check_bench(config: RunConfig) -> None:
    """Refuse a benchmark that cannot be run."""
    if not is_bench(config):
        return
    bench = config.bench
    if bench.name not in choices_of("bench"):
        raise refusal("bench.name", bench.name, "is unknown", allowed=listing(choices_of("bench")))
    _check_names("engines", bench.engines, choices_of("engine"))
    known = {PLAIN, config.method.name}
    _check_names("methods", methods_of(config), known, "choose the other with method=<choice>")
    _check_sizes(bench)
    _check_room(config)
    asked = (bench.engines, methods_of(config))
    if not bench.isolate and asked != ([config.engine.name], [config.method.name]):
        raise refusal(
            "bench.isolate",
            False,
            "is for one engine and one method",
            allowed="true, or false with engine and method as in bench.engines and bench.methods",
            remedy="leave the key out",
        )


def _check_names(
    key: str, given: list[str], known: tuple[str, ...] | set[str], remedy: str = ""
) -> None:
    if not given or len(set(given)) != len(given) or not set(given) <= set(known):
        allowed = f"a list, each once, of {listing(known)}"
        raise refusal(f"bench.{key}", given, "is no such list", allowed=allowed, remedy=remedy)


def _check_sizes(bench: BenchConfig) -> None:
    batches = bench.batches
    if not batches or min(batches) < 1 or sorted(set(batches)) != batches:
        raise refusal(
            "bench.batches",
            batches,
            "is no list of batch sizes",
            allowed="rising whole numbers from 1 on, e.g. [1, 8, 32]",
        )
    for key, least in (("prompt_tokens", 1), ("output_tokens", 2), ("repeats", 1)):
        value = getattr(bench, key)
        if value < least:
            raise refusal(f"bench.{key}", value, "is out of range", allowed=f"{least} or more")
    if bench.timeout_s < 1:
        raise refusal("bench.timeout_s", bench.timeout_s, "is out of range", allowed="1 or more")


def _check_room(config: RunConfig) -> None:
    largest = max(config.bench.batches)
    if largest > config.engine.max_num_seqs:
        raise refusal(
            "bench.batches",
            config.bench.batches,
            f"holds more requests than engine.max_num_seqs={config.engine.max_num_seqs}",
            allowed=f"up to {config.engine.max_num_seqs}",
            remedy=f"add engine.max_num_seqs={largest}",
        )
    num_tokens = config.bench.prompt_tokens + config.bench.output_tokens
    if num_tokens > (config.target.max_model_len or num_tokens):
        raise refusal(
            "target.max_model_len",
            config.target.max_model_len,
            f"has no room for bench.prompt_tokens + bench.output_tokens = {num_tokens}",
            allowed=f"{num_tokens} or more, or null",
        )
