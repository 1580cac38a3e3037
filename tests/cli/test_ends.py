"""Ends of the command line: interrupts, unusable folders, flags that exclude each other."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hydraspec
from hydraspec.cli import main as cli
from hydraspec.errors import ConfigurationError

TYPED = ["tracker=none", "hydra.run.dir=run"]


@pytest.fixture
def hydraspec_main(monkeypatch, tmp_path, capsys):
    """The exit status and stderr of a command; no command of these tests reaches a run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")

    def call(*argv):
        monkeypatch.setattr(sys, "argv", ["hydraspec", *argv])
        return cli.main(), capsys.readouterr().err

    return call


def start(*argv, cwd):
    return subprocess.Popen(
        [sys.executable, "-m", "hydraspec", *TYPED, *argv],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_termination_saves_what_was_finished(tmp_path):
    """Catches results lost when a container is stopped."""
    process = start(cwd=tmp_path)
    while "round 2" not in process.stdout.readline():
        assert process.poll() is None
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert errors.endswith("hydraspec: interrupted: what was finished is saved\n")
    assert '"status": "interrupted"' in (tmp_path / "run" / "summary.json").read_text()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_interrupt_before_anything_was_finished_says_so(tmp_path, number):
    """A second interrupt, while the process ends, adds no traceback."""
    process = start(cwd=tmp_path)
    line = process.stderr.readline()  # of the engine that loads
    process.send_signal(number)
    while line and not line.startswith("hydraspec: "):
        line = process.stderr.readline()
    process.send_signal(number)
    _, errors = process.communicate()
    assert (process.returncode, line) == (130, "hydraspec: interrupted: nothing was finished\n")
    assert errors == ""
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left == {"config.yaml", "overrides.yaml"}


def test_a_benchmarks_process_ends_with_it(tmp_path):
    """It may hold the memory of a device."""
    bench = ["bench=decode", "bench.engines=[native]", "bench.methods=[none]", "bench.batches=[1]"]
    process = start(*bench, "bench.output_tokens=256", "bench.repeats=50", cwd=tmp_path)
    log = tmp_path / "run" / "native-none" / "log.txt"
    while not log.is_file() or "loaded in" not in log.read_text():
        assert process.poll() is None
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.is_file():
        pytest.skip("no /proc here")
    child = children.read_text().split()[-1]
    process.terminate()
    process.communicate()
    assert process.returncode == 130
    assert not Path(f"/proc/{child}").exists()


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path):
    process = start("workload.limit=2", cwd=tmp_path)
    process.stdout.close()
    errors = process.stderr.read()
    assert (process.wait(), "Error" in errors) == (0, False)
    process.stderr.close()
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.parametrize(
    ("key", "flags"), [("hydra.run.dir", []), ("hydra.sweep.dir", ["-m", "seed=1,2"])]
)
@pytest.mark.parametrize("folder", ["a file", "n" * 300, "/proc/hydraspec", "a file/below"])
def test_a_folder_that_cannot_be_made_is_one_message(hydraspec_main, tmp_path, key, flags, folder):
    if folder.startswith("/proc") and not Path("/proc/self").exists():
        pytest.skip("no /proc here")
    (tmp_path / "a file").touch()
    status, said = hydraspec_main(*flags, f"{key}='{folder}'")
    assert status == 2
    assert said.startswith("hydraspec: ")
    assert folder in said
    assert "hydra.run.dir=<folder>" in said
    assert len(said.splitlines()) == 3


def test_errors_of_other_files_keep_their_traceback(hydraspec_main, monkeypatch):
    def execute(planned):
        raise FileNotFoundError(2, os.strerror(2), "elsewhere/model.safetensors")

    monkeypatch.setattr(cli, "_run_jobs", execute)
    with pytest.raises(FileNotFoundError):
        hydraspec_main("hydra.run.dir=run")


@pytest.mark.parametrize("typed", ["hydra.run.dir=", "++hydra.run.dir=''", "hydra.sweep.dir=null"])
def test_a_folder_without_a_name_is_refused(hydraspec_main, tmp_path, typed):
    status, said = hydraspec_main(typed)
    assert (status, "names no folder" in said) == (2, True)
    with pytest.raises(ConfigurationError, match="names no folder"):
        hydraspec.run([typed])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--multirun", "--cfg", "job"], "--multirun --cfg: flags that exclude each other"),
        (["-r", "-m"], "--run --multirun: flags that exclude each other"),
        (["--resolve"], "--resolve: a flag of --cfg"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_that_do_not_go_together_are_refused(hydraspec_main, tmp_path, flags, said):
    status, printed = hydraspec_main(*flags)
    assert status == 2
    assert printed.startswith(f"hydraspec: {said}\n")
    assert len(printed.splitlines()) == 3
    assert list(tmp_path.iterdir()) == []


def test_the_version_is_ours(hydraspec_main, capsys):
    with pytest.raises(SystemExit) as left:
        hydraspec_main("--version")
    assert left.value.code == 0
    assert capsys.readouterr().out == f"hydraspec {hydraspec.__version__}\n"


@pytest.mark.parametrize("overrides", ["method=none", ["method=none", 3], None], ids=repr)
def test_run_from_python_takes_a_list_of_strings_only(overrides):
    with pytest.raises(ConfigurationError, match="a list of strings"):
        hydraspec.run(overrides)
