"""A drafter's folder chooses the method where none is given, in composition and in the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hydraspec import factory
from hydraspec.cli.compose import plan
from hydraspec.cli.overrides import DEFAULT_METHOD, with_method
from hydraspec.config.schema import RunConfig
from hydraspec.errors import CheckpointError, ConfigurationError
from hydraspec.models import load_target


def composed(*overrides: str) -> RunConfig:
    return plan(list(overrides)).jobs[0].config


def folder(path: Path, **config: object) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def speculators(kind: str, k: int | None = 5, verifier: str | None = "zoo:tiny_gemma4") -> dict:
    proposals = [] if k is None else [{"proposal_type": "greedy", "speculative_tokens": k}]
    return {
        "speculators_model_type": kind,
        "speculators_config": {
            "proposal_methods": proposals,
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier},
        },
    }


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        (["method.checkpoint=/d"], "auto"),
        (["target=custom", "target.checkpoint=/m"], "auto"),
        (["target.checkpoint=/m"], "auto"),
        (["target=tiny_gemma4_e", "target.checkpoint=/m"], "auto"),
        (["target.checkpoint=/m", "method=eagle3"], "eagle3"),
        (["target=qwen3_8b"], "auto"),
        (["method=auto"], "auto"),
        (["method.checkpoint=null"], "gemma4_mtp"),
        (["method.checkpoint=/d", "method=gemma4_mtp"], "gemma4_mtp"),
        (["method=none", "target=custom", "target.checkpoint=/m"], "none"),
        (["target=tiny_gemma4_e"], "gemma4_mtp"),
        (["method.checkpoint=/d", "experiment=k_sweep", "seed=1"], "gemma4_mtp"),
    ],
)
def test_a_folder_without_a_method_chooses_it(typed, name):
    assert plan(typed).jobs[0].config.method.name == name


def test_every_folder_of_a_sweep_chooses_its_method():
    jobs = [job.config for job in plan(["method.checkpoint=/a,/b"], multirun=True).jobs]
    assert [(job.method.name, job.method.checkpoint) for job in jobs] == [
        ("auto", "/a"),
        ("auto", "/b"),
    ]
    assert with_method(["method.checkpoint=/a,/b"])[-1] == "method=auto"


def test_every_target_of_a_sweep_takes_its_own_drafter():
    jobs = [job.config for job in plan(["target=tiny_qwen3,tiny_gemma4"], multirun=True).jobs]
    for job in jobs:
        factory.resolve_drafter(job)
    assert [(job.target.name, job.method.name) for job in jobs] == [
        ("tiny_qwen3", "eagle3"),
        ("tiny_gemma4", "gemma4_mtp"),
    ]
    assert with_method(["target=tiny_gemma4,tiny_gemma4_e"]) == ["target=tiny_gemma4,tiny_gemma4_e"]


def test_the_default_method_is_that_of_the_tree():
    assert plan([]).jobs[0].config.method.name == DEFAULT_METHOD


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "peagle"])
def test_method_and_k_come_from_the_config_never_from_the_path(tmp_path, kind):
    drafter = folder(tmp_path / "gemma4-assistant-eagle3-dflash", **speculators(kind))
    config = composed(f"method.checkpoint={drafter}")
    factory.resolve_drafter(config)
    assert (config.method.name, config.method.num_speculative_tokens) == (kind, 5)
    assert (config.method.checkpoint, config.target.name) == (str(drafter), "tiny_gemma4")


@pytest.mark.parametrize(("typed", "k"), [((), 3), (("method.num_speculative_tokens=2",), 2)])
def test_k_as_typed_else_the_default(tmp_path, typed, k):
    drafter = folder(tmp_path / "d", **speculators("eagle3", k=None))
    config = composed(f"method.checkpoint={drafter}", *typed)
    factory.resolve_drafter(config)
    assert config.method.num_speculative_tokens == k


def test_an_assistant_is_detected():
    config = composed("method=auto")
    assert config.method.checkpoint == "zoo:tiny_gemma4-assistant"
    factory.resolve_drafter(config)
    assert (config.method.name, config.method.num_speculative_tokens) == ("gemma4_mtp", 3)


@pytest.mark.parametrize(
    "typed",
    [
        *([], ["target=custom"], ["target=tiny_qwen3"], ["method=peagle"]),
        ["target=custom", "method=peagle"],
    ],
    ids=" ".join,
)
def test_a_drafter_given_as_target_runs_its_verifier(tmp_path, typed):
    """Catches the drafter that the YAML of the chosen target names for another checkpoint."""
    drafter = folder(tmp_path / "d", **speculators("peagle"))
    config = composed(*typed, f"target.checkpoint={drafter}")
    for _ in range(2):
        factory.resolve_drafter(config)
        assert (config.target.checkpoint, config.target.name) == ("zoo:tiny_gemma4", "tiny_gemma4")
        assert (config.method.name, config.method.checkpoint) == ("peagle", str(drafter))


def test_another_target_runs_with_the_drafter_given_with_it(tmp_path):
    target = folder(tmp_path / "t", model_type="gemma4_text")
    typed = [f"target.checkpoint={target}", "method.checkpoint=zoo:tiny_gemma4-assistant"]
    for method in ([], ["method=gemma4_mtp"]):
        config = composed(*typed, *method)
        factory.resolve_drafter(config)
        assert (config.target.checkpoint, config.target.name) == (str(target), "t")
        assert (config.method.name, config.method.checkpoint) == (
            "gemma4_mtp",
            "zoo:tiny_gemma4-assistant",
        )


@pytest.mark.parametrize(
    ("typed", "method", "drafter"),
    [
        ([], "gemma4_mtp", "zoo:tiny_gemma4-assistant"),
        (["method=gemma4_mtp"], "gemma4_mtp", "zoo:tiny_gemma4-assistant"),
        (["method=eagle3"], "eagle3", "zoo:tiny_gemma4-eagle3"),
        (["method=eagle3", "target.drafters.eagle3=/d"], "eagle3", "/d"),
    ],
)
def test_another_checkpoint_gets_the_drafters_that_the_target_names(
    tmp_path, typed, method, drafter
):
    """A fine-tune may run with its base's drafter; one that does not fit is refused on load."""
    target = folder(tmp_path / "finetune", model_type="gemma4_text")
    config = composed(*typed, f"target.checkpoint={target}")
    factory.resolve_drafter(config)
    assert (config.method.name, config.method.checkpoint) == (method, drafter)
    assert (config.target.name, config.target.checkpoint) == ("finetune", str(target))


