"""`python -m hydraspec` is the console script `hydraspec`."""

import sys

from hydraspec.cli import main

if __name__ == "__main__":
    sys.exit(main())
