"""`python -m hydraspec.cli.rank`: one rank of a job, which parallel/launch.py starts."""

from __future__ import annotations

import sys

from hydraspec.cli.ranks import PROGRAM
from hydraspec.parallel.worker import work

if __name__ == "__main__":
    sys.exit(work(PROGRAM))