def test_a_method_without_a_named_drafter_is_refused(tmp_path):
    target = folder(tmp_path / "finetune", model_type="gemma4_text")
    with pytest.raises(ConfigurationError) as refused:
        factory.resolve_drafter(
            composed("target=custom", "method=eagle3", f"target.checkpoint={target}")
        )
    for part in ("target finetune names none", "method=none", "=<folder"):
        assert part in str(refused.value), refused.value


def test_layers_in_the_target_need_no_drafter(tmp_path):
    target = folder(tmp_path / "t", model_type="deepseek_v3", num_nextn_predict_layers=1)
    for method in ([], ["method=mtp"]):
        config = composed("target=deepseek_v3", f"target.checkpoint={target}", *method)
        factory.resolve_drafter(config)
        assert (config.method.name, config.method.checkpoint) == ("mtp", str(target))
        assert (config.target.name, config.method.num_speculative_tokens) == ("t", 1)


def test_a_k_that_does_not_fit_the_step_is_refused_once_known(tmp_path):
    drafter = folder(tmp_path / "d", **speculators("eagle3", k=8))
    config = composed(f"method.checkpoint={drafter}", "engine.max_num_batched_tokens=64")
    with pytest.raises(ConfigurationError, match="max_num_batched_tokens=64"):
        factory.resolve_drafter(config)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "gemma4"}, ["model_type 'gemma4'", "is no drafter", "Mistral"]),
        (speculators("medusa"), ["'medusa'", "eagle3, peagle, mtp, dflash, dspark, dflash2"]),
    ],
)
def test_what_is_no_drafter_is_refused(tmp_path, config, says):
    drafter = folder(tmp_path / "d", **config)
    with pytest.raises(CheckpointError) as refused:
        factory.resolve_drafter(composed(f"method.checkpoint={drafter}"))
    assert all(part in str(refused.value) for part in says), refused.value


def test_a_target_without_a_drafter_is_refused(tmp_path):
    target = folder(tmp_path / "t", model_type="gemma4_text")
    with pytest.raises(ConfigurationError, match="names none"):
        factory.resolve_drafter(composed("target=custom", f"target.checkpoint={target}"))


def test_a_drafter_that_names_no_target_is_refused(tmp_path):
    drafter = folder(tmp_path / "d", **speculators("eagle3", verifier=None))
    with pytest.raises(CheckpointError, match="names no target"):
        factory.resolve_drafter(composed("target=custom", f"target.checkpoint={drafter}"))


def test_a_drafter_where_a_target_is_needed_is_refused(tmp_path):
    drafter = folder(tmp_path / "d", **speculators("eagle3"))
    with pytest.raises(CheckpointError, match="leave the method out"):
        load_target(
            str(drafter),
            weights="random",
            dtype=None,
            device=None,
            seed=0,
            max_model_len=None,
        )
