"""Number formats of the models of a run, as its files record them, and the refusal of costs that
were measured in other formats.
"""

from __future__ import annotations

from pathlib import Path

from hydraspec.config.messages import refusal
from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import EngineInfo
from hydraspec.metrics.formats import KEY, Formats, formats_of, recorded
from hydraspec.metrics.run_files import read_object
from hydraspec.metrics.summary import Quantization

COSTS = "method.costs"


def quantization(info: EngineInfo) -> Quantization:
    """The formats of target and drafter by kind of matrix, None where all is float."""
    return recorded(info.quantization, info.draft_spec)


def formats(info: EngineInfo) -> Formats:
    """The formats of target and drafter in words."""
    found = formats_of({KEY: quantization(info), "method": info.method})
    assert found is not None, "they are recorded"
    return found


def check_costs(config: RunConfig, info: EngineInfo) -> None:
    """Refuse costs of decode steps that were measured in other formats than those of the run. Files
    of earlier versions do not say theirs and are used.

    Raises:
        ConfigurationError: naming both formats.
    """
    given = config.method.costs
    content = None if given is None else read_object(Path(given).expanduser())
    measured = None if content is None else formats_of(content)
    check_same(COSTS, given, measured, formats(info), "leave the key out to have costs measured")


def check_same(
    key: str, given: object, measured: Formats | None, loaded: Formats, remedy: str
) -> None:
    """Refuse a file, given under `key`, whose figures are of other formats than those loaded.

    Raises:
        ConfigurationError: naming both formats.
    """
    if measured is None or measured == loaded:
        return
    raise refusal(
        key,
        given,
        f"was measured in other number formats ({measured}) than those of this run ({loaded})",
        allowed="figures of the same formats: narrower numbers change what a step costs",
        remedy=remedy,
    )
