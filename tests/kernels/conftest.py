"""What every test of a kernel shares."""

import pytest
from kernel_places import mend_loops


@pytest.fixture(autouse=True)
def _loops_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    mend_loops(monkeypatch)
