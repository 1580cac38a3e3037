"""docs/design.md against the sources: import table, reading path, functions and records."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DESIGN = ROOT / "docs" / "design.md"
PATH_LINES = range(4_000, 6_000)  # of the reading path: an afternoon
DRIFT = 0.25  # a stage's lines may differ by this share from what the page says


def _may_import() -> dict[str, set[str]]:
    spec = importlib.util.spec_from_file_location(
        "architecture", ROOT / "tests/test_architecture.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    table: dict[str, set[str]] = module.MAY_IMPORT
    return table


MAY_IMPORT = _may_import()


def import_table(may_import: dict[str, set[str]]) -> str:
    """The table of the page, to be pasted where it differs."""
    rows = ["| room | may import |", "|---|---|"]
    for room, allowed in may_import.items():
        rows.append(
            f"| {room} | {', '.join(f'`{name}`' for name in sorted(allowed)) or 'nothing'} |"
        )
    return "\n".join(rows)


def section(title: str) -> str:
    return DESIGN.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows_of(text: str) -> list[list[str]]:
    """The cells of a table's rows, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def names_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    defined = ast.ClassDef | ast.FunctionDef
    return {node.name for node in ast.walk(tree) if isinstance(node, defined)}


def test_the_import_table_is_that_of_the_architecture() -> None:
    wanted = import_table(MAY_IMPORT)
    assert wanted in section("Who may import whom"), f"paste into docs/design.md:\n{wanted}"


def test_the_reading_path_exists_and_has_the_lines_it_says() -> None:
    total = 0
    for stage, files, said in rows_of(section("Reading path")):
        paths = re.findall(r"`([^`]+)`", files)
        lines = sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in paths)
        assert abs(lines - int(said)) <= DRIFT * int(said), f"{stage}: {lines} lines now"
        total += lines
    assert total in PATH_LINES


def test_the_functions_of_the_picture_exist() -> None:
    """A box reads "name<br/>file"; further places follow after a comma."""
    picture = section("The way of one request")
    boxes = re.findall(r'\["([\w.]+)<br/>([\w/]+\.py)', picture)
    assert len(boxes) >= 10
    (chain,) = re.findall(r"`(main → [^`]+)`", picture)
    known = set().union(*(names_of(f"hydraspec/{file}") for _, file in boxes))
    names = chain.split(" → ")
    assert len(names) == 8
    assert {part for name in names for part in name.split(".")} <= known
    for name, file in boxes:
        path = f"hydraspec/{file}"
        assert set(name.split(".")) <= names_of(path), f"{name} is not in {path}"


def test_the_records_are_those_of_types() -> None:
    records = [row[0].strip("`") for row in rows_of(section("Records"))]
    assert len(records) >= 8
    kernels = "kernels/hydraspec_kernels/sampling/records.py"
    assert set(records) <= names_of("hydraspec/types.py") | names_of(kernels)


def test_the_rooms_exist() -> None:
    named = re.findall(r"`((?:hydraspec|kernels|conf)/[\w/.]*)`", section("Rooms"))
    assert [path for path in named if not (ROOT / path).exists()] == []
    rooms = {
        path.name for path in (ROOT / "hydraspec").iterdir() if (path / "__init__.py").is_file()
    }
    assert rooms <= {path.split("/")[1] for path in named if path.startswith("hydraspec/")}
