"""Speculators, targets and workloads of other packages: looked up, and refused in one message."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from installed import install, on_path

from hydraspec import plugins
from hydraspec.cli.compose import plan
from hydraspec.models import load_target
from hydraspec.models.stages import Stage
from hydraspec.parallel.group import SoloGroup
from hydraspec.speculators import registry
from hydraspec.types import ConfigurationError, WorkloadError
from hydraspec.workloads import reading as workloads


@dataclass
class Rank(SoloGroup):
    """A rank that only builds."""

    rank: int
    size: int


SPECULATOR = """
from hydraspec.speculators.base import BaseSpeculator

class Silent(BaseSpeculator):
    def load(self, target): ...
    def propose(self, target_step, verdict, batch, state): ...
"""
METHOD = "name: silent\nnum_speculative_tokens: 2\nneeds_checkpoint: false\n"


def method_dir(folder: Path) -> str:
    (folder / "conf" / "method").mkdir(parents=True)
    (folder / "conf" / "method" / "silent.yaml").write_text(METHOD)
    return f"hydra.searchpath=['file://{folder}/conf']"


def silent(folder: Path, value: str, modules: dict[str, str] | None = None) -> None:
    points = {plugins.SPECULATORS: {"silent": value}}
    install(folder, "acme-drafts", modules=modules, points=points)


def test_a_speculator_of_another_package_is_built(tmp_path: Path) -> None:
    silent(tmp_path, "acme_a.drafts:Silent", {"acme_a/drafts.py": SPECULATOR})
    with on_path(tmp_path):
        config = plan([method_dir(tmp_path), "method=silent"]).jobs[0].config
        registry.check_speculator(config)
        assert type(registry.build_speculator(config)).__name__ == "Silent"


@pytest.mark.parametrize(
    ("value", "source", "reason"),
    [
        ("acme_b.nowhere:Silent", "", "ModuleNotFoundError: No module named 'acme_b.nowhere'"),
        ("acme_b.drafts:Silent", "", "AttributeError: module 'acme_b.drafts' has no attribute"),
        ("acme_b.drafts:Silent", "1 / 0", "ZeroDivisionError: division by zero"),
        ("acme_b.drafts:Silent", "Silent = int", "<class 'int'> is no subclass of BaseSpec"),
        ("acme_b.drafts:Silent", "Silent = None", "None is no subclass of BaseSpeculator"),
    ],
)
def test_a_broken_entry_point_is_one_message_that_names_its_package(
    tmp_path: Path, value: str, source: str, reason: str
) -> None:
    silent(tmp_path, value, {"acme_b/__init__.py": "", "acme_b/drafts.py": source})
    with on_path(tmp_path):
        config = plan([method_dir(tmp_path), "method=silent"]).jobs[0].config
        with pytest.raises(ConfigurationError) as refused:
            registry.build_speculator(config)
    first, _, remedy = str(refused.value).splitlines()
    assert first.startswith(f'acme-drafts 1.0: entry point silent = "{value}" of hydraspec.spec')
    assert reason in first
    assert "mend acme-drafts 1.0" in remedy


def test_a_method_that_only_a_yaml_file_knows_is_refused_before_anything_is_read(
    tmp_path: Path,
) -> None:
    with on_path(tmp_path):
        config = plan([method_dir(tmp_path), "method=silent"]).jobs[0].config
        with pytest.raises(ConfigurationError, match=r"method\.name=silent has no speculator"):
            registry.check_speculator(config)


def test_the_name_of_a_built_in_method_is_refused(tmp_path: Path) -> None:
    points = {plugins.SPECULATORS: {"eagle3": "acme_c:Silent"}}
    install(tmp_path, "acme-drafts", points=points)
    with on_path(tmp_path), pytest.raises(ConfigurationError) as refused:
        registry.check_speculator(plan([]).jobs[0].config)
    assert "takes a name that hydraspec has" in str(refused.value)
    assert "uninstall acme-drafts 1.0" in str(refused.value)


def test_two_packages_with_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("acme-drafts", "other-drafts"):
        install(tmp_path, name, points={plugins.TARGETS: {"acme": "acme:load"}})
    with on_path(tmp_path), pytest.raises(ConfigurationError) as refused:
        plugins.offered(plugins.TARGETS, {})
    assert "other-drafts 1.0: entry point acme" in str(refused.value)
    assert "takes a name that acme-drafts 1.0 has" in str(refused.value)


def test_a_target_of_another_package_is_loaded_for_its_model_type(tmp_path: Path) -> None:
    source = (
        "from types import SimpleNamespace\n"
        "def load(opened, *, weights, dtype, device, seed):\n"
        "    return SimpleNamespace(max_position_embeddings=64, opened=opened, dtype=dtype)\n"
    )
    points = {plugins.TARGETS: {"acme_lm": "acme_lm:load"}}
    install(tmp_path, "acme-lm", modules={"acme_lm.py": source}, points=points)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "acme_lm"}))
    where = {"weights": "random", "dtype": torch.float32, "device": torch.device("cpu"), "seed": 0}
    with on_path(tmp_path):
        model = load_target(str(checkpoint), max_model_len=32, **where)
        assert model.opened.folder == checkpoint
        with pytest.raises(ConfigurationError, match="max_model_len=128 is above"):
            load_target(str(checkpoint), max_model_len=128, **where)
        for several, key in (
            ({"group": Rank(0, 2)}, "parallelism.tensor=2"),
            ({"stage": Stage(count=2)}, "parallelism.pipeline=2"),
        ):
            with pytest.raises(ConfigurationError, match=f"^{key}: .* loads them whole") as refused:
                load_target(str(checkpoint), max_model_len=32, **where, **several)
            assert "allowed: 1\n" in str(refused.value)


WORKLOAD = "name: counting\nlimit: null\nconcurrency: null\n"
LINES = """
def lines(config, seed):
    yield {"prompt": "one", "category": "count", "max_tokens": seed}
    yield {"prompt": "two", "category": "count"}
