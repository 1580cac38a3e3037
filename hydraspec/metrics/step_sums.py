"""Sums and peaks over the steps of a meter, whatever became of the requests in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydraspec.metrics.draft_lengths import DraftLengthCounts
from hydraspec.metrics.files import Json, plain
from hydraspec.metrics.statistics import ratio
from hydraspec.types import PHASES, StepRecord


@dataclass(slots=True, kw_only=True)
class StepSums:
    """Of all steps so far."""

    num_steps: int = 0
    num_preemptions: int = 0
    total_ms: float = 0.0  # wall time; of replicas at work side by side each has its share
    rounds_s: float = 0.0  # wall time of the rounds so far, waits for arrivals included
    peak_kv_usage: float = 0.0
    peak_kv_usage_per_group: dict[str, float] = field(default_factory=dict)
    phase_ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    phase_steps: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    draft_lengths: DraftLengthCounts = field(default_factory=DraftLengthCounts)

    def add(self, record: StepRecord) -> float:
        """Count a step; returns its share of the wall time in milliseconds."""
        total_ms = record.total_ms / record.num_replicas
        self.num_steps += 1
        self.total_ms += total_ms
        self.num_preemptions += record.num_preempted
        self.peak_kv_usage = max(self.peak_kv_usage, record.kv_usage)
        self.draft_lengths.add(record)
        peaks = self.peak_kv_usage_per_group
        for name, usage in record.kv_usage_per_group.items():
            peaks[name] = max(peaks.get(name, 0.0), usage)
        for phase, milliseconds in record.phase_ms.items():
            if milliseconds is not None:
                self.phase_ms[phase] = self.phase_ms.get(phase, 0.0) + milliseconds
                self.phase_steps[phase] = self.phase_steps.get(phase, 0) + 1
        return total_ms

    def mean_phase_ms(self) -> dict[str, float | None]:
        """Mean milliseconds per step of each phase, over the steps where it was measured; null
        where none was."""
        return {
            phase: ratio(total, self.phase_steps[phase]) for phase, total in self.phase_ms.items()
        }

    def as_json(self) -> Json:
        """In plain numbers."""
        return plain(self)

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> StepSums:
        """What `as_json` gave."""
        lengths = {int(length): count for length, count in found["draft_lengths"].items()}
        return cls(**{**found, "draft_lengths": DraftLengthCounts(lengths)})
