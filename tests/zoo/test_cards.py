"""The figures of the zoo's model cards, by which the doctor calls a drafter healthy."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hydraspec.analysis.doctor.expected import of_card
from hydraspec.zoo.recipe.recipes import CHECKPOINTS

CARDS = sorted(
    card.parent.name
    for card in CHECKPOINTS.glob("*/README.md")
    if "model-index" in card.read_text()
)
HEADINGS = {"assistants": "-assistant", "heads with KV of their own": "", "block drafters": ""}


def documented() -> dict[str, dict[int, float]]:
    """The acceptance lengths of hydraspec/zoo/README.md, by folder and K."""
    found: dict[str, dict[int, float]] = {}
    folders: list[str] = []
    for line in (CHECKPOINTS.parent / "README.md").read_text().splitlines():
        first, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if first in HEADINGS:
            names = [f"tiny_{cell.removeprefix('tiny_').split(' ')[0]}" for cell in cells]
            folders = [name + HEADINGS[first] for name in names]
        elif match := re.fullmatch(r"acceptance length(?:,| at)?(?: K = (\d))?", first):
            for folder, cell in zip(folders, cells, strict=True):
                found.setdefault(folder, {})[int(match[1] or 3)] = float(cell)
    return found


def test_cards_say_what_the_zoos_tables_say() -> None:
    tables = documented()
    assert len(tables) > 15
    for folder, lengths in tables.items():
        for k, length in lengths.items():
            card = of_card(CHECKPOINTS / folder, k)
            assert card is not None, (folder, k)
            assert card.acceptance_length == pytest.approx(length, abs=1e-6), (folder, k)


@pytest.mark.slow
@pytest.mark.parametrize("folder", CARDS)
def test_cards_say_what_runs_measure(folder: str, tmp_path: Path) -> None:
    """With the weights in their folders: whoever trains a drafter again writes its card again."""
    card = (CHECKPOINTS / folder / "README.md").read_text()
    choice = re.search(r"`(target=\w+) (method=\w+)`", card)
    assert choice is not None
    measured = {}
    for k in (1, 2, 3, 5, 7) if "block's states" in card else (3, 5):
        if of_card(CHECKPOINTS / folder, k) is None:
            continue
        command = [sys.executable, "-m", "hydraspec", choice[1], choice[2], "workload.limit=64"]
        command += [f"method.num_speculative_tokens={k}", "target.dtype=float32", "baseline=false"]
        command += ["engine.device=cpu", "tracker=none", f"hydra.run.dir={tmp_path / str(k)}"]
        subprocess.run(command, check=True, timeout=240, capture_output=True, cwd=tmp_path)
        summary = json.loads((tmp_path / str(k) / "summary.json").read_text())
        measured[k] = summary["acceptance_length"]["mean"]
        if k == 3:  # the rates of the first two drafts are those with fewer, but in a block
            rates = summary["acceptance_rate_per_position"]
            measured = {1: 1 + rates[0], 2: 1 + rates[0] + rates[1]} | measured
    for k, length in measured.items():
        said = of_card(CHECKPOINTS / folder, k)
        assert said is not None, k
        assert said.acceptance_length == pytest.approx(length, abs=0.002), k
