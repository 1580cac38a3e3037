"""The front of all commands: verbs, spellings, exit statuses, interrupts, output that is lost."""

from __future__ import annotations

import errno
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import hydraspec
from hydraspec.cli import main as front
from hydraspec.config.choices import choices_of
from hydraspec.errors import CannotWriteError, CheckpointError, ConfigurationError, UserError
from hydraspec.errors import WorkloadError as Workload

Command = Callable[..., int]
Captured = pytest.CaptureFixture[str]
VERBS = [verb for verb in front.VERBS if verb != front.RUN]
NARROW = ["engine=native", "parallelism=single", "cudagraph=none", "target=tiny_mistral"]


@pytest.fixture
def runs(command: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Puts an action in the place of what a verb runs."""
    return lambda action: monkeypatch.setattr(front, "load", lambda place: lambda argv: action())


def ended(main: Callable[[], Any], capsys: Captured) -> tuple[Any, str, str]:
    """How a program ends, with what it wrote."""
    try:
        status = main()
    except SystemExit as left:
        status = left.code or 0
    return status, *capsys.readouterr()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("compare --wirte x y", "--write"),
        ("report --qestion=x y", "--question"),
        ("gate --look 3 a b", "--looks"),
        ("matrix --jsn x", "--json"),
        ("replay --hlp x", "--help"),
        ("predict --draft 1", "--drafts"),
        ("doctor --chek", "--help"),
    ],
)
def test_a_flag_that_is_misspelt_is_one_message(
    typed: str, meant: str, command: Command, capsys: Captured
) -> None:
    """Catches an abbreviation that is taken for the flag without a word."""
    assert command(*typed.split()) == 2
    first, allowed, remedy = capsys.readouterr().err.splitlines()
    assert first.startswith(f"hydraspec.{typed.split()[0]}: ")
    assert allowed.startswith("  allowed: ")
    assert remedy == f"  to do: did you mean {meant}?"


@pytest.mark.parametrize("typed", [["--help"], ["/nowhere", "--no-flag"], ["/nowhere=1"]], ids=str)
@pytest.mark.parametrize("verb", VERBS)
def test_all_spellings_of_a_verb_are_one_command(
    verb: str, typed: list[str], command: Command, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """`hydraspec gate`, `python -m hydraspec gate` and `python -m hydraspec.gate`; catches a module
    that is another verb's, or that is missing."""
    said = ended(lambda: command(verb, *typed), capsys)
    assert said[0] == (0 if typed == ["--help"] else 2)
    for module in (f"hydraspec.{verb}", "hydraspec.__main__"):  # else runpy warns of them
        monkeypatch.delitem(sys.modules, module, raising=False)
    for module, argv in (("hydraspec", [verb, *typed]), (f"hydraspec.{verb}", typed)):
        monkeypatch.setattr(sys, "argv", [module, *argv])
        program = partial(runpy.run_module, module, run_name="__main__")
        assert ended(program, capsys) == said


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["comapre", "a", "b"], "did you mean hydraspec compare?"),
        (["repo", "outputs"], "did you mean hydraspec report?"),
        (["run", "gate"], "did you mean hydraspec gate?"),
        (["help"], "see hydraspec --help"),
        (["run", "method=eagle33"], "did you mean method=eagle3?"),
    ],
    ids=str,
)
def test_words_that_mean_nothing_are_refused(
    typed: list[str], meant: str, command: Command, capsys: Captured, tmp_path: Path
) -> None:
    assert command(*typed) == 2
    assert capsys.readouterr().err.endswith(f"  to do: {meant}\n")
    assert list(tmp_path.iterdir()) == []


