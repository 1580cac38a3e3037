"""`python -m hydraspec.predict`, which is `hydraspec predict`: which K is worth it."""

from __future__ import annotations

import sys
from functools import partial

from hydraspec.cli.main import main as command_line

main = partial(command_line, verb="predict")

if __name__ == "__main__":
    sys.exit(main())
