"""`python -m hydraspec`, and the console script `hydraspec`."""

from __future__ import annotations

import sys

from hydraspec.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
