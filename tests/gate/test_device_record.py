"""The record: what it covers, how parts come together, and when it is old."""

from __future__ import annotations

from pathlib import Path

import device_record
import pytest
from device_record import PARTS, merged, sources_hash, warning

PASSED = {part: {"status": "passed"} for part in PARTS}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("hydraspec/engine/a.py", "hydraspec/types.py", "tests/gate/verify.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    return tmp_path


def recorded(tree: Path, **parts: dict[str, str]) -> Path:
    file = tree / "docs" / "device.json"
    found = parts or PASSED
    device_record.write(merged(None, sources=sources_hash(tree), parts=found, partial=False), file)
    return file


def test_this_tree_is_covered():
    files = device_record.covered_files()
    names = {path.relative_to(device_record.ROOT).as_posix() for path in files}
    assert {"hydraspec/factory.py", "tests/gate/cells.py"} <= names
    assert any(name.startswith("kernels/hydraspec_kernels/sampling/truncation/") for name in names)
    assert "tests/gate/test_device_record.py" not in names


def test_parts_of_the_same_sources_come_together():
    record = merged(None, sources="one", parts={"speed": {"status": "passed"}}, partial=False)
    record = merged(record, sources="one", parts={"cells": {"status": "failed"}}, partial=False)
    assert list(record["parts"]) == ["cells", "speed"]
    other = merged(record, sources="two", parts={"tests": {"status": "passed"}}, partial=False)
    assert list(other["parts"]) == ["tests"]


def test_what_is_written_is_read_with_a_line_for_each_cell(tmp_path: Path):
    cells = [{"name": "a", "problems": ["@0@", 'b: "c"']}, {"name": "d"}]
    part = {"status": "failed", "cells": cells, "versions": {"torch": "2"}}
    record = merged(None, sources="one", parts={"cells": part, "speed": part}, partial=False)
    device_record.write(record, tmp_path / "device.json")
    assert device_record.read(tmp_path / "device.json") == record
    text = (tmp_path / "device.json").read_text()
    assert sum(line.strip().startswith('{"name"') for line in text.splitlines()) == 4


def test_a_rerun_of_some_cells_never_makes_a_part_passed():
    failed = merged(None, sources="one", parts={"cells": {"status": "failed"}}, partial=False)
    rerun = merged(failed, sources="one", parts={"cells": {"status": "partial"}}, partial=True)
    assert rerun["parts"]["cells"]["status"] == "failed"
    assert rerun["partial"]["cells"]["status"] == "partial"
    whole = merged(rerun, sources="one", parts={"cells": {"status": "passed"}}, partial=False)
    assert whole["partial"] == {}


def test_a_change_to_covered_sources_is_said(tree: Path):
    file = recorded(tree)
    assert warning(file, tree) is None
    (tree / "hydraspec" / "engine" / "a.py").touch()
    (tree / "hydraspec" / "other.py").write_text("not covered\n")
    assert warning(file, tree) is None
    (tree / "hydraspec" / "engine" / "b.py").write_text("")
    assert "changed after it" in str(warning(file, tree))


@pytest.mark.parametrize(
    ("changed", "is_old"),
    [
        pytest.param('"""Another sentence."""\n\nx = 1  # and why\n', False, id="prose"),
        pytest.param('x = 1\n"""A string that is no docstring."""\n', True, id="a-string"),
        pytest.param('x = "# 1"\n', True, id="a-string-that-looks-like-a-comment"),
        pytest.param("if x:\n    x = 1\n", True, id="an-indent"),
    ],
)
def test_prose_makes_no_record_old(changed: str, is_old: bool, tree: Path):
    file = recorded(tree)
    (tree / "hydraspec" / "engine" / "a.py").write_text(changed)
    assert (warning(file, tree) is not None) == is_old


def test_no_record_and_a_failed_part_are_said(tree: Path):
    assert "no record" in str(warning(tree / "none.json", tree))
    (tree / "cut.json").write_text("{")
    assert "no record" in str(warning(tree / "cut.json", tree))
    file = recorded(tree, **{**PASSED, "memcheck": {"status": "not run"}})
    assert "not passed for these sources: memcheck;" in str(warning(file, tree))


def test_a_session_ends_with_the_warning(monkeypatch: pytest.MonkeyPatch, request):
    """Through the hook that pytest calls: once, and in no xdist worker."""
    plugin = request.config.pluginmanager
    (hook,) = [
        p
        for p in plugin.get_plugins()
        if hasattr(p, "pytest_terminal_summary")
        and str(getattr(p, "__file__", "")) == str(device_record.ROOT / "tests" / "conftest.py")
    ]
    said: list[str] = []

    class Reporter:
        class config:
            pass

        def write_line(self, line: str, **_: object) -> None:
            said.append(line)

    monkeypatch.setattr(device_record, "warning", lambda: "changed")
    hook.pytest_terminal_summary(Reporter())
    assert said == ["warning: changed"]
    Reporter.config.workerinput = {}
    hook.pytest_terminal_summary(Reporter())
    assert said == ["warning: changed"]
