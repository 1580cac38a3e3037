"""What every test of a kernel shares."""

import pytest
from hydraspec_kernels.attention import tiling
from paged_queries import REGIMES
from triton_interpreter import mend_interpreter


@pytest.fixture(autouse=True)
def _mended_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    mend_interpreter(monkeypatch)


@pytest.fixture(params=REGIMES)
def regime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to find a request; few splits, because the interpreter is slow."""
    if request.param == "looked up":
        monkeypatch.setattr(tiling, "MOST_SPLIT_ROWS", 0)
    monkeypatch.setattr(tiling, "FULL_DEVICE", 8)
    return request.param
