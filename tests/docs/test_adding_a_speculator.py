"""docs/adding_a_speculator.md, run as it is written, on a copy of the sources."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "adding_a_speculator.md").read_text()


def code_blocks() -> dict[str, str]:
    """File name -> the block below it."""
    return dict(
        re.findall(r"^`([^`]+)`[^\n]*:\n\n```\w+\n(.*?)```", TEXT, re.DOTALL | re.MULTILINE)
    )


def copy_of_the_sources(folder: Path) -> None:
    """What an installed package looks like: conf inside hydraspec, kernels beside it."""
    skip = shutil.ignore_patterns("__pycache__", "checkpoints")
    shutil.copytree(ROOT / "hydraspec", folder / "hydraspec", ignore=skip)
    shutil.copytree(ROOT / "conf", folder / "hydraspec" / "conf", ignore=skip)
    (folder / "hydraspec_kernels").symlink_to(ROOT / "kernels" / "hydraspec_kernels")
    checkpoints = Path("zoo") / "checkpoints"
    (folder / "hydraspec" / checkpoints).symlink_to(ROOT / "hydraspec" / checkpoints)


def add_what_the_text_says(folder: Path) -> None:
    blocks = code_blocks()
    assert len(blocks) == 3
    for name, block in blocks.items():
        path = folder / name.replace("conf/", "hydraspec/conf/")
        if name.endswith("factory.py"):
            source = path.read_text()
            head, entries = source.split("SPECULATORS = {\n")
            path.write_text(f"{head}SPECULATORS = {{\n{block}{entries}")
        else:
            assert not path.exists(), f"{name} is in the tree: choose another example"
            path.write_text(block)


def test_the_text_works(tmp_path: Path) -> None:
    """The new drafter runs, accepts something, and leaves the tokens as they are."""
    assert len(TEXT.splitlines()) <= 60
    copy_of_the_sources(tmp_path)
    add_what_the_text_says(tmp_path)
    command = ["method=prompt_lookup", "workload.limit=12", "tracker=none", "hydra.run.dir=run"]
    done = subprocess.run(
        [sys.executable, "-m", "hydraspec", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["method"] == "prompt_lookup"
    assert summary["lossless"]["verdict"] == "identical"
    assert summary["num_accepted_tokens"] > 0
    assert summary["num_drafts"] < summary["num_output_tokens"], "steps without drafts do not count"
