"""`python -m hydraspec.report`, which is `hydraspec report`: a page over runs."""

from __future__ import annotations

import sys
from functools import partial

from hydraspec.cli.main import main as command_line

main = partial(command_line, verb="report")

if __name__ == "__main__":
    sys.exit(main())
