"""`python -m hydraspec.doctor`, which is `hydraspec doctor`: why a drafter is rejected."""

from __future__ import annotations

import sys
from functools import partial

from hydraspec.cli.main import main as command_line

main = partial(command_line, verb="doctor")

if __name__ == "__main__":
    sys.exit(main())
