"""The command: `python -m hydraspec`, and the console script `hydraspec`.

Imports only the standard library and ours, so that it can name the packages that are missing.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from hydraspec.signals import terminations_as_interrupts

# A checkout that was never installed lacks pip's packages, and conf/ and kernels/ as packages.
NEEDED = (
    *("hydraspec.conf", "hydraspec_kernels"),
    *("hydra", "omegaconf", "yaml", "numpy", "torch", "safetensors", "transformers", "rich"),
)
INTERRUPTED = 130


def main() -> int:
    """Run the command line in sys.argv and return its exit status."""
    absent = [name for name in NEEDED if find_spec(name) is None]
    if absent:
        sys.stderr.write(
            f"hydraspec: is not installed for {sys.executable}: it lacks {', '.join(absent)}\n"
            "  allowed: a Python that hydraspec was installed for\n"
            "  to do: in the checkout run `make setup`, then .venv/bin/python -m hydraspec; or run "
            "`pip install -e .`\n"
        )
        return 1
    with terminations_as_interrupts():
        try:
            from hydraspec.cli.main import main as run

            return run()
        except KeyboardInterrupt:
            sys.stderr.write("hydraspec: interrupted: nothing was finished\n")
            return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
