"""Who may import whom, no circles, and which room owns which package."""

import ast
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from source_tree import ROOT, SOURCES, parsed

# Room → rooms it may import, itself and errors always. Rooms stand in the order of the layers: one
# imports only rooms that are listed before it. The longest prefix of a module names its room; a
# dotted entry that is no room allows that module alone.
MAY_IMPORT = {
    "kernels": set(),
    "errors": set(),
    "pictures": set(),
    "prompts": set(),
    "parameters": set(),
    "types": {"kernels", "pictures", "prompts", "parameters"},  # for their records
    "signals": set(),
    "shipped": set(),
    "version": set(),
    "plugins": set(),
    "config": {"types", "parameters", "pictures", "plugins", "shipped"},
    "factory": {"config", "types"},  # classes by string only
    "parallel": {"kernels", "types", "signals", "config", "factory"},
    "sampling": {"kernels", "types", "parameters", "parallel"},
    "graphs": {"kernels", "types"},
    "models": {"kernels", "types", "pictures", "plugins", "shipped", "parallel"},
    "speculators": {
        *("kernels", "types", "plugins", "config", "sampling", "models", "graphs", "parallel"),
    },
    "engine": {
        *("kernels", "types", "config", "sampling", "models", "graphs", "parallel"),
        *("speculators", "signals", "shipped"),
    },
    "parallel.engines": {"types", "config", "signals", "parallel", "engine"},
    "adapters": {"kernels", "types", "config", "sampling", "models", "engine", "shipped"},
    "metrics": {"types"},
    "study": {"types", "metrics", "pictures"},
    "workloads": {"types", "config", "pictures", "plugins", "shipped"},
    "lab": {
        *("signals", "types", "config", "metrics", "engine.base", "factory", "study"),
        *("version", "shipped", "models.tokenizer", "models.checkpoint.reader", "workloads"),
        "models.checkpoint.config_reader",
        "speculators.registry",
    },
    "bench": {
        *("types", "config", "metrics", "engine.base", "factory", "study", "workloads"),
        *("lab.environment", "lab.folder", "signals", "shipped"),
        *("models.checkpoint.reader", "models.checkpoint.config_reader"),
    },
    "analysis": set(),
    "analysis.doctor": {
        *("types", "kernels", "config", "models", "speculators", "metrics", "factory", "study"),
        *("lab.environment", "lab.folder", "workloads", "signals"),
    },
    "analysis.predict": {
        *("types", "config", "engine.base", "engine.costs", "engine.slots", "factory", "metrics"),
        *("lab.environment", "lab.folder", "lab.rounds", "workloads", "signals", "study"),
    },
    "analysis.replay": {"config", "metrics", "study"},
    "zoo": {"types", "config", "models", "workloads"},
    "cli": {
        *("signals", "config", "lab", "bench", "study", "metrics.run_files", "workloads"),
        *("analysis.doctor", "analysis.predict", "analysis.replay"),
        *("parallel", "factory", "engine.base", "version"),
    },
    "root": {"cli", "signals", "engine.base", "version"},  # what python -m runs, and __init__.py
}
ROOT_FILES = {"__init__", "__main__", "compare", "doctor", "gate", "matrix", "predict", "replay"}
ROOT_FILES |= {"report"}
MAX_FOLDERS = 16  # directly under hydraspec/

# Package → files that may import it. What is not listed here belongs to nobody yet.
EVERYWHERE_BUT_THE_COMMAND_LINE = [
    "kernels/*",
    "hydraspec/pictures.py",
    "hydraspec/prompts.py",
    "hydraspec/types.py",
    *(f"hydraspec/{room}/*" for room in ("sampling", "models", "speculators", "engine", "zoo")),
    *(f"hydraspec/{room}/*" for room in ("parallel", "lab", "bench", "study", "metrics")),
    *(f"hydraspec/{room}/*" for room in ("adapters", "analysis", "graphs", "workloads")),
]
OWNERS = {
    "torch": EVERYWHERE_BUT_THE_COMMAND_LINE,
    "torch.distributed": [
        "hydraspec/parallel/*",
        "kernels/hydraspec_kernels/collectives/memory.py",
        "kernels/benchmarks/bench_all_reduce.py",
    ],
    "numpy": EVERYWHERE_BUT_THE_COMMAND_LINE,
    "triton": ["kernels/*kernel.py", "kernels/hydraspec_kernels/runtime/compilation.py"],
    "omegaconf": [
        "hydraspec/config/*",
        "hydraspec/cli/*",
    ],
    "hydra": ["hydraspec/cli/*"],
    "safetensors": ["hydraspec/models/*", "hydraspec/zoo/*"],
    "huggingface_hub": ["hydraspec/models/checkpoint/hub.py"],
    "transformers": [
        "hydraspec/models/tokenizer.py",
        "hydraspec/adapters/transformers/*",
        "hydraspec/adapters/vllm/configs.py",
        "hydraspec/zoo/*",
    ],
    "tokenizers": ["hydraspec/zoo/*"],
    "speculators": ["hydraspec/zoo/*"],
    "vllm": ["hydraspec/adapters/vllm/*"],
    "wandb": ["hydraspec/metrics/tracker.py", "hydraspec/study/wandb_report.py"],
    "wandb_workspaces": ["hydraspec/study/wandb_report.py"],
    "harness": ["kernels/benchmarks/*"],  # beside them: benchmarks are no package
    "paged_caches": ["kernels/benchmarks/*"],
    "round_trip_kernel": ["kernels/benchmarks/*"],
    "rich": [
        *(f"hydraspec/{room}/*" for room in ("metrics", "lab", "bench", "study", "zoo")),
        "hydraspec/graphs/progress.py",
    ],
    "yaml": ["hydraspec/analysis/doctor/expected.py", "hydraspec/lab/*", "hydraspec/study/*"],
    "datasets": ["hydraspec/workloads/*"],
    "pyarrow": ["hydraspec/workloads/published.py"],
    "xgrammar": ["hydraspec/engine/grammars.py"],
    "scipy": ["hydraspec/metrics/statistics.py"],
    "threadpoolctl": ["hydraspec/metrics/step_costs.py"],
    "jinja2": ["hydraspec/study/html.py"],
    "PIL": ["hydraspec/models/pictures/decoding.py"],
}
# Packages that are imported inside functions only.
LAZY = {"PIL", "scipy", "wandb", "wandb_workspaces", "datasets", "pyarrow", "vllm", "xgrammar"}


