"""The command `python -m hydraspec.compare`, and the same from Python: `hydraspec.compare([...])`.

Python puts a module in the place of a package's function of the same name once it is imported, so
this module can be called too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from os import PathLike
from types import ModuleType
from typing import Any


class _Compare(ModuleType):
    def __call__(
        self, folders: Sequence[str | PathLike[str]], *, write: str | PathLike[str] | None = None
    ) -> dict[str, Any]:
        from hydraspec.cli.compare import compare

        return compare(folders, write=write)


sys.modules[__name__].__class__ = _Compare


if __name__ == "__main__":
    from hydraspec.cli.compare import main

    sys.exit(main(sys.argv[1:]))
