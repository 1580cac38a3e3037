"""Runs and sweeps: what reaches the lab (a stand-in), exit statuses, messages and folders."""

import errno
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import hydraspec
from hydraspec.cli import jobs
from hydraspec.cli import run as runs
from hydraspec.config import to_dict
from hydraspec.errors import CannotWriteError, CheckpointError, ConfigurationError


def test_a_run_reaches_the_lab_whole(lab, command, tmp_path):
    assert command("method=none", "seed=7") == 0
    ((config, run_dir, overrides, resolved),) = lab.runs
    assert (config.method.name, config.seed) == ("none", 7)
    assert overrides == ["method=none", "seed=7"]
    assert resolved == to_dict(config)
    assert run_dir.parents[1] == tmp_path / "outputs"
    assert {path.name for path in run_dir.iterdir()} == {
        "config.yaml",
        "overrides.yaml",
        "summary.json",
    }
    assert lab.compared == []


def test_runs_of_one_second_have_different_folders(lab, command, monkeypatch, tmp_path):
    """Catches folders named by the second alone: the later run would overwrite the other."""
    planned = runs.plan

    def at_noon(*args, **options):
        plan = planned(*args, **options)
        plan.move_to(Path("outputs/it's a day/12-00-00"))
        return plan

    monkeypatch.setattr(runs, "plan", at_noon)
    monkeypatch.setattr("hydraspec.cli.from_python.plan", at_noon)
    assert [command("method=none") for _ in range(2)] == [0, 0]
    result = hydraspec.run(["method=none"])
    assert command("-m", "seed=1,2") == 0
    day = tmp_path / "outputs" / "it's a day"
    assert [folder for _, folder, *_ in lab.runs] == [
        *(day / name for name in ("12-00-00", "12-00-00-1", "12-00-00-2")),
        *(day / "12-00-00-3" / job for job in "01"),
    ]
    assert result["run_dir"] == str(day / "12-00-00-2")
    assert lab.runs[0][2] == lab.runs[2][2] == ["method=none"]


def test_warnings_of_the_configuration_are_printed_by_the_lab_only(lab, command, capsys):
    """Catches a warning that is printed twice, in the log and in the final block."""
    assert command("sampling.top_k=5") == 0
    assert lab.runs[0][0].warnings == ["sampling.top_k=5 has no effect at temperature 0"]
    assert "no effect" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("typed", ["hydra.run.dir=here", "hydra.run={dir: here}"])
def test_the_run_folder_is_that_of_hydra_run_dir(lab, command, tmp_path, typed):
    """Again and again, as its name was chosen."""
    assert command(typed) == command(f"++{typed}") == 0
    hydraspec.run([typed])
    assert {folder for _, folder, *_ in lab.runs} == {tmp_path / "here"}


def test_an_error_of_the_runs_folder_is_one_message(lab, command, capsys):
    """Other messages and statuses are in test_front.py."""
    lab.raises[0] = PermissionError(errno.EACCES, "Permission denied", "outputs")
    assert command() == 1
    printed = capsys.readouterr().err
    assert printed.startswith("hydraspec: outputs: Permission denied\n")
    assert "hydra.run.dir=<folder>" in printed


NO_CHOICES = {
    "tracker=false": "did you mean tracker=none?",
    "parallelism=2": "tp2",
    "cudagraph=false": "did you mean cudagraph=none?",
    "engine=5": "native, transformers, vllm",
    "experiment=5": "k_sweep",
    "method=1.5": "eagle3",
}
REFUSED = {
    "-m method.num_speculative_tokens=1,100": ["=100 is out of range"],
    "--mutirun": ["--mutirun", "did you mean --multirun?"],
    "--cfg job method.k=1": ["method.k", "num_speculative_tokens"],
    "hydra/launcher=joblib": ["hydra/launcher=joblib", "basic"],
    "--multirun --cfg job": ["--multirun --cfg: flags that exclude each other"],
    "-r -m": ["--run --multirun: flags that exclude each other"],
    "--resolve": ["--resolve: a flag of --cfg"],
    "hydra.run.dir=": ["hydra.run.dir='' names no folder"],
    "++hydra.run.dir=''": ["names no folder"],
    "hydra.sweep.dir=null": ["names no folder"],
    **{typed: [f"{typed} is no choice", means] for typed, means in NO_CHOICES.items()},
    "-m seed=1,2 engine=native,5": ["engine=5 is no choice"],
    "doctor engine=5": ["engine=5 is no choice"],
    "predict -m parallelism=single,2": ["parallelism=2 is no choice"],
    "doctor experiment=k_sweep": ["asks for a sweep"],
    "doctor --info": ["--info: an examination is of one drafter"],
}