def bad(config, seed):
    yield {"prompts": "one"}
def odd(config, seed):
    yield {"prompt": {1, 2}}
"""


@pytest.mark.parametrize("function", ["lines", "bad", "odd"])
def test_a_workload_of_another_package_yields_checked_lines(tmp_path: Path, function: str) -> None:
    points = {plugins.WORKLOADS: {"counting": f"acme_lines:{function}"}}
    install(tmp_path, "acme-lines", modules={"acme_lines.py": LINES}, points=points)
    (tmp_path / "conf" / "workload").mkdir(parents=True)
    (tmp_path / "conf" / "workload" / "counting.yaml").write_text(WORKLOAD)
    with on_path(tmp_path):
        where = f"hydra.searchpath=['file://{tmp_path}/conf']"
        config = plan([where, "workload=counting", "seed=7"]).jobs[0].config
        plan([where, "workload=counting", "+workload.request_rate=2"])  # any workload's
        with pytest.raises(ConfigurationError, match="choose workload=multi_turn, or leave"):
            plan([where, "workload=counting", "+workload.num_turns=2"])
        assert workloads.depends_on_seed(config)
        if function == "lines":
            read = workloads.read(config)
            assert read is not None
            assert [r.prompt for r in read.requests] == ["one", "two"]
            assert read.requests[0].sampling.max_tokens == 7
            assert read.places["1"] == "workload=counting:2"
        elif function == "bad":
            with pytest.raises(WorkloadError, match=r"workload=counting:1: .*prompts"):
                workloads.read(config)
        else:
            with pytest.raises(
                ConfigurationError, match=r"acme-lines 1\.0.* yields no JSON object"
            ):
                workloads.read(config)


def test_the_name_of_a_built_in_workload_is_refused(tmp_path: Path) -> None:
    install(tmp_path, "acme-lines", points={plugins.WORKLOADS: {"jsonl": "acme_lines:lines"}})
    with on_path(tmp_path), pytest.raises(ConfigurationError, match="takes a name that hydraspec"):
        workloads.read(plan([]).jobs[0].config)


def test_a_method_of_a_package_whose_yaml_is_not_found_names_the_flag(tmp_path: Path) -> None:
    silent(tmp_path, "acme_a.drafts:Silent")
    with on_path(tmp_path), pytest.raises(ConfigurationError) as refused:
        plan(["method=silent"])
    assert "add --config-dir=<folder with method/silent.yaml>" in str(refused.value)


def test_options_that_no_package_declares_name_the_entry_point(tmp_path: Path) -> None:
    silent(tmp_path, "acme_a.drafts:Silent")
    with on_path(tmp_path), pytest.raises(ConfigurationError) as refused:
        plan([method_dir(tmp_path), "method=silent", "+method.options.rank=1"])
    assert 'install the package that declares the method in "hydraspec.options"' in str(
        refused.value
    )
