"""The house rules that a machine can hold: arrows, owners, sizes, and never asking the device."""

import ast
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("hydraspec", "kernels")
    for path in (ROOT / folder).rglob("*.py")
)
TESTS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py"))

# Room → rooms it may import; itself and errors always. Arrows point down the table of the design.
MAY_IMPORT = {
    "kernels": set(),
    "errors": set(),
    "types": {"kernels"},  # for their records
    "signals": set(),
    "costs": set(),
    "shipped": set(),
    "plugins": set(),
    "config": {"types", "plugins", "shipped"},
    "sampling": {"kernels", "types", "distributed"},
    "distributed": {"kernels", "types", "signals"},
    "graphs": {"kernels", "types"},
    "models": {"kernels", "types", "plugins", "shipped", "distributed"},
    "speculators": {"kernels", "types", "config", "sampling", "models", "graphs", "distributed"},
    "teacher_forcing": {"kernels", "models", "types"},
    "engine": {
        *("kernels", "types", "config", "sampling", "models", "graphs", "distributed"),
        *(
            "speculators",
            "teacher_forcing",
            "factory",
            "signals",
            "costs",
        ),  # the factory knows speculators by string only
    },
    "splits": {"types", "shipped", "config", "models", "distributed", "factory"},
    "metrics": {"types"},
    "comparison": {"metrics"},
    "report": {"types", "metrics", "comparison"},
    "lab": {
        *("root", "signals", "types", "plugins", "config", "metrics", "engine.base", "factory"),
        *("report", "shipped", "costs", "models.tokenizer", "models.checkpoint.reader"),
    },
    "bench": {
        *("types", "config", "metrics", "engine.base", "factory", "report"),
        *("lab.arrivals", "lab.conversations", "lab.environment", "lab.folder", "lab.workloads"),
        "signals",
    },
    "doctor": {
        *("types", "kernels", "config", "models", "speculators", "metrics", "factory", "report"),
        *("lab.environment", "lab.folder", "lab.generated", "lab.workloads"),
        "teacher_forcing",
    },
    "predict": {
        *("types", "costs", "config", "engine.base", "factory", "metrics", "report"),
        *("lab.environment", "lab.folder", "lab.generated", "lab.rounds", "lab.workloads"),
    },
    "replay": {"comparison", "config", "metrics", "report"},
    "factory": {"config", "types", "plugins"},
    "zoo": {"types", "config", "models"},
    "cli": {
        *("signals", "config", "lab", "bench", "report", "metrics.run_files"),
        *("distributed", "factory", "comparison", "doctor", "predict", "replay", "engine.base"),
        "splits",
    },
    "root": {"cli", "signals", "engine.base"},  # hydraspec/__init__.py, and what python -m runs
}
ROOMS_OF_FILES = {
    "hydraspec/__init__.py": "root",
    "hydraspec/__main__.py": "root",
    "hydraspec/compare.py": "root",
    "hydraspec/gate.py": "root",
    "hydraspec/matrix.py": "root",
    "hydraspec/doctor/__main__.py": "root",
    "hydraspec/replay/__main__.py": "root",
    "hydraspec/report/__main__.py": "root",
    "hydraspec/predict/__main__.py": "root",
}

# Package → files that may import it. What is not listed here belongs to nobody yet.
EVERYWHERE_BUT_THE_COMMAND_LINE = [
    "kernels/*",
    "hydraspec/types.py",
    *(f"hydraspec/{room}/*" for room in ("sampling", "models", "speculators", "engine", "zoo")),
    *(f"hydraspec/{room}/*" for room in ("distributed", "lab", "bench", "report", "metrics")),
    "hydraspec/doctor/*",
    "hydraspec/predict/*",
    "hydraspec/teacher_forcing/*",
    "hydraspec/splits.py",
    "hydraspec/replay/*",
    "hydraspec/graphs/*",
    "hydraspec/comparison/*",
]
OWNERS = {
    "torch": EVERYWHERE_BUT_THE_COMMAND_LINE,
    "torch.distributed": [
        "hydraspec/distributed/*",
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
        "hydraspec/engine/transformers/*",
        "hydraspec/engine/vllm/configs.py",
        "hydraspec/zoo/*",
    ],
    "tokenizers": ["hydraspec/zoo/*"],
    "speculators": ["hydraspec/zoo/*"],
    "vllm": ["hydraspec/engine/vllm/*"],
    "wandb": ["hydraspec/metrics/tracker.py", "hydraspec/report/study/wandb_report.py"],
    "wandb_workspaces": ["hydraspec/report/study/wandb_report.py"],
    "harness": ["kernels/benchmarks/*"],  # beside them: benchmarks are no package
    "paged_caches": ["kernels/benchmarks/*"],
    "round_trip_kernel": ["kernels/benchmarks/*"],
    "rich": [
        *(f"hydraspec/{room}/*" for room in ("metrics", "lab", "bench", "report", "zoo")),
        "hydraspec/graphs/progress.py",
    ],
    "yaml": ["hydraspec/lab/*", "hydraspec/report/*", "hydraspec/comparison/*"],
    "datasets": ["hydraspec/lab/*"],
    "jinja2": ["hydraspec/report/html.py"],
}
LAZY = {"wandb", "wandb_workspaces", "datasets", "vllm"}  # imported inside functions only

