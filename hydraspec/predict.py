"""`python -m hydraspec.predict`: which method, K and concurrency are worth it."""

from __future__ import annotations

import sys


def main() -> int:
    """Exit status 0; 2: wrong configuration; 3: unusable checkpoint or workload."""
    from hydraspec.cli.predict import main as predict

    return predict(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
