"""Values that are filled in after composition: names, drafters, and what plain decoding ignores."""

import pytest

from hydraspec.cli.compose import plan
from hydraspec.cli.overrides import with_method
from hydraspec.config import to_dict
from hydraspec.config.schema import Dtype


def one(*overrides):
    (config,) = (job.config for job in plan(overrides).jobs)
    return config


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        ("/models/my-gemma/", "my-gemma"),
        ("google/gemma-4-E2B-it", "gemma-4-E2B-it"),
        ("zoo:tiny_gemma4_e", "tiny_gemma4_e"),
        ("relative", "relative"),
    ],
)
def test_custom_target_is_called_by_its_folder(checkpoint, name):
    config = one("target=custom", f"target.checkpoint={checkpoint}", "method=none")
    assert config.target.name == name


def test_a_named_target_with_another_checkpoint_does_not_keep_the_name():
    config = one("target.checkpoint=/models/other", "method.checkpoint=/models/drafter")
    assert config.target.name == "other"
    assert config.method.checkpoint == "/models/drafter"


def test_the_target_names_the_drafter():
    assert one("target=gemma4_31b").method.checkpoint == "google/gemma-4-31B-it-assistant"


def test_plain_decoding_records_no_drafts_and_says_so():
    config = one("method=none", "method.num_speculative_tokens=3", "method.verification=block")
    assert config.method.num_speculative_tokens == 0
    assert [warning.split(" has")[0] for warning in config.warnings] == [
        "method.num_speculative_tokens=3",
        "method.verification=block",
    ]
    assert all("recorded as" in warning for warning in config.warnings)
    assert one("method=none").warnings == []


def test_out_of_range_k_is_no_matter_where_k_is_not_used():
    """A sweep combines method=none with every K."""
    config = one("method=none", "method.num_speculative_tokens=100")
    assert config.method.num_speculative_tokens == 0


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (["sampling.top_p=0.9"], "sampling.top_p=0.9 has no effect at temperature 0"),
        (["method.draft_sampling=probabilistic"], "drafts greedily at temperature 0"),
        (["workload.burstiness=2"], "workload.burstiness=2.0 has no effect without"),
        (["bench=load", "workload.request_rate=2"], "workload.request_rate=2.0 has no effect with"),
        (["cudagraph=none", "cudagraph.capture_sizes=[1,2]"], "capture_sizes has no effect"),
        (["workload=random", "sampling.stop=[x]"], "no effect with workload=random"),
        (["tracker=none", "tracker.mode=online"], "tracker.mode=online has no effect with"),
    ],
)
def test_what_has_no_effect_is_warned_about(overrides, warning):
    (given,) = one(*overrides).warnings
    assert warning in given


def test_no_experiment_is_a_choice():
    """Hydra has no null for a group that is swept or chosen."""
    assert one("experiment=null") == one()
    planned = plan(["experiment=bench_gemma4,null"], multirun=True)
    assert [job.config.bench.name for job in planned.jobs] == ["decode", "none"]
    assert with_method(["experiment=null", "target=tiny_qwen3"])[0] == "experiment=[]"


@pytest.mark.parametrize(
    ("overrides", "caches"),
    [
        ([], True),
        (["experiment=bench_gemma4"], False),
        (["experiment=bench_gemma4", "bench=load", "engine=vllm"], False),
    ],
)
def test_benchmarks_of_random_prompts_cache_no_prefixes(overrides, caches):
    """In every engine alike: one of them would find what an earlier repeat has left."""
    assert one(*overrides).engine.prefix_caching is caches


def test_plain_values_only():
    plain = to_dict(one("target.dtype=bfloat16", "engine.kv_cache.memory_gib=2"))
    assert plain["target"]["dtype"] == Dtype.bfloat16.value
    assert plain["engine"]["kv_cache"] == {
        "dtype": "auto",
        "block_size": 16,
        "block_sizes": {},
        "memory_gib": 2.0,
        "memory_fraction": None,
    }
    assert "warnings" not in plain


def test_a_sweep_is_composed_whole():
    planned = plan(["method=none,gemma4_mtp", "method.num_speculative_tokens=1,3"], multirun=True)
    drafts = [
        (job.config.method.name, job.config.method.num_speculative_tokens) for job in planned.jobs
    ]
    assert drafts == [("none", 0), ("none", 0), ("gemma4_mtp", 1), ("gemma4_mtp", 3)]
