"""`python -m hydraspec.gate`, which is `hydraspec gate`: whether runs are worse than a baseline."""

from __future__ import annotations

import sys
from functools import partial

from hydraspec.cli.main import main as command_line

main = partial(command_line, verb="gate")

if __name__ == "__main__":
    sys.exit(main())
