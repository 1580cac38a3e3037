"""`python -m hydraspec.matrix`: what combines with what, and the tests that run it."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from hydraspec.cli.matrix import main

    sys.exit(main(sys.argv[1:]))
