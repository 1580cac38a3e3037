"""`python -m hydraspec.replay`: other numbers of drafts and other rules, from a run's record."""

from __future__ import annotations

import sys


def main() -> int:
    """Exit status 0; 2: nothing to replay, or a rule that the record does not answer for."""
    from hydraspec.cli.replay import main as replay

    return replay(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
