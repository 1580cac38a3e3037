"""The words of a split."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hydraspec.metrics.splits import split_words

CHOICES = sorted((Path(__file__).parents[2] / "conf" / "parallelism").glob("*.yaml"))


@pytest.mark.parametrize("choice", CHOICES, ids=lambda path: path.stem)
def test_a_choice_is_called_by_its_name(choice: Path) -> None:
    assert split_words(yaml.safe_load(choice.read_text(encoding="utf-8"))) == choice.stem


def test_other_sizes_and_earlier_versions() -> None:
    assert split_words({"tensor": 4, "pipeline": 3, "data": 2, "num_devices": 24}) == "tp4_pp3_dp2"
    assert split_words(None) == ""
