"""docs/outputs/ against what real runs write, and against the schema of summary.json."""

from __future__ import annotations

import json
import re
import shutil
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import (
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import pytest

import hydraspec
from hydraspec.engine.base import Built, StepProfile
from hydraspec.metrics import run_files
from hydraspec.metrics import summary as schema
from hydraspec.study.sweep import compare

PAGES = Path(__file__).parents[2] / "docs" / "outputs"
TEXT = "".join(page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md")))
WORDS = set(re.findall(r"`([^`]+)`", TEXT))
# Their keys are names of categories, packages, batch sizes or a drafter's fields.
FREE = {"acceptance_length_by_category", "num_drafts_by_category", "by_category", "versions"}
FREE |= {"draft_spec", "tpot", "prefill", "kv_peak_usage_per_group", "kv_usage_per_group"}
FREE |= {"by_token_class"}


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
    files = [f"metrics.{name}=true" for name in ("steps", "trace", "all_positions")]
    switches = [*files, "tracker=none", "workload.limit=3", "sampling.max_tokens=48"]
    hydraspec.run([*switches, f"hydra.run.dir={path}/0"])
    compare(path)
    return path


def test_every_file_and_key_of_a_run_is_documented(sweep: Path) -> None:
    files = [path for path in sweep.rglob("*") if path.is_file()]
    assert {path.name for path in files} <= WORDS
    read_ones = [path for path in files if path.suffix in (".json", ".jsonl")]
    assert len(read_ones) == 8
    assert {path.name: found for path in read_ones if (found := undocumented(read(path)))} == {}


def test_every_key_of_a_comparison_is_documented(sweep: Path, tmp_path: Path) -> None:
    again = shutil.copytree(sweep / "0", tmp_path / "again")
    found = hydraspec.compare([sweep / "0", again], write=tmp_path / "out")
    assert any(job["versus"] for job in found["jobs"])
    assert undocumented(found) == set()
    assert undocumented(read(tmp_path / "out" / "compare.json")) == set()


def test_names_of_files_and_verdicts_are_documented() -> None:
    constants = vars(run_files).items()
    names = {name for key, name in constants if key.isupper() and isinstance(name, str)}
    assert {"summary.json", "bench.html"} < names
    assert {name.replace("wandb", "wandb/") for name in names} <= WORDS
    assert {"identical", "numerical", "diverged", "not_checked"} <= WORDS


# ---------------------------------------------------------------- the schema of summary.json


def in_words(annotation: Any) -> str:
    """A type as docs/outputs/ writes it: "float or null", "list of str", "object"."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is NotRequired:
        return in_words(inner[0])
    if origin in (types.UnionType, Union):
        return " or ".join(in_words(part) for part in inner)
    if origin is Literal:
        return "str"
    if origin is list:
        return f"list of {in_words(inner[0])}"
    if origin is Sequence:
        return f"pair of {in_words(inner[0])}"
    if origin in (dict, Mapping):
        return f"→ {in_words(inner[1])}"
    if is_typeddict(annotation):
        return "object"
    return {type(None): "null", object: "value"}.get(annotation, annotation.__name__)


def nested(annotation: Any) -> list[Any]:
    """The TypedDicts that a value of this type holds."""
    if is_typeddict(annotation):
        return [annotation]
    return [found for part in get_args(annotation) for found in nested(part)]


def in_schema(record: Any, name: str = "summary") -> dict[str, dict[str, str]]:
    """Key → type of every object of the schema, by the key that holds it."""
    hints = get_type_hints(record, include_extras=True)
    found = {name: {key: in_words(annotation) for key, annotation in hints.items()}}
    for key, annotation in hints.items():
        if key not in ("baseline", "by_category", "acceptance_length") or name == "summary":
            for inner in nested(annotation):
                found |= in_schema(inner, key)
    return found


def in_docs(text: str) -> dict[str, dict[str, str]]:
    """The same, from the tables "key | type | meaning" and "key of `x` | type | meaning"."""
    found: dict[str, dict[str, str]] = {}
    names: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("|"):
            names = []
        elif cells[0].startswith("key"):
            names = re.findall(r"`(\w+)`", cells[0]) or ["summary"]
        elif names and "---" not in line:
            keys = re.findall(r"`(\w+)`", cells[0])
            words = [re.sub(r"^\w+ →", "→", word) for word in cells[1].split(", ")]
            for name in names:
                pairs = zip(keys, words * (len(keys) // len(words)), strict=True)
                found.setdefault(name, {}).update(pairs)
    return found


def test_the_schema_and_the_docs_are_equal() -> None:
    """Keys and types, both ways: catches a key added, dropped or made nullable in one of them."""
    page = (PAGES / "summary.md").read_text(encoding="utf-8")
    assert in_docs(page) == in_schema(schema.Summary)


def keys_like(schema_of: Any, value: Any) -> None:
    """`value` has exactly the keys of its TypedDict, and so have the objects in it."""
    hints = get_type_hints(schema_of)
    assert set(value) == set(hints) - {"reused_from"}
    for key, annotation in hints.items():
        for inner in nested(annotation):
            held = value[key]
            if key in ("by_category", "by_token_class"):
                held = next(iter(held.values()))
            held = held[0] if isinstance(held, list) else held
            if held is not None:
                keys_like(inner, held)


def test_a_real_summary_has_exactly_the_keys_of_the_schema(sweep: Path) -> None:
    found = run_files.read_summary(sweep / "0")
    assert found is not None
    assert found["baseline"]
    assert found["accuracy"]
    keys_like(schema.Summary, found)


@pytest.mark.parametrize(
    ("record", "schema_of"),
    [
        (StepProfile, schema.StepProfile),
        (Built, schema.BuiltInRounds),
    ],
)
def test_records_that_few_runs_write_have_the_keys_of_the_schema(
    record: Any, schema_of: Any
) -> None:
    """Catches a field of a divergence or of a device's profile: no run of this file has either."""
    assert set(record.__dataclass_fields__) == set(schema_of.__annotations__)


OF_LOAD = (
    *("bench.num_requests=3", "bench.prompt_tokens=4", "bench.output_tokens=3"),
    *("bench.max_prompt_tokens=8", "bench.max_output_tokens=6"),
)
SMALL_BENCHES = {
    "context": [
        *("bench.batches=[1]", "bench.contexts=[16]", "bench.output_tokens=3", "bench.repeats=1"),
        *("method.num_speculative_tokens=3", "bench.cell_timeout_s=9"),
    ],
    "decode": [
        "bench.batches=[1]",
        "bench.prompt_tokens=4",
        "bench.output_tokens=3",
        "bench.repeats=1",
    ],
    "load": [*OF_LOAD, "bench.repeats=1"],
    "serve": [*OF_LOAD, "bench.peak_rate=200", "bench.rates=[0.5,2]"],
    "turns": [
        *("bench.num_conversations=2", "bench.num_turns=2", "bench.turn_tokens=24"),
        *("bench.output_tokens=3", "bench.cold_turns=[2]", "bench.repeats=1"),
    ],
}


@pytest.mark.parametrize("name", SMALL_BENCHES)
def test_every_key_of_a_benchmark_is_documented(name: str, tmp_path: Path) -> None:
    small = [*SMALL_BENCHES[name], f"bench={name}"]
    small.append("bench.engines=[native]")
    small += ["bench.methods=[none]", "method=none"] if name != "context" else []
    found = hydraspec.run(
        [*small, "bench.isolate=false", "tracker=none", f"hydra.run.dir={tmp_path}"]
    )
    assert found["parts"][0]["rows"]
    assert undocumented(read(tmp_path / "bench.json")) == set()


def test_a_key_that_is_not_documented_is_found() -> None:
    assert undocumented({"rows": [{"speedup": {"median": 1}}], "versions": {"x": 1}}) == {"median"}
