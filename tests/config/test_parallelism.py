"""Several devices: which engine takes which axis, and the choices of the group."""

import pytest

from hydraspec.cli.compose import plan
from hydraspec.config.vllm import STAGES
from hydraspec.errors import ConfigurationError

AXES = ("tensor", "pipeline", "data")
CHOICES = {
    **{"single": (1, 1, 1), "tp2": (2, 1, 1), "tp4": (4, 1, 1), "pp2": (1, 2, 1)},
    **{"pp4": (1, 4, 1), "dp2": (1, 1, 2), "tp2_pp2": (2, 2, 1)},
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_is_its_numbers(choice: str) -> None:
    parallelism = plan([f"parallelism={choice}"]).jobs[0].config.parallelism
    assert tuple(getattr(parallelism, axis) for axis in AXES) == CHOICES[choice]


@pytest.mark.parametrize("axis", AXES)
def test_the_transformers_engine_uses_one_device(axis: str) -> None:
    """Catches a drafter that would run with a part of its target only."""
    typed = f"parallelism.{axis}=2"
    with pytest.raises(ConfigurationError) as refused:
        plan(["engine=transformers", typed])
    for part in (typed, "engine=transformers", "one device", "engine=native or engine=vllm"):
        assert part in str(refused.value)
    for engine in ("native", "vllm"):
        assert (
            plan([f"engine={engine}", "method=none", typed]).jobs[0].config.parallelism.num_ranks
            == 2
        )


def test_drafts_over_pipeline_stages_are_warned_about() -> None:
    """Catches wrong outputs of vLLM 0.26 without a warning: its first stage sees no drafts."""
    eagle, stages = ["engine=vllm", "target=tiny_mistral"], "parallelism.pipeline=2"
    assert STAGES in plan([*eagle, stages, "method=eagle"]).jobs[0].config.warnings
    assert STAGES not in plan([*eagle, stages, "method=none"]).jobs[0].config.warnings
    assert STAGES not in plan([*eagle, "method=eagle"]).jobs[0].config.warnings
