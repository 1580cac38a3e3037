"""docs/adding_a_speculator.md and docs/drafter_without_weights.md, run as they are written, in a
folder outside the sources."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from installed import install

ROOT = Path(__file__).parents[2]


def parts_of(page: str) -> tuple[str, dict[str, str], list[str]]:
    """Text, files by name, and blocks of commands of a page."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    files = re.findall(r"^`([^`]+)`:\n\n```\w+\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    return text, dict(files), re.findall(r"```sh\n(.*?)```", text, re.DOTALL)


TEXT, FILES, (COMMANDS, OTHERS) = parts_of("adding_a_speculator.md")

SHORT = " sampling.max_tokens=24"  # added to commands, whose answers are longer on the page
# The commands of the page, one after the other in one process, which imports torch once.
IN_ONE_PROCESS = """
import runpy, sys
for line in sys.stdin.read().splitlines():
    python, flag, module, *sys.argv[1:] = line.split()
    assert (python, flag) == ("python", "-m"), line
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code, (line, end.code)
"""


def installed_from_the_page(folder: Path, files: Mapping[str, str] = FILES) -> Path:
    """The files of the page, and what `pip install -e .` would write for them."""
    project = tomllib.loads(files["pyproject.toml"])["project"]
    return install(folder, project["name"], modules=files, points=project["entry-points"])


def carried_out(folder: Path, commands: Sequence[str]) -> str:
    """The output of commands of the page, of which each has to succeed."""
    done = subprocess.run(
        [sys.executable, "-c", IN_ONE_PROCESS],
        input="\n".join(commands),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


class CarriedOut(NamedTuple):
    """The folder of the package, and what the page's commands printed."""

    folder: Path
    said: str


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> CarriedOut:
    """The page up to its drafter's first run, on fewer and shorter answers."""
    folder = installed_from_the_page(tmp_path_factory.mktemp("bigram"))
    install_it, *commands = COMMANDS.splitlines()
    assert install_it == "pip install -e ."
    assert len(commands) == 3
    commands[2] += f"{SHORT} workload.limit=4 hydra.run.dir=drafted"
    of_the_test = "python -m pytest -q -p no:cacheprovider tests"
    return CarriedOut(folder, carried_out(folder, [*commands, of_the_test]))


def test_the_page_works(page: CarriedOut) -> None:
    """Its commands run and its own test passes; drafts are accepted and no token changes."""
    assert "1 passed" in page.said
    summary = json.loads((page.folder / "drafted" / "summary.json").read_text())
    assert (summary["method"], summary["num_speculative_tokens"]) == ("bigram", 3)
    assert summary["lossless"]["verdict"] == "identical"
    assert summary["acceptance_length"]["mean"] > 1.3
    assert summary["draft_spec"]["hidden_width"] == 24, "method.options.rank as typed"


@pytest.mark.slow
def test_the_other_commands_take_its_drafter(page: CarriedOut) -> None:
    """What its head does not offer is null with a reason, and replay takes the trace."""
    few = f"{SHORT} workload.limit=3"
    *of_run, doctor, predict = OTHERS.splitlines()
    of_run[0] += f"{few} metrics.all_positions=true"
    others = [*of_run, doctor + few, f"{predict}{few} --drafts 3 --concurrency 1"]
    said = carried_out(page.folder, others)
    assert "No regression" in said
    assert "An estimate:" in said
    summary = json.loads((page.folder / "traced" / "summary.json").read_text())
    assert summary["status"] == "ok"
    (reason,) = (text for text in summary["warnings"] if "metrics.all_positions=true" in text)
    assert "only our own draft heads" in reason
    examined = json.loads((page.folder / "examined" / "doctor.json").read_text())
    assert (examined["verdict"], examined["tensors"], examined["figures"]) == (None, None, None)
    assert examined["acceptance"] > 1.3
    assert "method=bigram lacks what that needs (AttributeError" in examined["sentence"]
    predicted_file = page.folder / "predicted" / "predict.json"
    (predicted,) = json.loads(predicted_file.read_text())["predictions"]
    assert predicted["acceptance_length"] > 1.3


@pytest.mark.slow
def test_the_page_without_weights_works(tmp_path: Path) -> None:
    """Drafts are what stood after the newest token's last earlier place, with K set and chosen."""
    _, files, (commands,) = parts_of("drafter_without_weights.md")
    folder = installed_from_the_page(tmp_path, files)
    install_it, *runs = commands.splitlines()
    assert install_it == "pip install -e ."
    runs = [f"{each}{SHORT} workload.limit=4" for each in runs]
    runs[0] += " metrics.trace=true"
    runs[1] += " engine.max_num_seqs=1"  # fewer costs to measure
    carried_out(folder, runs)
    for name in ("drafted", "chosen"):
        summary = json.loads((folder / name / "summary.json").read_text())
        assert (summary["method"], summary["lossless"]["verdict"]) == ("lookup", "identical")
        assert summary["acceptance_length"]["mean"] > 1.3
    rows = (folder / "drafted" / "requests.jsonl").read_text().splitlines()
    texts = {
        row["id"]: row["prompt_token_ids"] + row["output_token_ids"]
        for row in map(json.loads, rows)
    }
    for step in map(json.loads, (folder / "drafted" / "trace.jsonl").read_text().splitlines()):
        *text, newest = texts[step["request"]][: step["num_computed_tokens"] + 1]
        last = len(text) - 1 - text[::-1].index(newest) if newest in text else None
        copied = [] if last is None else [*text, newest][last + 1 : last + 4]
        assert step["draft_token_ids"] == copied


def test_every_file_of_the_layout_is_on_the_page() -> None:
    tops = {Path(file).parts[0] for file in FILES}
    assert tops == {"pyproject.toml", "conf", "hydraspec_bigram", "tests"}
    assert len(TEXT.splitlines()) <= 300
