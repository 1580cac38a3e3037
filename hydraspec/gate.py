"""`python -m hydraspec.gate`: whether runs are worse than a stored baseline."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from hydraspec.cli.gate import main

    sys.exit(main(sys.argv[1:]))
