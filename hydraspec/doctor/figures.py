"""Where a drafter is accepted, and the best it could reach: from teacher-forced scores."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hydraspec.doctor.scores import Scores, replayed
from hydraspec.metrics.files import Json
from hydraspec.metrics.statistics import leading, ratio_of_sums
from hydraspec.teacher_forcing.texts import Texts

TOP = 5
PLACES = (16, 32, 64, 128, 256, 512)  # bounds of buckets of positions and context lengths
ENTROPIES = (0.01, 0.1, 0.5, 1.0, 2.0)  # nats
CLASSES = (("number", r"\s*\d+"), ("word", r"\s*\w+"), ("white space", r"\s+"), ("other", r".*"))


def figures(scores: Scores, texts: Texts, decode: Callable[[Sequence[int]], str] | None) -> Json:
    """By draft step, place, context, token class and entropy; and ceilings: see docs/doctor.md."""
    chains = texts.chains
    owner = np.repeat(np.arange(len(chains.num_of)), chains.num_of)
    position = chains.position.cpu().numpy()
    place = np.concatenate([np.arange(1, count + 1) for count in chains.num_of if count])
    entropy = texts.target.entropy[chains.row + 1].cpu().numpy()
    truth = chains.truth[:, 0].cpu().numpy()
    return {
        "by_step": by_step(scores),
        "by_output_place": _bucketed(scores, owner, place, PLACES),
        "by_context": _bucketed(scores, owner, position + 2, PLACES),
        "by_target_entropy": _bucketed(scores, owner, entropy, ENTROPIES),
        "by_token_class": _by_class(scores, owner, truth, decode),
        "ceilings": ceilings(scores),
    }


def by_step(scores: Scores) -> list[Json]:
    """Teacher-forced: every earlier token is the target's own."""
    ranks, probs = scores.ranks, scores.probs
    return [
        {
            "step": step,
            "top_1": float(scores.matches[:, step].mean()),
            f"top_{TOP}": float((ranks[:, step] <= TOP).mean()),
            "median_rank": float(np.median(ranks[:, step])),
            "mean_probability": float(probs[:, step].mean()),
        }
        for step in range(scores.matches.shape[1])
    ]


def ceilings(scores: Scores) -> Json:
    """Acceptance lengths over the steps of a run: as it is; where every step read the target's
    state of its place (oracle features); where any of the drafter's TOP best tokens counted; where
    every token in its vocabulary was right.
    """
    num_of = scores.num_of
    reachable = leading(scores.probs > 0)
    return {
        "acceptance": scores.acceptance,
        "oracle_features": replayed(leading(_fresh(scores)), num_of),
        f"top_{TOP}": replayed(leading(scores.ranks <= TOP), num_of),
        "draft_vocabulary": replayed(reachable, num_of),
    }


def _fresh(scores: Scores) -> NDArray[np.bool_]:
    """[N, K]: column j is step 0 of the chain that starts j places later, which reads the target's
    state there. At a text's end, where there is none, the drafter's own step j.
    """
    found = scores.matches.copy()
    first = 0
    for count in scores.num_of:
        own = scores.matches[first : first + count]
        for step in range(1, own.shape[1]):
            found[first : first + max(0, count - step), step] = own[step:, 0]
        first += count
    return found


def _bucketed(
    scores: Scores, owner: NDArray[np.int64], values: NDArray[np.float64], bounds: Sequence[float]
) -> list[Json]:
    which = np.searchsorted(np.asarray(bounds, float), values, side="right")
    edges = [None, *bounds, None]
    rows = []
    for bucket in range(len(bounds) + 1):
        inside = which == bucket
        if inside.any():
            bound = {"from": edges[bucket], "below": edges[bucket + 1]}
            rows.append({**bound, **_row(scores, owner, inside)})
    return rows


def _by_class(
    scores: Scores,
    owner: NDArray[np.int64],
    truth: NDArray[np.int64],
    decode: Callable[[Sequence[int]], str] | None,
) -> Json:
    """By what the target's next token is; one without a tokenizer's text is "other"."""
    names = {int(token): _class(int(token), decode) for token in np.unique(truth)}
    classes = np.array([names[int(token)] for token in truth])
    kinds = [name for name, _ in CLASSES if (classes == name).any()]
    return {name: _row(scores, owner, classes == name) for name in kinds}


def _class(token: int, decode: Callable[[Sequence[int]], str] | None) -> str:
    text = "" if decode is None else decode([token])
    return next((name for name, pattern in CLASSES if re.fullmatch(pattern, text)), "other")


def _row(scores: Scores, owner: NDArray[np.int64], inside: NDArray[np.bool_]) -> Json:
    """Drafts accepted per start among some chains, with an interval over texts."""
    counts = np.bincount(owner[inside], minlength=len(scores.num_of))
    sums = np.bincount(owner[inside], weights=scores.accepted[inside], minlength=len(scores.num_of))
    found = ratio_of_sums(sums, counts)
    return {"accepted_per_start": found.mean, "ci95": found.ci95, "num_starts": int(inside.sum())}
