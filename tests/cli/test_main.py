"""The command line: what reaches the lab (a stand-in), exit statuses, messages and sweeps."""

import errno
import inspect
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
from omegaconf import OmegaConf

import hydraspec
from hydraspec.cli import main as cli
from hydraspec.config import to_dict
from hydraspec.config.choices import choices_of
from hydraspec.errors import CannotWriteError, CheckpointError, ConfigurationError, WorkloadError


@dataclass
class StandIn:
    """A stand-in for hydraspec.lab: records its calls and writes the files of a run folder."""

    runs: list = field(default_factory=list)
    compared: list = field(default_factory=list)
    raises: dict = field(default_factory=dict)  # place of the run → exception
    status: str = "ok"

    def run(self, config, *, run_dir, overrides, quiet=False):
        resolved = to_dict(config)
        self.runs.append((config, run_dir, overrides, resolved))
        error = self.raises.get(len(self.runs) - 1)
        if error is not None:
            raise error
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(resolved))
        (run_dir / "overrides.yaml").write_text(OmegaConf.to_yaml(overrides))
        summary = {"status": self.status, "method": config.method.name, "run": len(self.runs) - 1}
        (run_dir / "summary.json").write_text(json.dumps(summary))
        return summary

    def compare(self, sweep_dir):
        self.compared.append(sweep_dir)

    @property
    def drafts(self):
        return [config.method.num_speculative_tokens for config, *_ in self.runs]


@pytest.fixture
def lab(monkeypatch, tmp_path):
    stand_in = StandIn()
    for name, attribute in (("lab.run", "run"), ("study.sweep", "compare")):
        module = ModuleType(f"hydraspec.{name}")
        setattr(module, attribute, getattr(stand_in, attribute))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # main sets it: restored afterwards
    monkeypatch.setenv("OMP_PROC_BIND", "")
    monkeypatch.setattr(cli, "ignore_interrupts", lambda: None)  # this process goes on
    return stand_in


@pytest.fixture
def hydraspec_main(monkeypatch):
    def call(*argv):
        monkeypatch.setattr(sys, "argv", ["hydraspec", *argv])
        return cli.main()

    return call


def test_a_run_reaches_the_lab_whole(lab, hydraspec_main, tmp_path):
    assert hydraspec_main("method=none", "seed=7") == 0
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


def test_runs_of_one_second_have_different_folders(lab, hydraspec_main, monkeypatch, tmp_path):
    """Catches folders named by the second alone: the later run would overwrite the other."""
    planned = cli.plan

    def at_noon(*args, **options):
        plan = planned(*args, **options)
        plan.move_to(Path("outputs/it's a day/12-00-00"))
        return plan

    monkeypatch.setattr(cli, "plan", at_noon)
    monkeypatch.setattr("hydraspec.cli.from_python.plan", at_noon)
    assert [hydraspec_main("method=none") for _ in range(2)] == [0, 0]
    hydraspec.run(["method=none"])
    assert hydraspec_main("-m", "seed=1,2") == 0
    day = tmp_path / "outputs" / "it's a day"
    assert [folder.resolve() for _, folder, *_ in lab.runs] == [
        *(day / name for name in ("12-00-00", "12-00-00-1", "12-00-00-2")),
        *(day / "12-00-00-3" / job for job in "01"),
    ]
    assert lab.runs[0][2] == ["method=none"]


def test_warnings_of_the_configuration_are_printed_by_the_lab_only(lab, hydraspec_main, capsys):
    """Catches a warning that is printed twice, in the log and in the final block."""
    assert hydraspec_main("sampling.top_k=5") == 0
    assert lab.runs[0][0].warnings == ["sampling.top_k=5 has no effect at temperature 0"]
    assert "no effect" not in "".join(capsys.readouterr())


