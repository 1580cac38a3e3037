"""Checks of overrides of Hydra's own configuration: none may name code, or a folder outside the
run folder. Hydra itself would import and call what `_target_`, `class` or `ext://` names.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import PurePosixPath

from omegaconf import DictConfig

from hydraspec.cli.folders import RUN_DIR, SWEEP_DIR
from hydraspec.config.messages import listing, refusal

LAUNCHER, BASIC = "hydra/launcher", "basic"
LAUNCHERS = {  # each with the package that has it
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}
# Choices of groups whose files name classes: those that ship with Hydra, and ours.
CHOICES = {
    "hydra/job_logging": ("console", "default", "disabled", "none", "stdout"),
    "hydra/hydra_logging": ("default", "disabled", "hydra_debug", "none"),
    LAUNCHER: (BASIC, *LAUNCHERS),
    "hydra/sweeper": ("basic",),
    "hydra/callbacks": (),
}
NAMES_CODE = {"_target_", "class", "()", "factory"}
LOGGING = ("hydra.job_logging", "hydra.hydra_logging")
LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET")


def check_hydra_key(key: str, value: object) -> None:
    """Refuse an override of Hydra's configuration that names code, or an empty folder name, which
    would mean the current folder.

    Raises:
        ConfigurationError: naming the key.
    """
    if key in (RUN_DIR, SWEEP_DIR) and not str(value or "").strip():
        raise refusal(
            key, "", "names no folder", allowed="a folder", remedy="name one, or leave it out"
        )
    if key in CHOICES:
        if value not in CHOICES[key]:
            allowed = listing(CHOICES[key]) or "none"
            raise refusal(key, value, "is not available", allowed=allowed, remedy="leave it out")
        package = LAUNCHERS.get(str(value))
        if package and find_spec(f"hydra_plugins.{package.replace('-', '_')}") is None:
            raise refusal(
                key,
                value,
                f"needs the package {package}, which is not installed",
                allowed=BASIC,
                remedy=f"pip install {package}==1.2.0, or leave it out",
            )
        return
    parts = re.split(r"[.\[\]]+", key)
    if NAMES_CODE & set(parts):
        problem, allowed = "names code, which no override may do", "keys that hold plain values"
        raise refusal(key, value, problem, allowed=allowed, remedy="leave it out")
    if ".".join(parts[:2]) not in LOGGING:
        return
    if parts[-1] != "level" or str(value).upper() not in LEVELS:
        raise refusal(
            key,
            value,
            "is not available: of logging only levels can be set",
            allowed=f"{LOGGING[0]}.root.level=<one of {', '.join(LEVELS)}>",
            remedy="use hydra.verbose=true, or hydra/job_logging=<choice>",
        )


def launcher_of(composed: DictConfig) -> str:
    """Name of the launcher that a command line chooses."""
    return str(composed.hydra.runtime.choices.get(LAUNCHER, BASIC))


def check_launcher(composed: DictConfig, *, is_sweep: bool) -> None:
    """Refuse a launcher other than Hydra's basic one for a single run.

    Raises:
        ConfigurationError: naming the launcher.
    """
    name = launcher_of(composed)
    if name != BASIC and not is_sweep:
        raise refusal(
            LAUNCHER,
            name,
            "has no meaning for one run",
            allowed=f"{BASIC}, or a sweep",
            remedy="add -m, or leave it out",
        )


def check_output_subdir(subdir: str | None) -> None:
    """Refuse a hydra.output_subdir outside the run folder, or that is the run folder itself.

    Raises:
        ConfigurationError: naming the key.
    """
    if subdir is None:
        return
    path = PurePosixPath(subdir)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise refusal(
            "hydra.output_subdir",
            subdir,
            "is no folder inside the run folder",
            allowed="null, or a name such as .hydra",
            remedy="leave it out: the run folder has its own config.yaml",
        )
