"""Commands that run in the tests' process, and a stand-in for the lab."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import OmegaConf

from hydraspec.cli import complain
from hydraspec.cli.main import main
from hydraspec.config import to_dict


@dataclass
class StandIn:
    """Records the calls of the lab, and writes the files of a run folder; it computes nothing."""

    runs: list[Any] = field(default_factory=list)  # configuration, folder, overrides, resolved
    settings: list[Any] = field(default_factory=list)  # working directory, a variable
    compared: list[Path] = field(default_factory=list)
    raises: dict[int, BaseException] = field(default_factory=dict)  # by the run's place
    status: str = "ok"

    def run(
        self, config: Any, *, run_dir: Path, overrides: list[str], quiet: bool = False
    ) -> dict[str, Any]:
        resolved = to_dict(config)
        self.runs.append((config, run_dir, overrides, resolved))
        self.settings.append((Path.cwd(), os.environ.get("COLOUR")))
        error = self.raises.get(len(self.runs) - 1)
        if error is not None:
            raise error
        logging.getLogger("hydraspec.lab").info("a line of the log")
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(resolved))
        (run_dir / "overrides.yaml").write_text(OmegaConf.to_yaml(overrides))
        summary = {"status": self.status, "method": config.method.name, "run": len(self.runs) - 1}
        (run_dir / "summary.json").write_text(json.dumps(summary))
        return summary

    def compare(self, sweep_dir: Path) -> None:
        self.compared.append(sweep_dir)

    @property
    def drafts(self) -> list[int]:
        return [config.method.num_speculative_tokens for config, *_ in self.runs]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """What `hydraspec …` does, in an empty folder; returns the exit status."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # main sets it: restored afterwards
    monkeypatch.setenv("OMP_PROC_BIND", "")
    monkeypatch.setattr(complain, "ignore_interrupts", lambda: None)  # this process goes on
    return lambda *argv: main(argv)


@pytest.fixture
def lab(command: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    for name, attribute in (("lab.run", "run"), ("study.sweep", "compare")):
        module = ModuleType(f"hydraspec.{name}")
        setattr(module, attribute, getattr(stand_in, attribute))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return stand_in
