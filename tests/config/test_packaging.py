"""What the wheel ships, and what the Makefile offers."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path

import hydraspec

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]
TARGETS = ["help", "run", "setup", "test", "test-fast", "test-slow", "test-oracle", "fmt"]
TARGETS += ["lint", "type", "check"]
TARGETS += ["wheel", "bench", "bench-gpu", "bench-kernels", "test-gpu", "test-multi-gpu"]
TARGETS += ["verify-gpu", "table", "sweep", "clean"]

DISTRIBUTIONS = {
    "PIL": "pillow",
    "hydra": "hydra-core",
    "yaml": "pyyaml",
    "wandb_workspaces": "wandb-workspaces",
}  # import name → name on the index
INSTALLED_BY_THE_USER = {"vllm"}  # it asks for a torch of its own


def packages_below(folder: str, name: str) -> set[str]:
    root = ROOT / folder
    inner = (path.parent.relative_to(root).parts for path in root.rglob("__init__.py"))
    return {".".join((name, *parts)) for parts in inner}


def test_package_list_is_what_the_folders_hold():
    held = packages_below("hydraspec", "hydraspec")
    held |= packages_below("kernels/hydraspec_kernels", "hydraspec_kernels")
    held -= {"hydraspec.zoo.recipe"}  # trains the checkpoints, from a checkout
    assert set(SETUPTOOLS["packages"]) == held | {"hydraspec.conf"}


def test_every_file_of_configuration_models_pages_and_zoo_ships():
    for package, folder in (
        ("hydraspec.conf", "conf"),
        ("hydraspec.models", "hydraspec/models"),
        ("hydraspec.study", "hydraspec/study"),
        ("hydraspec.zoo", "hydraspec/zoo"),
    ):
        root = ROOT / folder
        shipped = {p for glob in SETUPTOOLS["package-data"][package] for p in root.glob(glob)}
        wanted = {p for p in root.rglob("*") if p.suffix in {".yaml", ".json", ".safetensors"}}
        wanted |= {p for p in root.rglob("*") if p.suffix in {".jinja", ".jsonl", ".html", ".css"}}
        assert wanted <= shipped


def imported(path: Path) -> set[str]:
    """Packages that a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    return {name.partition(".")[0] for name in names}


def test_every_package_that_is_imported_is_declared():
    """Catches an import that works here only because another package brings it along."""
    roots = (ROOT / "hydraspec", ROOT / "kernels" / "hydraspec_kernels")
    found = {name for root in roots for path in root.rglob("*.py") for name in imported(path)}
    found -= {*sys.stdlib_module_names, "hydraspec", "hydraspec_kernels"}
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    used = ("grammar", "oracle", "reports", "workloads")
    written = [*project["dependencies"], *(text for name in used for text in extras[name])]
    declared = {re.split(r"[^\w-]", text, maxsplit=1)[0] for text in written}
    assert {DISTRIBUTIONS.get(name, name) for name in found} - declared == INSTALLED_BY_THE_USER
    assert "omegaconf" in written, "without a version: see pyproject.toml"


def test_version_is_written_once_more_only():
    assert hydraspec.__version__ == PROJECT["project"]["version"]


def test_conf_is_found_as_a_package():
    assert files("hydraspec.conf").joinpath("config.yaml").is_file()


def test_make_help_lists_every_target():
    plain = {"PATH": os.environ["PATH"]}  # without what an outer `make test` passes on
    done = subprocess.run(
        ["make", "help"], cwd=ROOT, env=plain, capture_output=True, text=True, check=True
    )
    listed = [line.split()[0] for line in done.stdout.splitlines()]
    assert listed == TARGETS
    assert all(len(line.split()) > 2 for line in done.stdout.splitlines())


def test_the_files_of_test_fast_exist():
    done = subprocess.run(
        ["make", "-n", "test-fast"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    named = re.findall(r"tests/\S+", done.stdout)
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []
