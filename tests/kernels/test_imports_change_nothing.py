"""Importing kernel modules changes no setting of Triton, torch, the process or its environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import hydraspec_kernels

ROOT = Path(hydraspec_kernels.__file__).parent
MODULES = sorted(
    ".".join(("hydraspec_kernels", *path.relative_to(ROOT).with_suffix("").parts))
    for path in ROOT.rglob("*.py")
    if path.name != "__init__.py"
)
SETTINGS = """
import importlib, json, os, signal, sys, warnings
import torch, triton
from triton import knobs
from triton.runtime import build, driver
from triton.runtime.jit import JITFunction

def public(holder):
    names = [name for name in dir(holder) if not name.startswith("_")]
    return {name: repr(getattr(holder, name)) for name in names}

def settings():
    found = {"environ": repr(sorted(os.environ.items())), "run": repr(JITFunction.run)}
    found |= {"build": repr(build._build), "driver": repr(driver._active)}
    found |= {"filters": repr(warnings.filters), "hook": repr(sys.excepthook)}
    found |= {"signals": repr([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)])}
    for name in dir(knobs):
        if isinstance(getattr(knobs, name), knobs.base_knobs):
            found |= {f"{name}.{key}": value for key, value in public(getattr(knobs, name)).items()}
    found |= {"types": repr((torch.get_default_dtype(), torch.get_default_device()))}
    found |= {"threads": repr((torch.get_num_threads(), torch.is_grad_enabled()))}
    found |= {"deterministic": repr(torch.are_deterministic_algorithms_enabled())}
    found |= {"precision": repr(torch.get_float32_matmul_precision())}
    for backend in (torch.backends.cuda.matmul, torch.backends.cudnn):
        found["tf32", backend.__class__.__name__] = repr(backend.allow_tf32)
    return found

"""
IMPORT_ALL = """
before = settings()
for module in json.loads(sys.argv[1]):
    importlib.import_module(module)
after = settings()
print([key for key in before.keys() | after.keys() if before.get(key) != after.get(key)])
"""
SWITCHED = """
importlib.import_module("hydraspec_kernels.runtime.compilation")
found = []
for statement in json.loads(sys.argv[1]):
    before = settings()
    exec(statement)
    after = settings()
    found.append([key for key in before if before[key] != after[key]])
print(json.dumps(found))
"""
SWITCHES = {
    # What a first launch does.
    "sys.modules['hydraspec_kernels.runtime.compilation'].build_launchers_without_optimisation()": (
        "build.impl"
    ),
    "knobs.build.impl = print": "build.impl",
    "os.environ['TRITON_CACHE_DIR'] = '/tmp'": "environ",
    "JITFunction.run = print": "run",
    "torch.set_float32_matmul_precision('high')": "precision",
}


def changed(program: str, *arguments: str) -> str:
    """What `program` prints in a fresh process, in which Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SETTINGS + program, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_importing_every_module_changes_no_setting() -> None:
    assert changed(IMPORT_ALL, json.dumps(MODULES)) == "[]"


def test_changed_settings_are_found() -> None:
    """One after the other, in one process."""
    found = json.loads(changed(SWITCHED, json.dumps(list(SWITCHES))))
    for (statement, setting), keys in zip(SWITCHES.items(), found, strict=True):
        assert setting in keys, statement
