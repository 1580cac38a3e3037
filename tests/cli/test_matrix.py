"""What combines with what: every legal combination names tests that exist."""

import ast
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hydraspec.cli import matrix

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found() -> list[matrix.Cell]:
    return list(matrix.cells())


def test_every_legal_combination_names_a_test(found: list[matrix.Cell]) -> None:
    for cell in found:
        assert bool(cell.tests) == (cell.reason is None), cell


def functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("test", matrix.PROOFS)
def test_the_tests_exist(test: str) -> None:
    known = matrix.axes()
    for axis, covered in matrix.PROOFS[test].items():
        assert set(covered) <= set(known[axis])
    if test != matrix.GATE:
        file, _, function = test.partition("::")
        assert function in functions(ROOT / file)


def test_the_page_is_as_the_rules_say(found: list[matrix.Cell]) -> None:
    """docs/matrix.md; its tables come from `python -m hydraspec.matrix`."""
    page = (ROOT / "docs" / "matrix.md").read_text(encoding="utf-8")
    assert page[page.index("## engine=") :] == matrix.tables(found)


def test_a_refused_combination_says_why() -> None:
    (cell,) = matrix.cells(
        {
            **{"target": ["tiny_qwen3"], "method": ["eagle3"], "engine": ["transformers"]},
            **{"parallelism": ["single"], "cudagraph": ["none"], "sampling": ["greedy"]},
        }
    )
    assert cell.reason == "method=eagle3 is not available with engine=transformers"
    assert not cell.tests


def test_what_an_engine_refuses_by_the_sizes_of_a_target_is_no_yes() -> None:
    """vLLM loses per-layer inputs after the first stage, so its adapter refuses to start."""
    wanted = {"target": ["gemma4_e2b"], "method": ["none"], "engine": ["vllm"]}
    one = {"cudagraph": ["none"], "sampling": ["greedy"]}
    split, whole = matrix.cells({**wanted, **one, "parallelism": ["pp2", "tp2"]})
    assert split.reason is not None
    assert "a target with per-layer inputs" in split.reason
    assert whole.reason is None


def test_a_target_without_a_drafter_is_no_pair() -> None:
    found = matrix.cells({"target": ["tiny_mistral"], "method": ["mtp"], "engine": ["native"]})
    assert {cell.reason for cell in found} == {matrix.NO_DRAFTER}


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("engin=native", "did you mean engine?"),
        ("engine=vlm", "did you mean engine=vllm?"),
        ("method", "write method=<choice>,<choice>"),
        ("nonsense", "nonsense is no axis"),
    ],
)
def test_what_does_not_exist_is_refused(
    typed: str, said: str, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("matrix", typed) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("hydraspec.matrix: ")
    assert error.count("\n") == 3


def test_the_command(
    tmp_path: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cells.json"
    narrow = ["target=tiny_mistral", "engine=native", "parallelism=single", "cudagraph=none"]
    assert command("matrix", *narrow, "method=eagle", "--json", str(file)) == 0
    assert "| tiny_mistral | eagle | yes |" in capsys.readouterr().out
    cells = json.loads(file.read_text())
    assert [cell["choices"]["sampling"] for cell in cells] == ["greedy", "stochastic"]
