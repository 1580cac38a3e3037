"""Runs cells one after another in one process: a line of JSON in, a line of JSON out.

In: {"overrides": [...], "log": <file>}. Out: {"problem": null or what went wrong}, once the run is
saved. What a run prints goes to its log. Engines follow one another here on purpose: what one
leaves in the process meets the next.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any


def run_cell(overrides: list[str]) -> dict[str, Any]:
    import hydraspec
    from hydraspec.errors import UserError

    try:
        hydraspec.run(overrides)
    except UserError as error:
        return {"problem": f"exit status {error.exit_code}: {error}"}
    except Exception as error:
        traceback.print_exc()
        return {"problem": f"{type(error).__name__}: {error}"[:300]}
    return {"problem": None}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    for line in sys.stdin:
        cell = json.loads(line)
        with open(cell["log"], "wb", buffering=0) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        answers.write(json.dumps(run_cell(cell["overrides"])) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
