"""docs/outputs.md against what real runs write: every key is in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import hydraspec
from hydraspec.lab import folder
from hydraspec.report.compare import compare

TEXT = (Path(__file__).parents[2] / "docs" / "outputs.md").read_text(encoding="utf-8")
WORDS = set(re.findall(r"`([^`]+)`", TEXT))
# Their keys are names of categories, packages, batch sizes or a drafter's fields.
FREE = {"acceptance_length_by_category", "num_drafts_by_category", "by_category", "versions"}
FREE |= {"draft_spec", "tpot", "prefill"}


def keys_of(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            if key not in FREE:
                yield from keys_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from keys_of(item)


def undocumented(value: object) -> set[str]:
    return set(keys_of(value)) - WORDS


def read(path: Path) -> object:
    text = path.read_text(encoding="utf-8")
    return (
        [json.loads(line) for line in text.splitlines()]
        if path.suffix == ".jsonl"
        else (json.loads(text))
    )


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of one run, with all it can write."""
    path = tmp_path_factory.mktemp("sweep")
    switches = ["metrics.steps=true", "metrics.trace=true", "tracker=none", "workload.limit=3"]
    hydraspec.run([*switches, f"hydra.run.dir={path}/0"])
    compare(path)
    return path


def test_every_file_and_key_of_a_run_is_documented(sweep: Path) -> None:
    files = [path for path in sweep.rglob("*") if path.is_file()]
    assert {path.name for path in files} <= WORDS
    read_ones = [path for path in files if path.suffix in (".json", ".jsonl")]
    assert len(read_ones) == 6
    assert {path.name: found for path in read_ones if (found := undocumented(read(path)))} == {}


def test_names_of_files_and_verdicts_are_documented() -> None:
    names = {name for key, name in vars(folder).items() if key.isupper() and isinstance(name, str)}
    assert {"summary.json", "bench.html"} < names
    assert {name.replace("wandb", "wandb/") for name in names} <= WORDS
    assert {"identical", "numerical", "diverged", "not_checked"} <= WORDS


def test_every_key_of_a_divergence_is_documented() -> None:
    from hydraspec.lab.verdict import Divergence

    assert set(Divergence.__dataclass_fields__) <= WORDS


def test_every_key_of_a_benchmark_is_documented(tmp_path: Path) -> None:
    small = ["bench.batches=[1]", "bench.prompt_tokens=4", "bench.output_tokens=3"]
    small += ["bench.engines=[native]", "bench.methods=[none]", "method=none", "bench.repeats=1"]
    found = hydraspec.run(
        ["bench=decode", *small, "bench.isolate=false", "tracker=none", f"hydra.run.dir={tmp_path}"]
    )
    assert found["parts"][0]["rows"]
    assert undocumented(read(tmp_path / "bench.json")) == set()


def test_a_key_that_is_not_documented_is_found() -> None:
    assert undocumented({"rows": [{"speedup": {"median": 1}}], "versions": {"x": 1}}) == {"median"}