def test_help_lists_verbs_and_groups_and_the_version_is_ours(
    command: Command, capsys: Captured
) -> None:
    status, printed, _ = ended(lambda: command("--help"), capsys)
    assert status == 0
    assert f"method: {', '.join(choices_of('method'))}" in printed
    assert "hydraspec -m method=none,gemma4_mtp" in printed
    for name, verb in front.VERBS.items():
        assert f"  {name:7}  {verb.help}\n" in printed
    version = f"hydraspec {hydraspec.__version__}\n"
    assert ended(lambda: command("--version"), capsys) == (0, version, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
@pytest.mark.parametrize("verb", front.VERBS)
def test_an_interrupt_is_one_message_and_130(
    verb: str, number: int, command: Command, runs: Any, capsys: Captured
) -> None:
    runs(lambda: signal.raise_signal(number))
    name = "hydraspec" if verb == front.RUN else f"hydraspec.{verb}"
    assert command(verb) == 130
    assert capsys.readouterr().err == f"{name}: interrupted: nothing was finished\n"


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (ConfigurationError("engine.device=cuda"), 2, "engine.device=cuda"),
        (CheckpointError("model.safetensors is cut off"), 3, "is cut off"),
        (Workload("prompts.jsonl line 4"), 3, "line 4"),
        (UserError("a mistake"), 1, "a mistake"),
        (KeyboardInterrupt("what was finished is saved"), 130, "interrupted: what was finished is"),
        (
            CannotWriteError(errno.ENOSPC, "No space left on device", "outputs/summary.json"),
            1,
            "outputs/summary.json: there is no space left",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_errors_are_one_message_with_their_status(
    error: BaseException, status: int, says: str, command: Command, runs: Any, capsys: Captured
) -> None:
    def fail() -> None:
        raise error

    runs(fail)
    assert command("doctor") == status
    said = capsys.readouterr().err
    assert said.startswith("hydraspec.doctor: ")
    assert says in said
    assert len(said.splitlines()) <= 3


@pytest.mark.parametrize("error", [RuntimeError, FileNotFoundError])
def test_unexpected_errors_keep_their_traceback(
    error: type[Exception], command: Command, runs: Any
) -> None:
    def fail() -> None:
        raise error(2, os.strerror(2), "elsewhere/model.safetensors")

    runs(fail)
    with pytest.raises(error):
        command("report")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    "typed", [["matrix", *NARROW], ["gate", "--help"], ["--help"], ["--version"]], ids=str
)
def test_output_that_is_lost_on_a_full_disk_is_a_failure(
    typed: list[str], command: Command, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Catches `hydraspec … > file` that ends with 0 and an empty file."""
    with open("/dev/full", "w", encoding="utf-8") as full, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        assert command(*typed) == 1
    assert ": standard output: there is no space left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "module", "read", "typed"),
    [
        ("compare", "study.compare", ["compared", "tell", "show"], ["a", "--write", "out"]),
        ("report", "study.contents", [], ["a", "--write", "out"]),
        ("gate", "study.baseline", ["usable"], ["--write", "out", "a"]),
        ("replay", "analysis.replay.run", ["replayed"], ["out"]),
    ],
)
def test_files_on_a_full_disk_are_named_without_a_runs_key(
    verb: str,
    module: str,
    read: list[str],
    typed: list[str],
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    """Catches the advice hydra.run.dir=… of the function that writes files."""

    def write(*args: Any, **options: Any) -> None:
        raise CannotWriteError(errno.ENOSPC, "free some: hydra.run.dir=...", "out/x.json")

    for name in read:
        monkeypatch.setattr(f"hydraspec.{module}.{name}", lambda *_, **__: [])
    monkeypatch.setattr(f"hydraspec.{module}.write", write)
    monkeypatch.setattr("hydraspec.cli.report._read", lambda folders, asked: (None, None))
    assert command(verb, *typed) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"hydraspec.{verb}: cannot write out: there is no space left\n")
    assert "hydra." not in said


def test_a_python_without_the_packages_is_told(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Of every verb and call; a checkout on the path lacks hydraspec.conf alone."""
    monkeypatch.setattr(front, "NEEDED", ("hydraspec.no_conf", "yaml"))
    for verb in front.VERBS:
        assert command(verb) == 1
        assert "it lacks hydraspec.no_conf\n" in capsys.readouterr().err
    for call in (hydraspec.run, hydraspec.build_engine, hydraspec.compare):
        with pytest.raises(UserError, match="is not installed for"):
            call([])


def test_the_front_imports_no_package_of_others() -> None:
    """It names those that are missing, and takes interrupts from the first moment on."""
    code = (
        "import sys; before = {*sys.modules}; import hydraspec.cli.main;"
        "new = {name.partition('.')[0] for name in {*sys.modules} - before};"
        "print(sorted(new - sys.stdlib_module_names), 'argparse' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['hydraspec'] False\n"
