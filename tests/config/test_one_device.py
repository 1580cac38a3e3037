"""Several devices: refused along every axis by engines that use one, and left to vLLM."""

import pytest

from hydraspec.cli.compose import plan
from hydraspec.config.engines import STAGES
from hydraspec.errors import ConfigurationError


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "data"])
@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_more_than_one_device_is_refused(engine: str, axis: str) -> None:
    """Catches a drafter that would run with a part of its target only."""
    typed = [f"engine={engine}", f"parallelism.{axis}=2"]
    with pytest.raises(ConfigurationError) as refused:
        plan(typed)
    for part in (f"parallelism.{axis}=2", f"engine={engine}", "one device", "engine=vllm"):
        assert part in str(refused.value)
    assert plan(["engine=vllm", typed[1]]).jobs


def test_drafts_over_pipeline_stages_are_warned_about() -> None:
    """Catches wrong outputs of vLLM 0.26 without a warning: its first stage sees no drafts."""
    stages = ["engine=vllm", "parallelism.pipeline=2"]
    assert STAGES in plan([*stages, "method=gemma4_mtp"]).jobs[0].config.warnings
    assert STAGES not in plan([*stages, "method=none"]).jobs[0].config.warnings
    assert STAGES not in plan(["engine=vllm", "method=gemma4_mtp"]).jobs[0].config.warnings
