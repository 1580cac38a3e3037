"""The steps that requests would have taken under a rule, counted as the meter counts a run's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hydraspec.analysis.replay.record import Drafted
from hydraspec.analysis.replay.rules import Rule
from hydraspec.metrics.statistics import leading


@dataclass(slots=True, kw_only=True)
class Steps:
    """A request's decode steps: those after the one that read its prompt."""

    id: str
    category: str | None
    num_steps: int = 0
    num_drafts: int = 0  # steps that verified at least one draft
    drafted_per_position: list[int] = field(default_factory=list)  # [K]; empty: not known
    accepted_per_position: list[int] = field(default_factory=list)  # [K]
    accepted_per_step: list[int] = field(default_factory=list)
    num_tokens: int = 0  # output tokens after the first
    is_cut: bool = False  # some tokens that decide a step are not known
    # Steps that a run takes for each step here: 1, or for steps at places of a trace, in inverse
    # proportion to the tokens that they emit.
    scale: float = 1.0

    @property
    def num_accepted(self) -> int:
        """Draft tokens that were accepted."""
        return sum(self.accepted_per_position)


def replay(request: Drafted, rule: Rule, max_model_len: int | None) -> Steps:
    """The steps that one request takes under a rule, alone in its cache and never preempted."""
    k = rule.num_speculative_tokens
    found = Steps(
        id=request.id,
        category=request.category,
        drafted_per_position=[0] * k,
        accepted_per_position=[0] * k,
    )
    num_output = min(request.num_output, rule.max_tokens or request.num_output)
    accepted = leading(request.ranks[:, :k] <= rule.candidates)
    offered = _offered(request, rule, max_model_len)
    counts = np.minimum(accepted, offered)
    for place in _places(request, counts, num_output - 1):
        most, count = int(offered[place]), int(counts[place])
        found.is_cut |= count == request.num_known[place] < most
        found.num_steps += 1
        found.num_drafts += most > 0
        for i in range(most):
            found.drafted_per_position[i] += 1
            found.accepted_per_position[i] += i < count
        found.accepted_per_step.append(count)
    found.num_tokens = max(0, num_output - 1)
    if request.starts is not None and found.num_steps:
        recorded = leading(request.ranks == 1)
        places = list(_places(request, counts, num_output - 1))
        found.scale = float((1 + recorded[places]).sum() / (1 + counts[places]).sum())
    if rule.min_probability:
        # How many drafts follow a rejected one depends on what the drafter makes of that one.
        found.drafted_per_position = []
    return found


def _places(request: Drafted, accepted: NDArray[np.int64], end: int) -> Iterator[int]:
    """Yield the places before `end` where steps start: each after the tokens of the step before, or
    the places of a trace."""
    if request.starts is not None:
        yield from (place for place in request.starts if place < end)
        return
    place = 0
    while place < end:
        yield place
        place += int(accepted[place]) + 1


def _offered(request: Drafted, rule: Rule, max_model_len: int | None) -> NDArray[np.int64]:
    """Drafts [N] that a step offers from each place. With min_probability, the number after a draft
    that is rejected is not known: the recorded drafter read the target's token there."""
    k, num_places = rule.num_speculative_tokens, len(request.num_known)
    offered = np.full(num_places, k)
    if rule.min_probability:
        assert request.forced is not None, "read_rules refuses it for a trace"
        offered = leading(request.forced.draft_probs[:, :k] >= rule.min_probability)
    if request.starts is not None:
        offered = np.minimum(offered, request.num_known)
    if max_model_len is not None:
        # The newest token is number num_prompt + place. Every draft and one more token must fit.
        room = max_model_len - 2 - (request.num_prompt + np.arange(num_places))
        offered = np.minimum(offered, np.maximum(room, 0))
    return offered
