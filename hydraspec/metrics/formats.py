"""Number formats of a target and its drafter, as summary.json, costs.json and predict.json say
them, in words: reports name them, and costs of one format are not used for another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from hydraspec.metrics.files import Json
from hydraspec.metrics.summary import Quantization

FLOAT = "float"
KEY = "quantization"  # of summary.json, costs.json and predict.json


def recorded(
    target: Mapping[str, str] | None, drafter: Mapping[str, object] | None
) -> Quantization:
    """The record of a loaded target's formats by kind of matrix, and of those in the normalised
    drafter; None where all is float."""
    return {"target": target, "drafter": cast(Json, (drafter or {}).get(KEY))}


@dataclass(slots=True, frozen=True)
class Formats:
    """Formats in words, such as "fp8 per channel, inputs per token" or "float"; `drafter` is None
    without a drafter."""

    target: str
    drafter: str | None

    @property
    def is_plain(self) -> bool:
        """Returns whether neither the target nor the drafter is quantised."""
        return self.target == FLOAT and self.drafter in (FLOAT, None)

    def __str__(self) -> str:
        drafter = "" if self.drafter is None else f", drafter {self.drafter}"
        return f"target {self.target}{drafter}"


def words(found: object) -> str:
    """The format of a model from its formats by kind of matrix ("down_proj"): one text where all
    kinds share it, else each format with its kinds; FLOAT for None."""
    if not isinstance(found, Mapping) or not found:
        return FLOAT
    kinds: dict[str, list[str]] = {}
    for kind, form in found.items():
        kinds.setdefault(str(form), []).append(str(kind))
    if len(kinds) == 1:
        return next(iter(kinds))
    return "; ".join(f"{form} ({', '.join(names)})" for form, names in kinds.items())


def formats_of(content: Mapping[str, object]) -> Formats | None:
    """The formats in the content of one of the files; None if it is of a version that does not say
    them. A file without a method is of a run with a drafter."""
    found = content.get(KEY)
    if not isinstance(found, Mapping):
        return None
    has_drafter = content.get("method", "") != "none"
    return Formats(words(found.get("target")), words(found.get("drafter")) if has_drafter else None)


def shared_words(found: Sequence[Formats | None]) -> str:
    """The formats that all have, such as "number formats: target fp8 per channel, drafter float";
    empty where they differ, are not known or are all float."""
    first = found[0] if found and len(set(found)) == 1 else None
    return "" if first is None or first.is_plain else f"number formats: {first}"


def columns(found: Sequence[Formats | None]) -> list[tuple[str, list[str]]]:
    """Columns of a table with a line for each of `found`: "target format" and "drafter format",
    each only where the lines differ in it; a dash for none or unknown."""
    sides = {
        "target format": [each and each.target for each in found],
        "drafter format": [each and each.drafter for each in found],
    }
    return [
        (heading, [value or "-" for value in values])
        for heading, values in sides.items()
        if len(set(values) - {None}) > 1
    ]
