"""What W&B's own reader finds in offline runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def inspected(folder: Path) -> dict[str, Any]:
    """What W&B's own reader finds in a folder with an offline run."""
    command = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--summary", "--json"]
    done = subprocess.run(
        [*command, str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    if "No such command" in done.stderr:
        pytest.skip("this wandb has no reader of offline runs")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
