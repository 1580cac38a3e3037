"""`python -m hydraspec.matrix`, which is `hydraspec matrix`: what combines with what."""

from __future__ import annotations

import sys
from functools import partial

from hydraspec.cli.main import main as command_line

main = partial(command_line, verb="matrix")

if __name__ == "__main__":
    sys.exit(main())