def room_of(path: str) -> str:
    return room_of_module(module_name(path))


def module_name(path: str) -> str:
    """The dotted name of a file of ours; of a benchmark, a name in the room of the kernels."""
    parts = list(Path(path).with_suffix("").parts)
    if parts[0] == "kernels":
        parts = parts[1:] if parts[1] == "hydraspec_kernels" else ["hydraspec_kernels", *parts[1:]]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of_module(module: str) -> str:
    top, *rest = module.split(".")
    if top == "hydraspec_kernels":
        return "kernels"
    if not rest or (len(rest) == 1 and rest[0] in ROOT_FILES):
        return "root"
    rooms = (".".join(rest[:length]) for length in (2, 1))
    return next((room for room in rooms if room in MAY_IMPORT), rest[0])


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(tree: ast.AST, *, lazy: bool = False) -> Iterator[tuple[str, bool]]:
    """Modules, and whether a function imports them; `from a import b` is a.b if that is one."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                folder = ROOT if inner.startswith("hydraspec.") else ROOT / "kernels"
                at = folder / inner.replace(".", "/")
                is_module = at.is_dir() or at.with_suffix(".py").is_file()
                yield (inner if is_module else str(node.module), lazy)
        else:
            inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from imports(node, lazy=inside)


def without_type_checking(tree: ast.Module) -> ast.Module:
    return ast.Module([node for node in tree.body if not is_type_checking(node)], [])


def is_owned(path: str, owners: list[str]) -> bool:
    return any(fnmatch(path, owner) for owner in owners)


def ours(path: str) -> Iterator[str]:
    """Modules of ours that a file imports, within functions too; not for annotations only."""
    tree = without_type_checking(parsed(path))
    for module, _ in imports(tree):
        if module.split(".")[0] in ("hydraspec", "hydraspec_kernels"):
            yield module


def named_modules(path: str) -> Iterator[str]:
    """Modules of ours that a file names as "module:attribute", to import them later."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = re.fullmatch(r"(hydraspec[\w.]*):\w+", node.value)
            if found:
                yield found.group(1)


def test_rooms_stand_in_the_order_of_layers():
    """A room's row names only rooms above it: rooms do not import each other in a circle."""
    above: set[str] = set()
    for room, allowed in MAY_IMPORT.items():
        rooms = {room_of_module(f"hydraspec.{entry}") for entry in allowed - {"kernels"}}
        assert rooms <= above, f"{room} may import {rooms - above}, which come after it"
        above.add(room)
    folders = {path.split("/")[1] for path in SOURCES if path.count("/") > 1}
    ours_only = {folder for folder in folders if (ROOT / "hydraspec" / folder).is_dir()}
    assert len(ours_only) <= MAX_FOLDERS, sorted(ours_only)


def test_arrows_point_down():
    wrong = []
    for path in SOURCES:
        room = room_of(path)
        assert room in MAY_IMPORT, f"{path}: give the room {room} its place in MAY_IMPORT"
        for module in ours(path):
            other, allowed = room_of_module(module), MAY_IMPORT[room]
            alone = allowed - MAY_IMPORT.keys()
            is_named = any(f"{module}.".startswith(f"hydraspec.{entry}.") for entry in alone)
            if not is_named and other not in {room, "errors"} | allowed:
                wrong.append(f"{path} ({room}) imports {module}")
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle():
    """Within functions and by name counts too: what is imported late is still a dependency."""
    files = {module_name(path): path for path in SOURCES if not path.startswith("kernels/bench")}
    graph = {
        name: {other for other in (*ours(path), *named_modules(path)) if other in files} - {name}
        for name, path in files.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(" imports ".join(circle.args[1][::-1]))


def test_packages_are_imported_by_their_owners():
    wrong = []
    for path in SOURCES:
        for module, lazy in imports(parsed(path)):
            top = module.split(".")[0]
            if top in sys.stdlib_module_names or top in ("hydraspec", "hydraspec_kernels"):
                continue
            assert top in OWNERS, f"{path}: {top} has no owner in OWNERS"
            for name in {top, ".".join(module.split(".")[:2])} & set(OWNERS):
                if not is_owned(path, OWNERS[name]):
                    wrong.append(f"{path} imports {name}")
            if not lazy and top in LAZY:
                wrong.append(f"{path}: import {top} inside the function that needs it")
    assert not wrong, "\n".join(wrong)
