"""report.html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hydraspec.config.schema import RunConfig
from hydraspec.metrics.files import Json
from hydraspec.types import Request


def sample(rows: Sequence[Json]) -> list[Json]:
    return list(rows[:6])


def render(
    summary: Json,
    config: RunConfig,
    rows: Sequence[Json],
    trace: Mapping[str, Sequence[Json]],
    requests: Mapping[str, Request],
) -> str:
    return "<!doctype html>"
