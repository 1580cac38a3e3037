"""The rules of the house within a file: sizes, docstrings, and never asking the device."""

import ast
from collections.abc import Iterator
from fnmatch import fnmatch

from source_tree import ROOT, SOURCES, TESTS, functions, parsed

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
    "hydraspec/engine/run/images.py",
    "hydraspec/engine/run/inputs.py",
    "hydraspec/engine/run/runner.py",
    "hydraspec/engine/run/state.py",
    "hydraspec/engine/run/device_runner.py",
    "hydraspec/engine/run/step_graphs.py",
    "hydraspec/engine/run/upload.py",
    "hydraspec/graphs/*.py",
]
OUTSIDE_THE_STEP: dict[str, set[str]] = {
    "hydraspec/engine/run/upload.py": {"wait_for"},  # a copy of some steps ago
    "hydraspec/models/gemma4/model.py": {"rounded"},
    "hydraspec/models/gemma4/layer.py": {"finish"},
    "hydraspec/models/checkpoint/straight.py": {"fill", "wait", "_read_into"},
    "hydraspec/models/checkpoint/kv_scales.py": {"_read"},
    "hydraspec/models/pictures/patches.py": {"_resized"},  # of a picture, before a run
    "hydraspec/models/quantised/projection.py": {"check"},  # of a checkpoint, while it is read
}
ASKS_THE_DEVICE = {"cpu", "item", "tolist", "numpy", "synchronize", "nonzero", "masked_select"}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_FUNCTION_LINES = 120  # *kernel.py
MAX_LEAF_LINES = 130  # a speculator is a list of differences
SPECULATOR_BASES = {"base.py", "draft_model.py", "autoregressive.py", "parallel.py"}


def test_the_device_is_never_asked():
    asking = [
        question
        for path in SOURCES
        if any(fnmatch(path, step) for step in STEP_FILES)
        for question in questions(path)
    ]
    assert not asking, "\n".join(asking)


def questions(path: str) -> Iterator[str]:
    """Calls of a file of the step that would wait for the device."""
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
        if called in ASKS_THE_DEVICE or to_cpu:
            yield f"{path}:{node.lineno} calls .{called}() in the step"


def test_functions_outside_the_step_exist():
    """A stale exception would let the next one through."""
    for path, names in OUTSIDE_THE_STEP.items():
        assert names <= {function.name for function in functions(parsed(path))}, path


def test_files_and_functions_stay_small():
    long = []
    for path in (*SOURCES, *TESTS):
        if len((ROOT / path).read_text(encoding="utf-8").splitlines()) >= MAX_FILE_LINES:
            long.append(path)
        if path in TESTS:
            continue
        limit = MAX_KERNEL_FUNCTION_LINES if path.endswith("kernel.py") else MAX_FUNCTION_LINES
        for function in functions(parsed(path)):
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            if length >= limit:
                long.append(f"{path}: {function.name} has {length} lines")
    assert not long, "\n".join(long)


def test_folders_stay_flat_and_modules_say_what_they_are():
    for path in SOURCES:
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
