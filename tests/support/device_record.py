"""docs/device.json: which sources the device gate last passed on, and what it found."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import re
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "device.json"
SCHEMA_VERSION = 1
PARTS = ("cells", "tests", "memcheck", "speed")
COVERED = (
    "hydraspec/engine",
    "hydraspec/adapters",
    "hydraspec/models",
    "hydraspec/sampling",
    "hydraspec/speculators",
    "hydraspec/graphs",
    "hydraspec/parallel",
    "hydraspec/factory.py",
    "hydraspec/types.py",
    "kernels/hydraspec_kernels",
    "tests/gate",
)

Json = dict[str, Any]


def covered_files(root: Path = ROOT) -> list[Path]:
    """What a change to makes the record old; the gate's own tests do not."""
    return sorted(set(_covered(root)))


def _covered(root: Path) -> Iterator[Path]:
    for name in COVERED:
        start = root / name
        for path in [start] if start.is_file() else start.rglob("*"):
            if not path.is_file() or "__pycache__" in path.parts:
                continue
            if name == "tests/gate" and (path.suffix != ".py" or path.name.startswith("test_")):
                continue
            yield path


def code_of(source: str) -> str:
    """Python source without comments, docstrings, blank lines and trailing spaces: positions only
    are asked of the parser, so that every version of Python gives the same text."""
    lines = source.splitlines()
    readline = io.StringIO(source if "#" in source else "").readline
    for token in tokenize.generate_tokens(readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in _statements(ast.parse(source)):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            rows = range(text.lineno - 1, text.end_lineno or text.lineno)
            lines[rows.start : rows.stop] = [""] * len(rows)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all that hold statements below it: definitions stand nowhere else."""
    yield node
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(node, name, None)
        for each in inner if isinstance(inner, list) else ():
            yield from _statements(each)


def sources_hash(root: Path = ROOT) -> str:
    """SHA-256 over the covered files' paths and contents, of Python their code, in the paths'
    order."""
    digest = hashlib.sha256()
    for path in covered_files(root):
        content = path.read_bytes()
        if path.suffix == ".py":
            content = code_of(content.decode()).encode()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def read(file: Path = FILE) -> Json | None:
    """The record; None if there is none, or none of ours."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_ours = isinstance(record, dict) and record.get("schema_version") == SCHEMA_VERSION
    return record if is_ours else None


def merged(old: Json | None, *, sources: str, parts: Mapping[str, Json], partial: bool) -> Json:
    """The record with the parts that ran now; parts of other sources are dropped.

    A run of some cells goes under "partial", beside the parts: it never makes one passed, and never
    replaces a whole one.
    """
    kept = old if old is not None and old.get("sources") == sources else {}
    record = {
        "schema_version": SCHEMA_VERSION,
        "sources": sources,
        "covers": list(COVERED),
        "parts": dict(kept.get("parts", {})),
        "partial": dict(kept.get("partial", {})),
    }
    record["partial" if partial else "parts"] |= parts
    if not partial:
        record["partial"] = {k: v for k, v in record["partial"].items() if k not in parts}
    record["parts"] = {part: record["parts"][part] for part in PARTS if part in record["parts"]}
    return record


def write(record: Json, file: Path) -> None:
    """As JSON with a line for each cell."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []

    def shortened(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shortened(own) for key, own in value.items()}
        if not isinstance(value, list) or not all(isinstance(own, dict) for own in value):
            return value
        first = len(lines)
        lines.extend(json.dumps(own, ensure_ascii=False) for own in value)
        return [f"@{number}@" for number in range(first, len(lines))]

    text = json.dumps(shortened(record), indent=1, ensure_ascii=False)
    text = re.sub(r'"@(\d+)@"', lambda found: lines[int(found[1])], text)
    file.write_text(text + "\n", encoding="utf-8")


def warning(file: Path = FILE, root: Path = ROOT) -> str | None:
    """What `make test` says where the record does not vouch for these sources; None if it does."""
    record, todo = read(file), "run make verify-gpu on a device"
    if record is None:
        return f"no record of the device gate ({file.name}): {todo}"
    if record["sources"] != sources_hash(root):
        return f"sources that {file.name} covers changed after it: {todo}"
    missing = [p for p in PARTS if record["parts"].get(p, {}).get("status") != "passed"]
    if missing:
        return f"{file.name}: not passed for these sources: {', '.join(missing)}; {todo}"
    return None
