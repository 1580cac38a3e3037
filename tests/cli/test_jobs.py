"""A command's jobs: composed once, run in the settings of Hydra's keys, a short way to the step."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import OmegaConf

import hydraspec
from hydraspec.engine.native import NativeEngine
from hydraspec.errors import CheckpointError
from hydraspec.lab.rounds import Measurement

MOST_FUNCTIONS = 8  # from main to step, both counted
PACKAGE = str(Path(hydraspec.__file__).parent)


@pytest.mark.parametrize(
    ("argv", "times"),
    [
        ([], 1),
        (["target=custom", "target.checkpoint=zoo:tiny_gemma4", "method=none"], 1),
        (["sampling.name=greedy"], 1),
        (["-m", "seed=1,2,3"], 1 + 3),  # the sweep's own settings, and each job
        (["experiment=k_sweep"], 1 + 6),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_every_job_is_composed_once(lab, command, monkeypatch, argv, times):
    """Catches a job that composes again what was planned."""
    composed = []
    load = ConfigLoaderImpl.load_configuration

    def counted(self, *args, **options):
        composed.append(args)
        return load(self, *args, **options)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", counted)
    assert command(*argv) == 0
    assert len(composed) == times
    if "-m" not in argv and times == 1:
        hydraspec.run(argv)
        assert len(composed) == 2


@pytest.mark.parametrize(
    ("flags", "folder", "jobs"),
    [
        (["hydra.run.dir=out"], "out", [""]),
        (["-m", "hydra.sweep.dir=out", "seed=1,2"], "out", "01"),
    ],
    ids=["run", "sweep"],
)
def test_jobs_have_the_settings_of_hydras_keys(lab, command, tmp_path, flags, folder, jobs):
    typed = ["hydra.job.chdir=true", "+hydra.job.env_set.COLOUR=blue", "hydra.output_subdir=.hydra"]
    assert command(*flags, *typed, "hydra/job_logging=default") == 0
    folders = [tmp_path / folder / job for job in jobs]
    assert [run_dir for _, run_dir, *_ in lab.runs] == folders
    assert lab.settings == [(place, "blue") for place in folders]
    assert Path.cwd() == tmp_path
    assert "COLOUR" not in os.environ
    for place in folders:
        assert "a line of the log" in (place / "hydraspec.log").read_text()
        assert OmegaConf.load(place / ".hydra" / "config.yaml").target.name == "tiny_gemma4"
        assert OmegaConf.load(place / ".hydra" / "hydra.yaml").hydra.job.name == "hydraspec"
        assert (place / ".hydra" / "overrides.yaml").is_file()


def test_folders_of_jobs_are_named_by_their_values(lab, command, tmp_path):
    typed = ["hydra.sweep.dir=${method.name}", "hydra.sweep.subdir=s${seed}"]
    assert command("-m", "method=none", "seed=1,2", *typed) == 0
    assert [folder for _, folder, *_ in lab.runs] == [
        tmp_path / "none" / name for name in ("s1", "s2")
    ]
    assert (tmp_path / "none" / "multirun.yaml").is_file()


def test_a_key_typed_twice_has_its_last_values(lab, command):
    """As with Hydra's own sweeper, also where an experiment sweeps it."""
    assert command("experiment=k_sweep", "method.num_speculative_tokens=2") == 0
    assert lab.drafts == [2]


def test_nothing_runs_without_the_folder_of_a_checkpoint(lab, command, capfd):
    """Catches a folder that is looked for once an engine loads, which does not know its key."""
    typed = ["target=custom", "target.checkpoint=/nope", "method=none"]
    assert command(*typed) == 3
    assert "hydraspec: target.checkpoint=/nope does not exist" in capfd.readouterr().err
    assert not lab.runs
    with pytest.raises(CheckpointError, match=r"target\.checkpoint=/nope does not exist"):
        hydraspec.build_engine(typed)


def test_a_step_is_few_functions_away(command, monkeypatch):
    """Catches another layer between the command and the loop."""
    stacks: list[list[str]] = []

    def step(self: NativeEngine, *args: Any) -> Any:
        frames = traceback.extract_stack()
        stacks.append([f"{f.filename}:{f.name}" for f in frames if f.filename.startswith(PACKAGE)])
        raise RuntimeError("the stack is known")

    monkeypatch.setattr(NativeEngine, "step", step)
    monkeypatch.setattr(Measurement, "warm_up", lambda self: None)
    typed = ["hydra.run.dir=run", "tracker=none", "workload.limit=1", "method=none"]
    with pytest.raises(RuntimeError, match="the stack is known"):
        command(*typed)
    (stack,) = stacks
    assert len(stack) + 1 <= MOST_FUNCTIONS  # and the step itself, "\n".join(stack)