def test_the_run_folder_is_that_of_hydra_run_dir(lab, hydraspec_main, tmp_path):
    assert hydraspec_main("hydra.run.dir=here") == 0
    assert hydraspec_main("++hydra.run.dir=here") == 0
    hydraspec.run(["hydra.run.dir=here"])
    assert {folder.resolve() for _, folder, *_ in lab.runs} == {tmp_path / "here"}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigurationError("engine.device=cuda"), 2),
        (CheckpointError("model.safetensors is cut off"), 3),
        (WorkloadError("prompts.jsonl line 4"), 3),
        (KeyboardInterrupt(), 130),
        (CannotWriteError(errno.ENOSPC, "No space left on device", "outputs/summary.json"), 1),
        (PermissionError(errno.EACCES, "Permission denied", "outputs"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_exit_status_and_one_message(lab, hydraspec_main, capsys, error, status):
    lab.raises[0] = error
    assert hydraspec_main() == status
    printed = capsys.readouterr().err
    assert printed.startswith("hydraspec: ")
    assert printed.count("hydraspec: ") == 1
    assert "Traceback" not in printed
    assert "Error executing job" not in printed
    assert len(printed.splitlines()) <= 3


def test_full_disk_names_file_and_remedy(lab, hydraspec_main, capsys):
    lab.raises[0] = CannotWriteError(
        errno.ENOSPC, "No space left on device", "outputs/summary.json"
    )
    hydraspec_main()
    printed = capsys.readouterr().err
    assert "outputs/summary.json: there is no space left" in printed
    assert "hydra.run.dir=" in printed


def test_unexpected_exceptions_keep_their_traceback(lab, hydraspec_main):
    lab.raises[0] = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        hydraspec_main()


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("failed", 1), ("interrupted", 130)])
def test_summary_status_decides(lab, hydraspec_main, status, code):
    lab.status = status
    assert hydraspec_main() == code


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["method.num_speculative_tokens=0"], ["num_speculative_tokens=0", "1 to 32"]),
        (["+method.k=1"], ["method.k=1 is no key"]),
        (["method=eagle33"], ["method=eagle33", "gemma4_mtp"]),
        (["-m", "method.num_speculative_tokens=1,100"], ["=100 is out of range"]),
        (["--mutirun"], ["--mutirun", "did you mean --multirun?"]),
        (["--cfg", "job", "method.k=1"], ["method.k", "num_speculative_tokens"]),
        (["hydra/launcher=joblib"], ["hydra/launcher=joblib", "basic"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_configuration_stops_before_anything_is_touched(
    lab, hydraspec_main, capsys, tmp_path, argv, parts
):
    assert hydraspec_main(*argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    for part in parts:
        assert part in captured.err
    assert len(captured.err.splitlines()) <= 3
    assert lab.runs == []
    assert list(tmp_path.iterdir()) == []


def test_cfg_prints_the_configuration(lab, hydraspec_main, capsys):
    assert hydraspec_main("target=tiny_gemma4_e", "--cfg", "job") == 0
    printed = OmegaConf.create(capsys.readouterr().out)
    assert printed.target.name == "tiny_gemma4_e"
    assert "hydra" not in printed
    assert lab.runs == []


def test_help_lists_groups(lab, hydraspec_main, capsys):
    with pytest.raises(SystemExit) as left:
        hydraspec_main("--help")
    assert left.value.code == 0
    printed = capsys.readouterr().out
    assert f"method: {', '.join(choices_of('method'))}" in printed
    assert "hydraspec -m method=none,gemma4_mtp" in printed


def test_several_threads_are_bound_before_torch_loads(lab, hydraspec_main, monkeypatch):
    monkeypatch.delenv("OMP_PROC_BIND")
    seen = []
    monkeypatch.setattr(cli.os.environ, "setdefault", lambda *pair: seen.append(pair))
    hydraspec_main("engine.num_threads=1")
    assert seen == []
    hydraspec_main("engine.num_threads=2")
    assert seen == [("OMP_PROC_BIND", "true")]


# --------------------------------------------------------------------------- sweeps


def sweep(hydraspec_main, *argv, folder="sweep"):
    return hydraspec_main("-m", f"hydra.sweep.dir={folder}", *argv)


def summaries(folder):
    return [
        json.loads((folder / str(n) / "summary.json").read_text())
        for n in range(len(list(folder.glob("*/summary.json"))))
    ]


CROSSED = ("method=none,gemma4_mtp", "method.num_speculative_tokens=1,3")


def test_equal_jobs_of_a_sweep_run_once(lab, hydraspec_main, tmp_path):
    assert sweep(hydraspec_main, *CROSSED) == 0
    assert lab.drafts == [0, 1, 3]
    results = summaries(tmp_path / "sweep")
    assert [result.get("reused_from") for result in results] == [None, "0", None, None]
    overrides = OmegaConf.load(tmp_path / "sweep" / "1" / "overrides.yaml")
    assert overrides == ["method=none", "method.num_speculative_tokens=3"]
    assert [Path(folder).name for folder in lab.compared] == ["sweep"]


def test_a_sweep_is_one_group(lab, hydraspec_main, tmp_path):
    sweep(hydraspec_main, "seed=1,2")
    assert {config.tracker.group for config, *_ in lab.runs} == {f"{tmp_path.name}/sweep"}
    sweep(hydraspec_main, "seed=1,2", "tracker.group=mine", folder="named")
    assert {config.tracker.group for config, *_ in lab.runs[2:]} == {"mine"}


def test_a_sweep_started_again_resumes(lab, hydraspec_main):
    lab.raises[1] = KeyboardInterrupt()
    assert sweep(hydraspec_main, *CROSSED) == 130
    assert lab.drafts == [0, 1]
    assert len(lab.compared) == 1  # what there is
    lab.raises.clear()
    assert sweep(hydraspec_main, *CROSSED) == 0
    assert lab.drafts == [0, 1, 1, 3]
    assert sweep(hydraspec_main, *CROSSED) == 0
    assert lab.drafts == [0, 1, 1, 3]


def test_a_failed_job_is_run_again(lab, hydraspec_main):
    lab.status = "failed"
    assert sweep(hydraspec_main, "seed=1,2") == 1
    lab.status = "ok"
    assert sweep(hydraspec_main, "seed=1,2") == 0
    assert len(lab.runs) == 4


def test_the_folder_of_another_sweep_is_left_alone(lab, hydraspec_main, capsys):
    sweep(hydraspec_main, "seed=1,2")
    capsys.readouterr()
    assert sweep(hydraspec_main, "seed=2,1") == 2
    assert "job 0 has a different configuration" in capsys.readouterr().err
    assert len(lab.runs) == 2


def test_a_sweep_goes_on_past_a_job_that_cannot_run(lab, hydraspec_main, capsys):
    lab.raises[0] = CheckpointError("gemma: no such folder")
    assert sweep(hydraspec_main, "seed=1,2,3") == 3
    assert len(lab.runs) == 3
    assert "hydraspec: gemma: no such folder" in capsys.readouterr().err
    assert len(lab.compared) == 1


def test_a_sweep_stops_at_a_full_disk(lab, hydraspec_main):
    lab.raises[1] = CannotWriteError(errno.ENOSPC, "No space left on device", "sweep/1")
    assert sweep(hydraspec_main, "seed=1,2,3") == 1
    assert len(lab.runs) == 2


def test_auto_equals_the_method_it_stands_for(lab, hydraspec_main, tmp_path):
    """Also where a sweep is started again: what is recorded is the method that ran."""
    typed = ("target=tiny_qwen3", "method=auto,eagle3")
    for _ in range(2):
        assert sweep(hydraspec_main, *typed) == 0
        assert [config.method.name for config, *_ in lab.runs] == ["eagle3"]
    recorded = OmegaConf.load(tmp_path / "sweep" / "0" / "config.yaml")
    assert recorded.method.name == "eagle3"
    assert recorded.method.num_speculative_tokens == 3
    assert recorded.method.checkpoint == "zoo:tiny_qwen3-eagle3"
    assert sweep(hydraspec_main, "target=tiny_qwen3", "method=auto,peagle") == 2


def test_targets_of_a_sweep_take_their_own_methods(lab, hydraspec_main):
    assert sweep(hydraspec_main, "target=tiny_qwen3,tiny_gemma4") == 0
    assert [config.method.name for config, *_ in lab.runs] == ["eagle3", "gemma4_mtp"]


def test_a_drafter_as_target_is_recorded_with_its_verifier(lab, hydraspec_main):
    folder = Path(hydraspec.__file__).parent / "zoo" / "checkpoints" / "tiny_qwen3-peagle"
    assert hydraspec_main(f"target.checkpoint={folder}") == 0
    ((config, _, overrides, resolved),) = lab.runs
    assert resolved == to_dict(config)
    assert resolved["target"]["checkpoint"] == "zoo:tiny_qwen3"
    assert resolved["target"]["name"] == "tiny_qwen3"
    assert resolved["method"]["name"] == "peagle"
    assert resolved["method"]["checkpoint"] == str(folder)
    assert resolved["method"]["num_speculative_tokens"] > 0
    assert overrides == [f"target.checkpoint={folder}", "method=auto"]


def test_flags_may_follow_overrides(lab, hydraspec_main):
    assert hydraspec_main("method=none", "-m", "seed=1,2") == 0
    assert [config.seed for config, *_ in lab.runs] == [1, 2]


def test_an_experiment_may_be_a_sweep(lab, hydraspec_main):
    assert hydraspec_main("experiment=k_sweep") == 0
    assert lab.drafts == [1, 2, 3, 4, 6]
    assert len(lab.compared) == 1


# --------------------------------------------------------------------------- Python


def test_run_from_python(lab):
    assert hydraspec.run(["method=none"])["status"] == "ok"
    hydraspec.run(["method=none"])
    (_, first, overrides, _), (_, second, _, _) = lab.runs
    assert overrides == ["method=none"]
    assert first != second  # even within one second
    assert first.parts[0] == "outputs"


def test_run_from_python_raises(lab):
    with pytest.raises(ConfigurationError, match="1 to 32"):
        hydraspec.run(["method.num_speculative_tokens=0"])
    with pytest.raises(ConfigurationError, match="several values"):
        hydraspec.run(["seed=1,2"])
    with pytest.raises(ConfigurationError, match="asks for a sweep"):
        hydraspec.run(["experiment=k_sweep"])
    lab.raises[0] = CheckpointError("cut off")
    with pytest.raises(CheckpointError):
        hydraspec.run()


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


def test_module_and_exit_status():
    done = subprocess.run(
        [sys.executable, "-m", "hydraspec", "method.num_speculative_tokens=100"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("hydraspec: method.num_speculative_tokens=100 is out of range\n")
    assert done.stdout == ""


def test_the_lab_has_the_hooks_we_call():
    """Catches a stand-in that no longer has the signature of the real lab."""
    from hydraspec.lab import run
    from hydraspec.study import sweep as compare

    inspect.signature(run.run).bind(None, run_dir=None, overrides=[], quiet=True)
    inspect.signature(compare.compare).bind(None)
