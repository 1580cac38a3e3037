"""How many prompts a run had and could have, and the warning of a limit above them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from fake_runs import write_lines

from hydraspec.config.schema import RunConfig, WorkloadConfig
from hydraspec.lab.workload_size import limit_warnings, workload_size
from hydraspec.workloads import generated, reading
from hydraspec.workloads.reading import Workload

MADE = {
    "random": {"num_requests": 5, "prompt_tokens": 4},
    "shared_prefix": {"num_prefixes": 2, "requests_per_prefix": 3},
    "multi_turn": {"num_conversations": 3, "num_turns": 2, "turn_tokens": 4},
    "images": {"num_requests": 3},
}
SIZES = {  # key, its value, and how many prompts workload.limit may choose from
    "random": ("workload.num_requests", 5, 5),
    "shared_prefix": ("workload.num_prefixes", 2, 6),
    "multi_turn": ("workload.num_conversations", 3, 3),
    "images": ("workload.num_requests", 3, 3),
}


def made(config: RunConfig, name: str, limit: int | None = None) -> Workload:
    keys: dict[str, Any] = MADE[name]
    config.workload = WorkloadConfig(name=name, limit=limit, output_tokens=4, **keys)
    return reading.read(config) or generated.random_requests(config, 100)


@pytest.mark.parametrize("name", MADE)
def test_made_workloads_have_any_number_of_prompts(config: RunConfig, name: str) -> None:
    key, value, has = SIZES[name]
    assert workload_size(config, made(config, name)) == {"key": key, "value": value, "most": None}
    assert limit_warnings(config, workload_size(config, made(config, name, limit=has))) == []
    above = workload_size(config, made(config, name, limit=has + 1))
    (warning,) = limit_warnings(config, above)
    assert warning.startswith(f"workload.limit={has + 1} has no effect: workload={name} has {has} ")
    assert warning.endswith(f"to try: a higher {key}")
    few = workload_size(config, made(config, name, limit=1))
    assert (few["key"], few["value"]) == (key, 1)


def test_a_file_has_as_many_prompts_as_lines(config: RunConfig) -> None:
    """Catches a conversation of several turns that counts as several prompts."""
    turns = {"turns": ["a", "b"]}
    config.workload.path = str(write_lines(Path(str(config.workload.path)), [turns, turns, turns]))
    config.workload.limit = 2
    found = reading.read(config)
    assert found is not None
    assert len(found.requests) == 4
    assert workload_size(config, found) == {"key": "workload.limit", "value": 2, "most": 3}


def test_conversations_of_a_file_end_with_its_lines(config: RunConfig) -> None:
    lines = [{"messages": [{"role": "user", "content": str(i)}]} for i in range(7)]
    path = str(write_lines(Path(str(config.workload.path)), lines))
    config.workload = WorkloadConfig(
        name="multi_turn", path=path, num_conversations=2, num_turns=2, limit=1
    )
    found = reading.read(config)
    assert found is not None
    key = "workload.num_conversations"
    assert workload_size(config, found) == {"key": key, "value": 1, "most": 3}


def test_a_limit_above_the_prompts_is_a_warning_of_the_run(
    config: RunConfig,
    use_engine: Callable[[FakeEngine], FakeEngine],
    run_config: Callable[[], dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Catches a typed limit that is ignored in silence."""
    use_engine(FakeEngine())
    config.workload.limit = 6
    assert not any("workload.limit" in warning for warning in run_config()["warnings"])
    config.workload.limit = 160
    with caplog.at_level(logging.WARNING):
        summary = run_config()
    (warning,) = (each for each in summary["warnings"] if "workload.limit" in each)
    assert warning in caplog.messages
    assert "workload.limit=160 has no effect: workload=jsonl has 6 prompts" in warning
    assert summary["num_requests"] == 6
    assert summary["workload_size"] == {"key": "workload.limit", "value": 6, "most": 6}
