"""What trackers record of a configuration, and the keys of the tracker."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydraspec.cli.compose import plan
from hydraspec.config.names import run_name
from hydraspec.config.used import used
from hydraspec.errors import ConfigurationError


def test_keys_that_nothing_reads_are_left_out() -> None:
    (job,) = plan(["method=none", "sampling.max_tokens=9"]).jobs
    found = used(job.config)
    assert found["method"] == {"name": "none"}
    assert "bench" not in found
    assert "tracker" not in found
    assert "vllm" not in found["engine"]
    assert found["parallelism"] == {"name": "single"}
    assert set(found["workload"]) == {"name", "path", "limit", "concurrency", "request_rate"}
    assert "top_p" not in found["sampling"]
    assert found["sampling"]["max_tokens"] == 9


def test_keys_that_are_read_stay() -> None:
    typed = ["workload=random", "sampling=stochastic", "parallelism=tp2", "engine.device=cpu"]
    typed += ["workload.request_rate=2", "workload.goodput.ttft_ms=5"]
    found = used(plan(typed).jobs[0].config)
    assert {"num_requests", "prompt_tokens", "burstiness", "goodput"} <= set(found["workload"])
    assert "num_turns" not in found["workload"]
    assert found["parallelism"]["tensor"] == 2
    assert found["method"]["num_speculative_tokens"] == 3
    assert "top_p" in found["sampling"]


def test_runs_of_a_sweep_are_named_by_what_differs(tmp_path: Path) -> None:
    typed = ["method=none,eagle3", "method.num_speculative_tokens=2,4", "workload.concurrency=1"]
    jobs = plan([*typed, "seed=0"], multirun=True).jobs
    assert [job.config.tracker.name for job in jobs] == [
        "no drafts",
        "no drafts",
        "eagle3, K=2",
        "eagle3, K=4",
    ]
    (given,) = plan(["seed=1", "tracker.name=mine"], multirun=True).jobs
    assert given.config.tracker.name == "mine"
    (alone,) = plan(["seed=1"], multirun=True).jobs
    assert alone.config.tracker.name == "wandb"


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ([], "own-3"),
        (["method=eagle3", "target=tiny_qwen3", "method.num_speculative_tokens=5"], "own-3"),
        (
            ["workload.concurrency=16", "tracker.mode=online", "seed=1"],
            "own-3, concurrency=16, seed=1",
        ),
        (["hydra.run.dir=/x/y", "workload=random"], "own-3, random"),
        (["method.checkpoint=/a/head-7/", "+engine.x=1"], "own-3, checkpoint=head-7, x=1"),
        (["sampling.stop=['</a>','</b>']"], "own-3, stop=['</a>','</b>']"),
    ],
)
def test_a_single_run_is_named_by_what_was_typed(typed: list[str], name: str) -> None:
    """Catches runs with other concurrency, drafters or seeds that share a name."""
    assert run_name(plan([]).jobs[0].config, typed, own="own-3") == name


def test_a_run_may_be_named() -> None:
    typed = ["tracker.name=my run", "tracker.tags=[a]", "tracker.notes=n"]
    tracker = plan(typed).jobs[0].config.tracker
    assert (tracker.name, tracker.tags, tracker.notes) == ("my run", ["a"], "n")
    assert tracker.records


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["tracker.name="], "names no run"),
        (["tracker.name=x", "tracker.mode=disabled"], "nothing is recorded"),
        (["tracker=none", "tracker.name=x"], "nothing is recorded"),
        (["tracker.tags=['']"], "a tag that W&B refuses"),
        ([f"tracker.tags=[{'t' * 65}]"], "1 to 64"),
    ],
)
def test_what_wandb_would_refuse_is_refused(typed: list[str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        plan(typed)
