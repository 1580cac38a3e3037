"""Every choice of every group composes, is checked, and reads as a short document."""

from functools import cache
from importlib.resources import files
from itertools import product

import pytest
from grids import slow_unless
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from hydraspec import factory
from hydraspec.cli.compose import plan
from hydraspec.config import to_dict, to_run_config
from hydraspec.config.build import schema_keys
from hydraspec.config.checks import ALIASES, RULES
from hydraspec.config.choices import choices_of, packaged, packaged_drafters
from hydraspec.config.schema import AUTO, RunConfig
from hydraspec.config.workloads import SOURCES
from hydraspec.speculators import registry

GROUPS = (
    "target",
    "method",
    "engine",
    "parallelism",
    "cudagraph",
    "sampling",
    "workload",
    "bench",
    "tracker",
    "experiment",
)
DRAFTER = "method.checkpoint=/models/drafter"
OF_LOAD = ("num_requests", "max_prompt_tokens", "max_output_tokens", "equal_lengths")
GOODPUT = ("goodput.ttft_ms", "goodput.inter_token_ms")
OF_SERVE = ("rates", "peak_rate", *GOODPUT)
OF_CONTEXT = ("contexts", "drafts", "cell_timeout_s")
OF_TURNS = ("num_conversations", "num_turns", "turn_tokens", "cold_turns")
OF_WORKLOADS = {  # keys that not every workload has
    "random": ("num_requests", "prompt_tokens", "output_tokens"),
    "shared_prefix": (
        *("num_prefixes", "requests_per_prefix"),
        *("prefix_tokens", "suffix_tokens", "output_tokens"),
    ),
    "multi_turn": ("num_conversations", "num_turns", "turn_tokens", "output_tokens"),
    "images": ("num_requests", "thinking"),
    "jsonl": ("thinking",),
    "gsm8k": ("thinking", "chat", "num_shots", "shots_path"),
    "humaneval": ("thinking", "chat"),
    "mt_bench": ("thinking",),
    "spec_bench": ("thinking",),
    "speed_bench": ("thinking", "category"),
    "sharegpt": ("thinking", "max_turns"),
}
NEEDED = {  # what a choice asks its user for
    "target=custom": ["target.checkpoint=/models/some"],
    "workload=jsonl": ["workload.path=prompts.jsonl"],
    **{f"workload={name}": ["workload.path=released.jsonl"] for name in SOURCES},
    "bench=decode": ["engine.max_num_seqs=32"],
    "target=deepseek_v3": ["target.weights=random"],  # released in fp8
    "target=mistral_medium_3_5": ["target.weights=random"],
}
# Not every target names a drafter for them.
WITHOUT_WEIGHTS = {
    name
    for name in choices_of("method")
    if name == "none" or not packaged("method", name).get("needs_checkpoint", True)
}
NEEDED |= {
    f"method={name}": [DRAFTER] for name in registry.SPECULATORS if name not in WITHOUT_WEIGHTS
}
YAML_FILES = sorted(
    path.relative_to(str(files("hydraspec.conf"))).as_posix()
    for path in files("hydraspec.conf").joinpath(".").rglob("*.yaml")
)


def composed(*overrides: str) -> RunConfig:
    needed = [extra for override in overrides for extra in NEEDED.get(override, [])]
    return plan([*overrides, *needed]).jobs[0].config


@pytest.mark.parametrize(
    "override", [f"{group}={choice}" for group in GROUPS for choice in choices_of(group)]
)
def test_choice_composes_and_passes_the_checks(override):
    composed(override)


@cache
def drafters_of(target):
    asked = [f"target={target}", *NEEDED.get(f"target={target}", [])]
    return plan([*asked, "method=none"]).jobs[0].config.target.drafters


def is_quick(method: str, target: str) -> bool:
    """One method of each target, in turn, and the last drafter that the target names. test_choice
    has each target's own default and each method beside the default target."""
    methods, targets = choices_of("method"), choices_of("target")
    in_turn = methods[targets.index(target) % len(methods)]
    return method in (in_turn, *[*packaged_drafters(target)][-1:])


@pytest.mark.parametrize(
    ("method", "target"), slow_unless(is_quick, product(choices_of("method"), choices_of("target")))
)
def test_every_method_meets_every_target(method, target):
    recorded = {"gemma4": "gemma4_mtp"}.get(method, method)
    asked = [f"target={target}", *NEEDED.get(f"target={target}", [])]
    drafters = drafters_of(target)
    given = [] if recorded in drafters or recorded in {*WITHOUT_WEIGHTS, AUTO} else [DRAFTER]
    config = plan([*asked, f"method={method}", *given]).jobs[0].config
    assert config.method.name == recorded
    expected = next(iter(drafters.values()), None) if method == AUTO else drafters.get(recorded)
    assert config.method.checkpoint == ("/models/drafter" if given else expected)


