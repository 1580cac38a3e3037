"""Makes one rank of a run fail, as FAULT=rank:step:fault says, where this folder is on PYTHONPATH.

Python imports a module of this name when it starts; in other processes it does nothing.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if "FAULT" in os.environ and "LOCAL_RANK" in os.environ:
    sys.path.append(str(Path(__file__).parents[1]))
    from faulty_rank import misbehave

    from hydraspec.parallel.progress import Progress

    who, when, fault = os.environ["FAULT"].split(":")
    step = Progress.step

    @contextmanager
    def failing_step(self: Progress) -> Iterator[None]:
        with step(self):
            if self.num_steps == int(when) and os.environ["RANK"] == who:
                Path(os.environ["FAULT_FILE"]).touch()
                misbehave(fault)
            yield

    Progress.step = failing_step  # type: ignore[method-assign]
