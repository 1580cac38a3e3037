"""What combines with what: every legal combination names tests that exist."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hydraspec.cli import matrix
from hydraspec.errors import ConfigurationError

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


@pytest.mark.parametrize("proof", matrix.PROOFS, ids=lambda proof: proof.test)
def test_the_tests_exist(proof: matrix.Proof) -> None:
    known = matrix.axes()
    for axis, covered in proof.covers.items():
        assert set(covered) <= set(known[axis])
    if proof.test != matrix.GATE:
        file, _, function = proof.test.partition("::")
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
    assert cell.reason == "method.name=eagle3 is not available with engine=transformers"
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
    ("wanted", "said"),
    [
        ({"engin": ["native"]}, "did you mean engine?"),
        ({"engine": ["vlm"]}, "did you mean engine=vllm?"),
        ({"method": []}, "method has no choices"),
    ],
)
def test_what_does_not_exist_is_refused(wanted: dict[str, list[str]], said: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        list(matrix.cells(wanted))
    assert said in str(error.value)


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "cells.json"
    narrow = ["target=tiny_mistral", "engine=native", "parallelism=single", "cudagraph=none"]
    command = [sys.executable, "-m", "hydraspec.matrix"]
    done = subprocess.run(
        [*command, *narrow, "method=eagle", "--json", str(file)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "| tiny_mistral | eagle | yes |" in done.stdout
    cells = json.loads(file.read_text())
    assert [cell["choices"]["sampling"] for cell in cells] == ["greedy", "stochastic"]
    wrong = subprocess.run(
        [*command, "nonsense"], capture_output=True, text=True, check=False, timeout=60
    )
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("hydraspec.matrix: nonsense")
    assert wrong.stderr.count("\n") == 3
