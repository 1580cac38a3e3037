"""How launchers are built: without optimisation, or Triton's own way."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import hydraspec_kernels.runtime.compilation as launch
import pytest
from triton import knobs
from triton.runtime import build

MODULE = """
#include <Python.h>
static PyObject *optimised(PyObject *self, PyObject *args) {
#ifdef __OPTIMIZE__
    Py_RETURN_TRUE;
#else
    Py_RETURN_FALSE;
#endif
}
static PyMethodDef methods[] = {{"optimised", optimised, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "NAME", NULL, -1, methods};
PyMODINIT_FUNC PyInit_NAME(void) { return PyModule_Create(&definition); }
"""

HEADER = Path(sysconfig.get_paths()["include"]) / "Python.h"


@pytest.fixture(autouse=True)
def _set_up_as_by_a_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.build, "impl", None)
    launch.build_launchers_without_optimisation()


needs_a_compiler = pytest.mark.skipif(
    not (shutil.which("gcc") or shutil.which("clang")) or not HEADER.is_file(),
    reason="no C compiler, or no header of Python's, here",
)


def built(name: str) -> bool:
    module = build.compile_module_from_src(MODULE.replace("NAME", name), name)
    return bool(module.optimised())


@needs_a_compiler
def test_launchers_are_built_without_optimisation(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert knobs.build.impl is launch.build_unoptimised
    assert not built("plain_launcher")
    assert knobs.build.impl is launch.build_unoptimised
    monkeypatch.setattr(knobs.build, "impl", None)
    assert built("optimised_launcher")


@needs_a_compiler
def test_a_failing_build_fails_as_tritons_does_and_the_next_one_works(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with pytest.raises(subprocess.CalledProcessError):
        build.compile_module_from_src("#error no", "broken_launcher")
    assert knobs.build.impl is launch.build_unoptimised
    assert not built("next_launcher")
