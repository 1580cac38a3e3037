"""`python -m hydraspec.doctor`: why a drafter is rejected."""

from __future__ import annotations

import sys


def main() -> int:
    """Exit status 0; 2: wrong configuration; 3: unusable checkpoint or workload."""
    from hydraspec.cli.doctor import main as doctor

    return doctor(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