@pytest.mark.parametrize("typed", REFUSED)
def test_a_wrong_configuration_stops_before_anything_is_touched(
    lab, command, capsys, tmp_path, typed
):
    assert command(*typed.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    for part in REFUSED[typed]:
        assert part in captured.err
    assert len(captured.err.splitlines()) == 3
    assert lab.runs == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "flags"), [("hydra.run.dir", []), ("hydra.sweep.dir", ["-m", "seed=1"])]
)
@pytest.mark.parametrize("folder", ["a file", "n" * 300, "/proc/hydraspec"])
def test_a_folder_that_cannot_be_made_is_one_message(command, capsys, tmp_path, key, flags, folder):
    if folder.startswith("/proc") and not Path("/proc/self").exists():
        pytest.skip("no /proc here")
    (tmp_path / "a file").touch()
    assert command(*flags, f"{key}='{folder}'") == 2
    said = capsys.readouterr().err
    assert said.startswith("hydraspec: ")
    assert folder in said
    assert "hydra.run.dir=<folder>" in said
    assert len(said.splitlines()) == 3


def test_cfg_prints_the_configuration(lab, command, capsys):
    assert command("target=tiny_gemma4_e", "--cfg", "job") == 0
    printed = OmegaConf.create(capsys.readouterr().out)
    assert printed.target.name == "tiny_gemma4_e"
    assert "hydra" not in printed
    assert lab.runs == []


def test_several_threads_are_bound_before_torch_loads(lab, command, monkeypatch):
    monkeypatch.delenv("OMP_PROC_BIND")
    seen = []
    monkeypatch.setattr(jobs.os.environ, "setdefault", lambda *pair: seen.append(pair))
    command("engine.num_threads=1")
    assert seen == []
    command("engine.num_threads=2")
    assert seen == [("OMP_PROC_BIND", "true")]


# --------------------------------------------------------------------------- sweeps


def sweep(command, *argv, folder="sweep"):
    return command("-m", f"hydra.sweep.dir={folder}", *argv)


CROSSED = ("method=none,gemma4_mtp", "method.num_speculative_tokens=1,3")


def test_equal_jobs_of_a_sweep_run_once(lab, command, tmp_path):
    assert sweep(command, *CROSSED) == 0
    assert lab.drafts == [0, 1, 3]
    folder = tmp_path / "sweep"
    results = [json.loads((folder / n / "summary.json").read_text()) for n in "0123"]
    assert [result.get("reused_from") for result in results] == [None, "0", None, None]
    overrides = OmegaConf.load(folder / "1" / "overrides.yaml")
    assert overrides == ["method=none", "method.num_speculative_tokens=3"]
    assert [Path(folder).name for folder in lab.compared] == ["sweep"]


def test_a_pair_without_a_drafter_is_skipped(lab, command, tmp_path, capsys):
    """Its number stays; the sweep resumes; where no pair is left, the first is refused."""
    pairs = ["target=tiny_qwen3,tiny_mistral", "method=none,eagle"]
    for _ in range(2):
        assert sweep(command, *pairs) == 0
        assert [Path(folder).name for _, folder, *_ in lab.runs] == ["0", "2", "3"]
    folder = tmp_path / "sweep" / "1"
    assert "tiny_qwen3 names none" in json.loads((folder / "skipped.json").read_text())["reason"]
    assert OmegaConf.load(folder / "overrides.yaml") == ["target=tiny_qwen3", "method=eagle"]
    assert sweep(command, "target=tiny_qwen3", "method=eagle,gemma4_mtp", folder="none") == 2
    assert "method=eagle without a drafter" in capsys.readouterr().err


