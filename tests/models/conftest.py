"""Folders in each quantised format, for tests that read them and that break them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from written_formats import write_formats  # transformers, which few tests of models need

    return write_formats(tmp_path_factory.mktemp("formats"))


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A function that gives a folder of a format that may be changed."""
    return lambda name: Path(shutil.copytree(written / name, tmp_path / "checkpoint"))
