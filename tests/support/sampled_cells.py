"""Exact probabilities of the first tokens of sampled outputs, in cells, and a test against them.

A cell is a text of `length` tokens, or ends with -1: any token but the most likely ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from scipy.stats import chi2, ncx2
from torch import Tensor

Cells = Mapping[tuple[int, ...], float]


def exact_cells(
    probs_after: Callable[[list[int]], Tensor], length: int, most_likely: int
) -> dict[tuple[int, ...], float]:
    """Probabilities of the cells; probs_after gives those of the next token [V] after a prefix."""
    cells, open_cells = dict[tuple[int, ...], float](), {(): 1.0}
    for _ in range(length):
        longer = {}
        for prefix, mass in open_cells.items():
            best = probs_after([*prefix]).topk(most_likely)
            for probability, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                if probability:
                    longer[*prefix, token] = mass * probability
            cells[*prefix, -1] = max(0.0, mass * (1 - float(best.values.sum())))
        open_cells = longer
    return cells | open_cells


def p_value(texts: Iterable[Sequence[int]], cells: Cells, length: int) -> float:
    """P-value of a chi-squared test; cells that expect fewer than five texts are one."""
    known = {cell[:i] for cell in cells for i in range(length + 1)}
    counts = Counter(_cell_of(tuple(text[:length]), known) for text in texts)
    num_texts = counts.total()
    expected = np.array(list(cells.values())) * num_texts
    observed = np.array([counts[cell] for cell in cells], dtype=float)
    assert observed.sum() == num_texts
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    observed = np.append(observed[~rare], observed[rare].sum())
    statistic = ((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    return float(chi2.sf(statistic, len(expected) - 1))


def power(num_samples: int, degrees: int, distance: float, alpha: float) -> float:
    """The least power of a chi-squared test at level alpha against a distribution at this total
    variation distance: by Cauchy-Schwarz the noncentrality is at least n (2 distance)^2."""
    noncentrality = num_samples * (2 * distance) ** 2
    return float(ncx2.sf(chi2.isf(alpha, degrees), degrees, noncentrality))


def _cell_of(tokens: tuple[int, ...], known: set[tuple[int, ...]]) -> tuple[int, ...]:
    for i in range(len(tokens)):
        if tokens[: i + 1] not in known:
            return (*tokens[:i], -1)
    return tokens
