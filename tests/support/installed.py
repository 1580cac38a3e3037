"""A package as an installer leaves it: modules and the entry points of its dist-info, in a folder
that goes on sys.path."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from hydraspec import plugins
from hydraspec.config import choices


def install(
    folder: Path,
    name: str,
    *,
    modules: Mapping[str, str] | None = None,
    points: Mapping[str, Mapping[str, str]],
) -> Path:
    """Write package `name` 1.0: module file -> source, and group -> entry point -> value."""
    for file, source in (modules or {}).items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for group, entries in points.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


@contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """`folder` on sys.path; its modules, entry points and places of choices are gone afterwards."""
    plugins._added.cache_clear()
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        try:
            yield
        finally:
            for name in set(sys.modules) - before:
                if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                    del sys.modules[name]
            plugins._added.cache_clear()
            choices.search([])
