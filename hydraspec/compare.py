"""`python -m hydraspec.compare`, which is `hydraspec compare`: runs over the same prompts, paired.

Once it is imported Python has this module in the place of the function `hydraspec.compare`, so the
module can be called as the function is.
"""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType

from hydraspec import compare
from hydraspec.cli.main import main as command_line

main = partial(command_line, verb="compare")


class _Compare(ModuleType):
    __call__ = staticmethod(compare)


sys.modules[__name__].__class__ = _Compare

if __name__ == "__main__":
    sys.exit(main())
