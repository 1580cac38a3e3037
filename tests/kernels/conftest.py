"""What every test of a kernel shares."""

import pytest
from triton_interpreter import mend_interpreter


@pytest.fixture(autouse=True)
def _mended_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    mend_interpreter(monkeypatch)
