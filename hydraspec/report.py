"""`python -m hydraspec.report`: a report over runs."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from hydraspec.cli.report import main

    sys.exit(main(sys.argv[1:]))
