"""Acceptance of a drafter by place, and the best that it could reach, from teacher-forced drafts at
every place of some texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from hydraspec.metrics.files import Json
from hydraspec.metrics.statistics import leading, ratio, ratio_of_sums
from hydraspec.metrics.summary import (
    Ceilings,
    DraftStep,
    StartBucket,
    StartFigures,
    TeacherForced,
)
from hydraspec.types import PositionScores

TOP = 5
NEVER = np.iinfo(np.int64).max  # rank of a token that the drafter cannot propose
PLACES = (16, 32, 64, 128, 256, 512)  # bounds of buckets of positions and context lengths
ENTROPIES = (0.01, 0.1, 0.5, 1.0, 2.0)  # nats
CLASSES = (("number", r"\s*\d+"), ("word", r"\s*\w+"), ("white space", r"\s+"), ("other", r".*"))


@dataclass(slots=True, frozen=True, kw_only=True)
class ChainDrafts:
    """Chains of K drafts from every place of some texts; N in all, ordered by text and place."""

    matches: NDArray[np.bool_]  # [N, K] the best draft is the target's token
    ranks: NDArray[np.int64]  # [N, K] of the target's token in the drafter's logits, from 1
    probs: NDArray[np.float64]  # [N, K] of the target's token in the drafter's distribution
    num_of: tuple[int, ...]  # chains of each text

    @property
    def accepted(self) -> NDArray[np.int64]:
        """Leading drafts [N] that a step which starts at each place would accept."""
        return leading(self.matches)

    @property
    def acceptance(self) -> float:
        """Acceptance length over the steps that a run takes: 1 + accepted / steps."""
        return replayed(self.accepted, self.num_of)

    @property
    def accepted_per_start(self) -> float:
        """Mean of `accepted`; 0 without chains."""
        return float(self.accepted.mean()) if self.accepted.size else 0.0


def replayed(accepted: NDArray[np.int64], num_of: tuple[int, ...]) -> float:
    """Acceptance length of a run's steps, each of which starts where the one before ended, from
    `accepted` drafts [N] at every place of texts with `num_of` places."""
    total = num_steps = first = 0
    for count in num_of:
        place = 0
        while place < count:
            found = int(accepted[first + place])
            total, num_steps, place = total + found, num_steps + 1, place + found + 1
        first += count
    return 1 + total / max(1, num_steps)


@dataclass(slots=True, frozen=True, kw_only=True)
class ChainPlaces:
    """Places where the N chains start."""

    output_place: NDArray[np.int64]  # [N] place in the output of the first drafted token, from 0
    context: NDArray[np.int64]  # [N] tokens before that token
    entropy: NDArray[np.float64]  # [N] nats, of the target's distribution of that token
    token: NDArray[np.int64] | None = None  # [N] the target's token there


def figures(
    drafts: ChainDrafts, places: ChainPlaces, decode: Callable[[Sequence[int]], str] | None
) -> Json:
    """Acceptance by draft step, output place, context length, target entropy and token class, and
    ceilings, as docs/doctor.md explains them. `decode` gives the text of tokens for their class."""
    owner = np.repeat(np.arange(len(drafts.num_of)), drafts.num_of)
    found: Json = {
        "by_step": by_step(drafts),
        "by_output_place": _bucketed(drafts, owner, places.output_place, PLACES),
        "by_context": _bucketed(drafts, owner, places.context, PLACES),
        "by_target_entropy": _bucketed(drafts, owner, places.entropy, ENTROPIES),
    }
    if places.token is not None:
        found["by_token_class"] = _by_class(drafts, owner, places.token, decode)
    return {**found, "ceilings": ceilings(drafts)}


def teacher_forced(
    found: Iterable[PositionScores], decode: Callable[[Sequence[int]], str] | None
) -> TeacherForced | None:
    """Ranks of the target's tokens by draft, acceptance by place, and ceilings of the acceptance
    length, over the places whose K next tokens are known; None without such places. `decode` gives
    tokens their text, and so their class.
    """
    matches, ranks, probs, num_of = [], [], [], []
    contexts, entropies, tokens = [], [], []
    for scores in found:
        # Unknown tokens lie at the end of the last places.
        count = int((scores.target_token_ids >= 0).all(axis=1).sum())
        own, theirs = scores.draft_token_ids[:count], scores.target_token_ids[:count]
        matches.append(own == theirs)
        ranks.append(np.where(scores.target_ranks[:count] == 0, NEVER, scores.target_ranks[:count]))
        probs.append(scores.target_probs[:count].astype(np.float64))
        num_of.append(count)
        contexts.append(scores.first + 1 + np.arange(count))
        entropies.append(scores.target_entropies[:count].astype(np.float64))
        tokens.append(theirs[:, 0])
    if not sum(num_of):
        return None
    drafts = ChainDrafts(
        matches=np.concatenate(matches),
        ranks=np.concatenate(ranks),
        probs=np.concatenate(probs),
        num_of=tuple(num_of),
    )
    places = ChainPlaces(
        output_place=np.concatenate([np.arange(1, count + 1) for count in num_of]),
        context=np.concatenate(contexts),
        entropy=np.concatenate(entropies),
        token=None if decode is None else np.concatenate(tokens),
    )
    by_place = figures(drafts, places, decode)
    del by_place["by_output_place"]
    return cast(TeacherForced, {"num_places": sum(num_of), "by_token_class": None, **by_place})


def draft_share(phase_ms: Mapping[str, float | None]) -> float | None:
    """The share of a step's time that drafting takes, from mean times by phase; None where phases
    were not measured, or nothing is drafted.
    """
    drafting = phase_ms.get("propose")
    total = sum(ms for ms in phase_ms.values() if ms is not None)
    return None if drafting is None else ratio(drafting, total)


def by_step(drafts: ChainDrafts) -> list[DraftStep]:
    """Ranks of the target's token at each draft step, where all tokens before are the target's."""
    ranks, probs = drafts.ranks, drafts.probs
    medians = [float(np.median(column)) for column in ranks.T]
    return [
        {
            "step": step,
            "top_1": float(drafts.matches[:, step].mean()),
            "top_5": float((ranks[:, step] <= TOP).mean()),
            "median_rank": median if median < NEVER // 2 else None,
            "mean_probability": float(probs[:, step].mean()),
        }
        for step, median in enumerate(medians)
    ]


def ceilings(drafts: ChainDrafts) -> Ceilings:
    """Acceptance lengths over the steps of a run: the measured one; that of drafts which all read
    the target's state (oracle features); those with any of the drafter's TOP best tokens accepted,
    and with every token of its vocabulary accepted.
    """
    num_of = drafts.num_of
    reachable = leading(drafts.probs > 0)
    return {
        "acceptance": drafts.acceptance,
        "oracle_features": replayed(leading(_fresh(drafts)), num_of),
        "top_5": replayed(leading(drafts.ranks <= TOP), num_of),
        "draft_vocabulary": replayed(reachable, num_of),
    }


def _fresh(drafts: ChainDrafts) -> NDArray[np.bool_]:
    """Matches [N, K] of drafts that read the target's state: column j is step 0 of the chain that
    starts j places later. Near a text's end, without such a chain, the column is step j itself.
    """
    found = drafts.matches.copy()
    first = 0
    for count in drafts.num_of:
        own = drafts.matches[first : first + count]
        for step in range(1, own.shape[1]):
            found[first : first + max(0, count - step), step] = own[step:, 0]
        first += count
    return found


def _bucketed(
    drafts: ChainDrafts,
    owner: NDArray[np.int64],
    values: NDArray[np.int64] | NDArray[np.float64],
    bounds: Sequence[float],
) -> list[StartBucket]:
    which = np.searchsorted(np.asarray(bounds, float), values, side="right")
    edges = [None, *bounds, None]
    rows: list[StartBucket] = []
    for bucket in range(len(bounds) + 1):
        inside = which == bucket
        if inside.any():
            found = _row(drafts, owner, inside)
            rows.append({"from": edges[bucket], "below": edges[bucket + 1], **found})
    return rows


def _by_class(
    drafts: ChainDrafts,
    owner: NDArray[np.int64],
    truth: NDArray[np.int64],
    decode: Callable[[Sequence[int]], str] | None,
) -> dict[str, StartFigures]:
    """Figures by class of the target's next token, which is "other" without a tokenizer."""
    names = {int(token): _class(int(token), decode) for token in np.unique(truth)}
    classes = np.array([names[int(token)] for token in truth])
    kinds = [name for name, _ in CLASSES if (classes == name).any()]
    return {name: _row(drafts, owner, classes == name) for name in kinds}


def _class(token: int, decode: Callable[[Sequence[int]], str] | None) -> str:
    text = "" if decode is None else decode([token])
    return next((name for name, pattern in CLASSES if re.fullmatch(pattern, text)), "other")


def _row(drafts: ChainDrafts, owner: NDArray[np.int64], inside: NDArray[np.bool_]) -> StartFigures:
    """Drafts accepted per start among some chains, with an interval over texts."""
    counts = np.bincount(owner[inside], minlength=len(drafts.num_of))
    sums = np.bincount(owner[inside], weights=drafts.accepted[inside], minlength=len(drafts.num_of))
    found = ratio_of_sums(sums, counts)
    return {"accepted_per_start": found.mean, "ci95": found.ci95, "num_starts": int(inside.sum())}
