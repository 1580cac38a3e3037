"""Where a drafter is accepted, over the target's texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hydraspec.analysis.doctor.scores import Scores
from hydraspec.metrics import draft_figures
from hydraspec.metrics.draft_figures import ChainPlaces
from hydraspec.metrics.files import Json
from hydraspec.speculators.teacher_forcing.texts import Texts


def figures(scores: Scores, texts: Texts, decode: Callable[[Sequence[int]], str] | None) -> Json:
    """The `figures` of doctor.json."""
    chains = texts.chains
    places = ChainPlaces(
        output_place=np.concatenate([np.arange(1, n + 1) for n in chains.num_of if n]),
        context=chains.position.cpu().numpy() + 2,
        entropy=texts.target.entropy[chains.row + 1].double().cpu().numpy(),
        token=chains.truth[:, 0].cpu().numpy(),
    )
    return draft_figures.figures(scores, places, decode)