# Files of the step, and in them the functions that run outside it, while loading.
STEP_FILES = [
    "kernels/hydraspec_kernels/*/__init__.py",
    "kernels/hydraspec_kernels/*/cpu.py",
    "kernels/hydraspec_kernels/*/plan.py",
    "kernels/hydraspec_kernels/*/tiling.py",
    "kernels/hydraspec_kernels/*kernel.py",
    "kernels/hydraspec_kernels/sampling/*.py",
    "kernels/hydraspec_kernels/step_inputs/*.py",
    "hydraspec/sampling/*.py",
    "hydraspec/speculators/*.py",
    "hydraspec/models/*.py",
    "hydraspec/engine/native/inputs.py",
    "hydraspec/engine/native/runner.py",
    "hydraspec/engine/native/state.py",
    "hydraspec/engine/native/device_runner.py",
    "hydraspec/engine/native/step_graphs.py",
    "hydraspec/engine/native/upload.py",
    "hydraspec/graphs/*.py",
]
OUTSIDE_THE_STEP: dict[str, set[str]] = {
    "hydraspec/engine/native/upload.py": {"wait_for"},  # a copy of some steps ago
    "hydraspec/models/gemma4/model.py": {"rounded"},
    "hydraspec/models/gemma4/layer.py": {"finish"},
}
ASKS_THE_DEVICE = {"cpu", "item", "tolist", "numpy", "synchronize", "nonzero", "masked_select"}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_FUNCTION_LINES = 120  # *kernel.py
MAX_LEAF_LINES = 130  # a speculator is a list of differences
SPECULATOR_BASES = {"base.py", "draft_model.py", "autoregressive.py", "parallel.py"}


