"""`python -m hydraspec.replay`, which is `hydraspec replay`: a run under other rules."""

from __future__ import annotations

import sys
from functools import partial

from hydraspec.cli.main import main as command_line

main = partial(command_line, verb="replay")

if __name__ == "__main__":
    sys.exit(main())
