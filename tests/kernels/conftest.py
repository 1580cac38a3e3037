"""What every test of a kernel shares."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _loops_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter holds loop bounds as numpy arrays of one dimension, which numpy 2.4
    no longer turns into numbers.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return
    original = interpreter._patch_lang_tensor

    def patched(tensor: object, scope: object) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