def test_a_sweep_is_one_group(lab, command, tmp_path):
    sweep(command, "seed=1,2")
    assert {config.tracker.group for config, *_ in lab.runs} == {f"{tmp_path.name}/sweep"}
    sweep(command, "seed=1,2", "tracker.group=mine", folder="named")
    assert {config.tracker.group for config, *_ in lab.runs[2:]} == {"mine"}


def test_a_sweep_started_again_resumes(lab, command, capsys):
    lab.raises[1] = KeyboardInterrupt()
    assert sweep(command, *CROSSED) == 130
    assert "interrupted: what was finished is saved\n" in capsys.readouterr().err
    assert lab.drafts == [0, 1]
    assert len(lab.compared) == 1  # what there is
    lab.raises.clear()
    lab.status = "failed"
    assert sweep(command, *CROSSED) == 1
    lab.status = "ok"
    for _ in range(2):
        assert sweep(command, *CROSSED) == 0
        assert lab.drafts == [0, 1, 1, 3, 1, 3]


def test_the_folder_of_another_sweep_is_left_alone(lab, command, capsys):
    sweep(command, "seed=1,2")
    capsys.readouterr()
    assert sweep(command, "seed=2,1") == 2
    assert "job 0 has a different configuration" in capsys.readouterr().err
    assert len(lab.runs) == 2


def test_a_sweep_goes_on_past_a_job_that_cannot_run(lab, command, capsys):
    lab.raises[0] = CheckpointError("gemma: no such folder")
    assert sweep(command, "seed=1,2,3") == 3
    assert len(lab.runs) == 3
    assert "hydraspec: gemma: no such folder" in capsys.readouterr().err
    assert len(lab.compared) == 1


def test_a_sweep_stops_at_a_full_disk(lab, command):
    lab.raises[1] = CannotWriteError(errno.ENOSPC, "No space left on device", "sweep/1")
    assert sweep(command, "seed=1,2,3") == 1
    assert len(lab.runs) == 2


def test_auto_equals_the_method_it_stands_for(lab, command, tmp_path):
    """Also where a sweep is started again: what is recorded is the method that ran."""
    typed = ("target=tiny_qwen3", "method=auto,eagle3")
    for _ in range(2):
        assert sweep(command, *typed) == 0
        assert [config.method.name for config, *_ in lab.runs] == ["eagle3"]
    recorded = OmegaConf.load(tmp_path / "sweep" / "0" / "config.yaml")
    assert recorded.method.name == "eagle3"
    assert recorded.method.num_speculative_tokens == 3
    assert recorded.method.checkpoint == "zoo:tiny_qwen3-eagle3"
    assert sweep(command, "target=tiny_qwen3", "method=auto,peagle") == 2


# --------------------------------------------------------------------------- Python


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["method.num_speculative_tokens=0"], "1 to 32"),
        (["seed=1,2"], "several values"),
        (["experiment=k_sweep"], "asks for a sweep"),
        (["hydra.run.dir="], "names no folder"),
        *((wrong, "a list of strings") for wrong in ("method=none", ["method=none", 3], None)),
    ],
    ids=repr,
)
def test_run_from_python_raises(command, overrides, says):
    with pytest.raises(ConfigurationError, match=says):
        hydraspec.run(overrides)


# --------------------------------------------------------------------------- as a program


def test_composing_needs_no_heavy_package():
    code = (
        "import sys; from hydraspec import factory; from hydraspec.cli import compose;"
        "compose.plan([]);"
        "heavy = {'torch', 'transformers', 'wandb', 'matplotlib', 'numpy', 'hydraspec.lab.run'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_lab_has_the_hooks_we_call():
    """Catches a stand-in that no longer has the signature of the real lab."""
    from hydraspec.lab import run
    from hydraspec.study import sweep as compare

    inspect.signature(run.run).bind(None, run_dir=None, overrides=[], quiet=True)
    inspect.signature(compare.compare).bind(None)
