"""`python -m hydraspec.matrix`: what combines with what, and the tests that run it."""

from __future__ import annotations

import sys


def main() -> int:
    """Exit status 0; 2: an axis, a choice or a file that cannot be."""
    from hydraspec.cli.matrix import main as matrix
    from hydraspec.errors import UserError

    try:
        return matrix(sys.argv[1:])
    except UserError as error:
        sys.stderr.write(f"hydraspec.matrix: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
