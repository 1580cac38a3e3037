"""Settings that are decided before a run folder is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydraspec.cli.compose import plan
from hydraspec.config import RunConfig
from hydraspec.errors import CheckpointError
from hydraspec.lab.resolution import check_folders, resolve


@pytest.mark.parametrize(
    ("asked", "typed", "threads"),
    [
        ("2", [], 2),
        ("2", ["engine.num_threads=1"], 1),
        ("1", [], None),
        ("4,2", [], None),
    ],
)
def test_threads_are_those_of_the_environment_where_no_key_says_so(
    asked: str, typed: list[str], threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches one thread for a narrow target whatever OMP_NUM_THREADS says."""
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    config = plan(["engine.device=cpu", *typed]).jobs[0].config
    resolve(config)
    assert config.engine.num_threads == threads


def resolve_and_look(config: RunConfig) -> None:
    resolve(config)
    check_folders(config)


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        (["target=custom", "target.checkpoint=/nope"], "target.checkpoint"),
        (["target=custom", "method=none", "target.checkpoint=./nope"], "target.checkpoint"),
        (["method.checkpoint=/nope"], "method.checkpoint"),
        (["method=auto", "method.checkpoint=/nope"], "method.checkpoint"),
        (["method.checkpoint=models/a/nope"], "method.checkpoint"),
        (["target=custom", "method=none", "target.checkpoint=nope"], "target.checkpoint"),
        (["target=custom", "method=none", "target.checkpoint='~nobody/x'"], "target.checkpoint"),
        (["method=auto", "method.checkpoint='~nobody/x'"], "method.checkpoint"),
    ],
)
def test_a_folder_that_does_not_exist_is_told_by_its_key(typed: list[str], key: str) -> None:
    """Catches one message for target and drafter, which does not say which of them is wrong."""
    config = plan(["engine.device=cpu", *typed]).jobs[0].config
    with pytest.raises(CheckpointError) as refused:
        resolve_and_look(config)
    message = str(refused.value).splitlines()
    value = typed[-1].partition("=")[2].strip("'")
    assert message[0] == f"{key}={value} does not exist"
    assert message[1].startswith("  allowed: a folder with config.json")
    assert message[2] == "  to do: check the spelling"
    assert refused.value.key == key


def test_hub_ids_and_drafters_that_are_not_read_are_no_folders_to_look_for(tmp_path: Path) -> None:
    typed = ["target=custom", "target.checkpoint=someone/model", "method=none"]
    config = plan(typed).jobs[0].config
    config.method.checkpoint, config.method.needs_checkpoint = "/nope", False
    check_folders(config)
    config.target.checkpoint = str(tmp_path)
    check_folders(config)