def test_formats_are_compared_with_every_drafter_of_the_target():
    """Catches a drafter of the zoo that the report of one model's formats leaves out."""
    compared = packaged("experiment", "formats")["hydra"]["sweeper"]["params"]
    first, *others = compared["target"].split(",")
    methods = {*compared["method"].split(",")}
    assert methods == {*packaged_drafters(first), *WITHOUT_WEIGHTS} - {"none"}
    for target in others:
        assert packaged_drafters(target).keys() == packaged_drafters(first).keys(), target


def test_group_list_is_complete():
    folders = {path.split("/")[0] for path in YAML_FILES if "/" in path}
    assert folders == {*GROUPS, "hydra"}


def test_the_defaults_of_the_contract():
    config = composed()
    assert (config.target.name, config.method.name) == ("tiny_gemma4", "gemma4_mtp")
    assert (config.engine.name, config.parallelism.name) == ("native", "single")
    assert (config.cudagraph.name, config.sampling.name) == ("full_and_piecewise", "greedy")
    assert (config.workload.name, config.workload.concurrency) == ("tiny", 4)
    assert (config.tracker.name, config.tracker.mode.value) == ("wandb", "offline")
    assert (config.method.num_speculative_tokens, config.baseline, config.seed) == (3, True, 0)
    assert config.method.checkpoint == "zoo:tiny_gemma4-assistant"


@pytest.mark.parametrize("path", YAML_FILES)
def test_yaml_is_a_short_document(path):
    lines = files("hydraspec.conf").joinpath(path).read_text(encoding="utf-8").splitlines()
    title = lines[1] if lines[0].startswith("# @package") else lines[0]
    assert title.startswith("# ")
    assert len(title) > 12
    assert len(lines) <= 25
    if path.startswith("experiment/"):
        assert title.startswith("# python -m hydraspec ")
    assert "_target_" not in "\n".join(lines)


def test_default_yaml_spells_out_every_key_but_those_of_other_choices():
    """A key that only the dataclass knows could not be set without `+`."""
    others = {
        "method.needs_checkpoint",  # drafters without weights: docs/adding_a_speculator.md
        "target.max_soft_tokens",  # targets that read pictures
    }
    sizes = {f"workload.{key}" for keys in OF_WORKLOADS.values() for key in keys}
    of_choices = {
        "workload=tiny": sizes,
        **{
            f"workload={name}": {"workload.path", *(sizes - {f"workload.{key}" for key in keys})}
            for name, keys in OF_WORKLOADS.items()
        },
        "bench=none": {key for key in schema_keys() if key.startswith("bench.")} - {"bench.name"},
        "bench=context": {
            f"bench.{key}" for key in ("prompt_tokens", *OF_LOAD, *OF_SERVE, *OF_TURNS)
        },
        "bench=decode": {f"bench.{key}" for key in (*OF_LOAD, *OF_SERVE, *OF_TURNS, *OF_CONTEXT)},
        "bench=load": {f"bench.{key}" for key in ("batches", *OF_SERVE, *OF_TURNS, *OF_CONTEXT)},
        "bench=serve": {f"bench.{key}" for key in ("batches", "repeats", *OF_TURNS, *OF_CONTEXT)},
        "bench=turns": {
            f"bench.{key}" for key in ("batches", "prompt_tokens", *OF_LOAD, *OF_SERVE, *OF_CONTEXT)
        },
        "engine=native": {key for key in schema_keys() if key.startswith("engine.vllm.")},
        "engine=vllm": {
            *("engine.num_threads", "engine.max_mixing_cost"),
            *(f"engine.kv_cache.{key}" for key in ("block_size", "block_sizes", "memory_fraction")),
        },
    }
    usual = ("workload=tiny", "bench=none", "engine=native")
    with initialize_config_module("hydraspec.conf", version_base="1.3"):
        for override in of_choices:
            group = override.split("=")[0]
            chosen = [override, *(other for other in usual if other.split("=")[0] != group)]
            absent = set().union(*(of_choices[choice] for choice in chosen))
            cfg = compose("config", [override])
            for key in set(schema_keys()) - absent - others:
                assert OmegaConf.select(cfg, key, default="absent") != "absent", key


def test_rules_name_keys_that_there_are():
    """Catches a misspelt key of a benchmark, whose rule no choice would be held to."""
    assert {rule.key for rule in RULES} <= set(schema_keys())


def test_names_in_yaml_have_a_class():
    assert set(choices_of("method")) - ALIASES == set(registry.SPECULATORS)
    assert set(choices_of("engine")) == set(factory.ENGINES)


def test_recorded_configuration_composes_to_itself():
    """config.yaml of a run, read again, is the same run."""
    for overrides in ([], ["method=none"], ["workload=random", "sampling=stochastic"]):
        config = composed(*overrides)
        again = to_run_config(OmegaConf.create(OmegaConf.to_yaml(to_dict(config))))
        assert again == config


def test_experiment_is_a_sweep_over_k():
    planned = plan(["experiment=k_sweep"])
    assert planned.is_sweep
    assert [job.config.method.num_speculative_tokens for job in planned.jobs] == [1, 2, 3, 4, 5, 6]