def parsed(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def room_of(path: str) -> str:
    if path in ROOMS_OF_FILES:
        return ROOMS_OF_FILES[path]
    if path.startswith("kernels/"):
        return "kernels"
    return path.split("/")[1].removesuffix(".py")


def room_of_module(module: str) -> str:
    if module.split(".")[0] == "hydraspec_kernels":
        return "kernels"
    parts = module.split(".")
    if len(parts) == 1:
        return "root"
    return room_of("/".join(parts[:2]) + ("" if (ROOT / "/".join(parts[:2])).is_dir() else ".py"))


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
                at = ROOT / inner.replace(".", "/")
                is_module = at.is_dir() or at.with_suffix(".py").is_file()
                yield (inner if is_module else str(node.module), lazy)
        else:
            inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from imports(node, lazy=inside)


def without_type_checking(tree: ast.Module) -> ast.Module:
    tree.body = [node for node in tree.body if not is_type_checking(node)]
    return tree


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def is_owned(path: str, owners: list[str]) -> bool:
    return any(fnmatch(path, owner) for owner in owners)


@pytest.mark.parametrize("path", SOURCES)
def test_arrows_point_down(path):
    room = room_of(path)
    assert room in MAY_IMPORT, f"{path}: give the room {room} its place in MAY_IMPORT"
    tree = parsed(path)
    if room == "factory":  # it names classes by string; only its annotations know them
        tree = without_type_checking(tree)
    for module, _ in imports(tree):
        if module.split(".")[0] not in ("hydraspec", "hydraspec_kernels"):
            continue
        other = room_of_module(module)
        allowed = MAY_IMPORT[room]
        below = {entry for entry in allowed if module.startswith(f"hydraspec.{entry}")}
        assert other in {room, "errors"} | allowed or below, f"{path} ({room}) imports {module}"


def test_nobody_imports_the_zoo_or_the_command_line():
    for path in SOURCES:
        rooms = {room_of_module(m) for m, _ in imports(parsed(path)) if m.startswith("hydraspec")}
        assert "zoo" not in rooms or room_of(path) == "zoo", path
        assert "cli" not in rooms or room_of(path) in ("cli", "root"), path


@pytest.mark.parametrize("path", SOURCES)
def test_packages_are_imported_by_their_owners(path):
    for module, lazy in imports(parsed(path)):
        top = module.split(".")[0]
        if top in sys.stdlib_module_names or top in ("hydraspec", "hydraspec_kernels"):
            continue
        assert top in OWNERS, f"{path}: {top} has no owner in OWNERS"
        for name in {top, ".".join(module.split(".")[:2])} & set(OWNERS):
            assert is_owned(path, OWNERS[name]), f"{path} imports {name}"
        assert lazy or top not in LAZY, f"{path}: import {top} inside the function that needs it"


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if any(fnmatch(path, step) for step in STEP_FILES)]
)
def test_the_device_is_never_asked(path):
    outside = OUTSIDE_THE_STEP.get(path, set())
    tree = parsed(path)
    skipped = {
        id(inner)
        for function in functions(tree)
        if function.name in outside
        for inner in ast.walk(function)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or id(node) in skipped:
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        to_cpu = called == "to" and any(
            isinstance(a, ast.Constant) and a.value == "cpu" for a in node.args
        )
        assert called not in ASKS_THE_DEVICE, f"{path}:{node.lineno} calls .{called}() in the step"
        assert not to_cpu, f"{path}:{node.lineno} copies to the host in the step"


def test_functions_outside_the_step_exist():
    """A stale exception would let the next one through."""
    for path, names in OUTSIDE_THE_STEP.items():
        assert names <= {function.name for function in functions(parsed(path))}, path


@pytest.mark.parametrize("path", [*SOURCES, *TESTS])
def test_files_and_functions_stay_small(path):
    assert len((ROOT / path).read_text(encoding="utf-8").splitlines()) < MAX_FILE_LINES, path
    if path in TESTS:
        return
    limit = MAX_KERNEL_FUNCTION_LINES if path.endswith("kernel.py") else MAX_FUNCTION_LINES
    for function in functions(parsed(path)):
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        assert length < limit, f"{path}: {function.name} has {length} lines"


@pytest.mark.parametrize("path", SOURCES)
def test_folders_stay_flat_and_modules_say_what_they_are(path):
    package = path.removeprefix("kernels/")
    assert package.count("/") <= 3, f"{path} is more than two folders deep"
    tree = parsed(path)
    assert not tree.body or ast.get_docstring(tree), f"{path} has no docstring"


def public_names(path: str) -> Iterator[tuple[str, bool]]:
    """Public classes, functions and methods of a file, and whether each has a docstring."""
    documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    tree = parsed(path)
    for node in tree.body:
        if not isinstance(node, documented) or node.name.startswith("_"):
            continue
        yield node.name, bool(ast.get_docstring(node))
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            is_public = isinstance(inner, documented) and not inner.name.startswith("_")
            if is_public and ast.unparse(inner.body[0]) != "...":  # a protocol's declaration
                yield f"{node.name}.{inner.name}", bool(ast.get_docstring(inner))


def test_public_names_say_what_they_are():
    """A method may leave it to a class that documents the same method: its base or its protocol."""
    names = [
        (path, name, has)
        for path in SOURCES
        if not path.startswith("kernels/benchmarks/")  # scripts
        for name, has in public_names(path)
    ]
    inherited = {name.partition(".")[2] for _, name, has in names if has and "." in name}
    silent = [
        f"{path}: {name}"
        for path, name, has in names
        if not has and name.partition(".")[2] not in inherited
    ]
    assert not silent, f"without a docstring: {', '.join(silent)}"


def test_speculators_are_lists_of_differences():
    for path in (ROOT / "hydraspec" / "speculators").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.name in SPECULATOR_BASES:
            called = {n.func.id for n in ast.walk(ast.parse(text)) if _calls_name(n)}
            assert "isinstance" not in called, f"{path.name} asks which leaf it is"
        else:
            assert len(text.splitlines()) < MAX_LEAF_LINES, path.name


def _calls_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def test_kernels_folder_is_no_package():
    """`import kernels` from the checkout would shadow the package of that name."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))
