"""How many drafts decode steps had, where the engine chooses that per step; what K of a run is
called."""

from __future__ import annotations

from collections import Counter

from hydraspec.metrics.summary import DraftLengths, Summary
from hydraspec.types import StepRecord

PER_STEP = "auto"  # K of a run whose engine chose it for each step


def drafts_of(summary: Summary) -> int | str:
    """K of a run: a number, or "auto" where `num_speculative_tokens` is only the most."""
    is_chosen = summary.get("num_speculative_tokens_used") is not None
    return PER_STEP if is_chosen else summary["num_speculative_tokens"]


def drafts_name(summary: Summary) -> str:
    """ "K=3", or "K=auto (0 to 6)"."""
    drafts, most = drafts_of(summary), summary["num_speculative_tokens"]
    return f"K={drafts} (0 to {most})" if drafts == PER_STEP else f"K={drafts}"


class DraftLengthCounts(Counter[int]):
    """Decode steps by drafts per request. Empty where K is fixed."""

    def add(self, record: StepRecord) -> None:
        """Count a step, if any of its requests decodes."""
        if record.draft_length is not None and not all(r.is_prefill for r in record.requests):
            self[record.draft_length] += 1

    def used(self, most: int) -> DraftLengths | None:
        """Steps with 0, 1, … `most` drafts per request, and the mean; None where K is fixed. Over
        all steps, those of requests that did not complete included.
        """
        if not self:
            return None
        histogram = [self[length] for length in range(max(most, *self) + 1)]
        total = sum(length * count for length, count in enumerate(histogram))
        return {"mean": total / sum(histogram), "histogram": histogram}
