"""SPEED-Bench from files that the tests write in its formats; none of its prompts are here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hydraspec.config.schema import RunConfig, WorkloadConfig
from hydraspec.types import ConfigurationError, Request, WorkloadError
from hydraspec.workloads import reading

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


def row(number: int, category: str, *turns: str) -> dict[str, Any]:
    """A row of the released data set, in its columns."""
    return {
        "question_id": f"{number:032x}",
        "category": category,
        "sub_category": "a part",
        "turns": list(turns),
        "source": "someone/some-set",
        "src_id": str(number),
        "difficulty": None,
        "multiturn": len(turns) > 1,
    }


ROWS = [
    row(1, "coding", "Write a loop."),
    row(2, "roleplay", "You are a cook.", "And now?", "Goodbye."),
    row(3, "coding", "Mend it."),
]


def prepared(found: dict[str, Any]) -> dict[str, Any]:
    """The row as the data set's script writes it: messages in place of turns."""
    without = {key: value for key, value in found.items() if key != "turns"}
    said = [{"role": "user", "content": turn} for turn in found["turns"]]
    return {**without, "messages": said}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def read(config: RunConfig, path: str, **keys: Any) -> list[Request]:
    config.workload = WorkloadConfig(name="speed_bench", path=path, **keys)
    found = reading.read(config)
    assert found is not None
    return found.requests


def user_messages(requests: list[Request]) -> list[str]:
    return [message["content"] for request in requests for message in request.messages or ()]


@pytest.mark.parametrize("name", ["prepared.jsonl", "released.jsonl", "test.parquet"])
def test_a_message_is_a_turn_that_waits(name: str, config: RunConfig, tmp_path: Path) -> None:
    """Catches turns sent at once, of which the later would miss the answers before them, and the
    category lost on later turns."""
    rows = [prepared(found) for found in ROWS] if name.startswith("prepared") else ROWS
    requests = read(config, write(tmp_path / name, rows))
    assert user_messages(requests) == [turn for found in ROWS for turn in found["turns"]]
    assert [r.after for r in requests] == [None, None, 1, 2, None]
    assert [r.id[-3:] for r in requests] == ["1/1", "2/1", "2/2", "2/3", "3/1"]
    assert [r.category for r in requests] == ["coding", *["roleplay"] * 3, "coding"]
    assert requests[0].meta == {
        "sub_category": "a part",
        "source": "someone/some-set",
        "src_id": "1",
    }
    assert {r.answer for r in requests} == {None}


def test_one_category(config: RunConfig, tmp_path: Path) -> None:
    path = write(tmp_path / "f.jsonl", ROWS)
    requests = read(config, path, category="coding", limit=2)
    assert user_messages(requests) == ["Write a loop.", "Mend it."]
    with pytest.raises(ConfigurationError) as raised:
        read(config, path, category="code")
    assert "workload.category=code is that of no row" in str(raised.value)
    assert "allowed: coding, roleplay, or null" in str(raised.value)


UNRESOLVED = [ROWS[0], row(4, "math", PLACEHOLDER), row(5, "math", f"{PLACEHOLDER}\n\n{{x}}")]
REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "placeholders": (UNRESOLVED, "f.jsonl:2: the prompts of 2 of 3 rows are placeholders"),
    "placeholders of a prepared file": (
        [prepared(found) for found in UNRESOLVED],
        "f.jsonl:2: the prompts of 2 of 3 rows are placeholders",
    ),
    "no turns": ([{**ROWS[0], "turns": []}], "f.jsonl:1: turns or messages: one must be"),
    "turns of no text": ([{**ROWS[0], "turns": ["a", " "]}], 'f.jsonl:1: turns[1]: " " is not'),
    "an answer among the messages": (
        [{**prepared(ROWS[0]), "messages": [{"role": "assistant", "content": "a"}]}],
        "f.jsonl:1: messages[0]: {",
    ),
    "no category": ([{**ROWS[0], "category": None}], "f.jsonl:1: category: null is not allowed"),
    "twice": ([ROWS[0], ROWS[0]], "f.jsonl:2: id: "),
    "no id": ([{**ROWS[0], "question_id": None}], "f.jsonl:1: question_id: null is not allowed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_format_is_one_message(case: str, config: RunConfig, tmp_path: Path) -> None:
    rows, says = REFUSED[case]
    with pytest.raises(WorkloadError) as raised:
        read(config, write(tmp_path / "f.jsonl", rows))
    assert says in str(raised.value)


def test_placeholders_and_a_missing_file_say_where_the_texts_are(
    config: RunConfig, tmp_path: Path
) -> None:
    for path in ("/nowhere/qualitative.jsonl", write(tmp_path / "f.jsonl", UNRESOLVED)):
        with pytest.raises(WorkloadError) as raised:
            read(config, path)
        for part in ("speed-bench/prepare.py", "nvidia/SPEED-Bench", "Evaluation Dataset License"):
            assert part in str(raised.value)


def test_parquet_that_cannot_be_read(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "test.parquet"
    path.write_bytes(b"PAR1 and then nothing")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(WorkloadError, match=r"needs pyarrow: pip install \"hydraspec\[workloads\]"):
        read(config, str(path))
    monkeypatch.undo()
    pytest.importorskip("pyarrow")
    with pytest.raises(WorkloadError, match=r"test\.parquet: cannot be read as a Parquet file"):
        read(config, str(path))
    with pytest.raises(WorkloadError, match="there is nothing in it"):
        read(config, write(tmp_path / "empty.parquet", []))
