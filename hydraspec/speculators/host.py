"""The interface of drafters that work on the host: they propose before a step is launched, from
the tokens that have arrived."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from hydraspec_kernels.lookup import Lookup


class DraftedText(ABC):
    """A request's text, of which a drafter proposes continuations.

    Attributes:
        match_length: tokens at the end of the text that the newest continuation followed before.
    """

    match_length = 0

    @abstractmethod
    def continuation(self, token_ids: Sequence[int], num_pending: int) -> list[int]:
        """Tokens that may follow `token_ids`, which has grown since the last call.

        num_pending: the most tokens that a step in flight samples first; drafts are what is left
        of the continuation after those that it does sample.
        """


class HostDrafts(ABC):
    """Proposes drafts on the host. The same texts in the same order give the same drafts, on every
    rank.

    Attributes:
        lookup: None: drafts are those of the host alone.
        min_acceptance: see StepDrafts.
    """

    lookup: Lookup | None = None
    min_acceptance = 0.0

    @abstractmethod
    def new_text(self) -> DraftedText:
        """The text of a request, still empty."""

    @abstractmethod
    def finished(self, output_token_ids: Sequence[int]) -> None:
        """Take note of the output of a finished request."""

    @abstractmethod
    def start_over(self) -> None:
        """Forget finished outputs: a run begins."""
