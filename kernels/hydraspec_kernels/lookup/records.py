"""The records of lookups."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Lookup:
    """Drafts that are copied from a request's own text, where a step in flight has sampled other
    tokens than the host proposed."""

    longest: int  # tokens of a match at most
    factor: float  # drafts at most, for each token of the match

    @property
    def fewest(self) -> int:
        """Drafts after a match of one token, one at least."""
        return max(1, int(self.factor))
