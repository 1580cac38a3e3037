"""Checks of single weights for values that training does not produce, such as NaN or equal rows.

A check reads one weight as the checkpoint stores it. In an embedding or an output projection the
rows of unused tokens may be zero or equal, so many more of such rows are allowed there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_EMPTY = 0.02  # largest share of rows, or columns, that are all zero
MOST_ZEROS = 0.2  # largest share of values that are zero
MOST_REPEATED = 0.05  # largest share of rows that equal another
MOST_REPEATED_TOKENS = 0.3  # the same of an embedding or an output projection
MOST_SATURATED = 0.01  # largest share of values that have the largest magnitude
FEWEST_VALUES = 16  # least number of different values
FAR = 200.0  # largest magnitude in standard deviations; a few dozen occur in released heads
MOST_NEGATIVE = 0.05  # largest share of negative values in a norm, which training starts at one


@dataclass(slots=True, frozen=True)
class Oddity:
    """A finding about a weight.

    Attributes:
        name: the weight's name in the head.
        says: the finding, as the end of a sentence that begins with the name.
    """

    name: str
    says: str


def is_table(name: str) -> bool:
    """Returns whether the weight is an embedding or an output projection, with a row for each
    token.
    """
    return "embed_tokens" in name or "lm_head" in name


def oddities(tensors: Mapping[str, Tensor]) -> list[Oddity]:
    """Findings about the weights of a head, given by name; at most one for each weight."""
    found = []
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.numel() == 1:
            continue
        says = next(_findings(name, tensor.float()), None)
        if says is not None:
            found.append(Oddity(name, says))
    return found


def _findings(name: str, w: Tensor) -> Iterator[str]:
    checks = _OF_MATRICES if w.dim() == 2 else _OF_NORMS if "norm" in name else _OF_OTHERS
    for check in checks:
        if is_table(name) and check is _empty:
            continue
        says = check(w) if check is not _repeated else _repeated(w, is_table(name))
        if says is not None:
            yield says


# ------------------------------------------------------------------ checks


def _not_finite(w: Tensor) -> str | None:
    count = int((~w.isfinite()).sum())
    return f"has {count} values that are not finite" if count else None


def _constant(w: Tensor) -> str | None:
    low, high = float(w.min()), float(w.max())
    return f"is {low:g} everywhere" if low == high else None


def _empty(w: Tensor) -> str | None:
    for dim, words in ((1, "rows"), (0, "columns")):
        share = float((w == 0).all(dim).float().mean())
        if share > MOST_EMPTY:
            return f"is zero in {share:.0%} of its {words}"
    return None


def _zeros(w: Tensor) -> str | None:
    share = float((w == 0).float().mean())
    return f"is zero in {share:.0%} of its values" if share > MOST_ZEROS else None


def _few_values(w: Tensor) -> str | None:
    if w.numel() < 2 * FEWEST_VALUES:
        return None
    count = w.unique().numel()
    return f"has only {count} different values" if count < FEWEST_VALUES else None


def _repeated(w: Tensor, is_table: bool = False) -> str | None:
    """Finds equal rows by their products with a random vector, which differ for unequal rows."""
    draw = torch.Generator().manual_seed(0)
    vector = torch.randn(w.shape[1], dtype=torch.float64, generator=draw).to(w.device)
    share = 1 - (w.double() @ vector).unique().numel() / len(w)
    most = MOST_REPEATED_TOKENS if is_table else MOST_REPEATED
    return f"repeats {share:.0%} of its rows" if share > most else None


def _saturated(w: Tensor) -> str | None:
    most = w.abs().max()
    share = float((w.abs() == most).float().mean())
    if share <= MOST_SATURATED or w.numel() < 1 / MOST_SATURATED:
        return None
    return f"is cut off at {float(most):.3g}, which {share:.0%} of its values have"


def _far_out(w: Tensor) -> str | None:
    spread = float(w.abs().median()) / 0.6745
    count = int((w.abs() > FAR * spread).sum())
    if not spread or not count:
        return None
    return f"has {count} values more than {FAR:g} standard deviations out"


def _negative(w: Tensor) -> str | None:
    share = float((w < 0).float().mean())
    return f"is negative in {share:.0%} of its values" if share > MOST_NEGATIVE else None


def _vanishes(w: Tensor) -> str | None:
    return "is close to zero" if float(w.abs().mean()) < 0.02 else None


_OF_MATRICES: tuple[Callable[[Tensor], str | None], ...] = (
    _not_finite,
    _constant,
    _empty,
    _repeated,
    _few_values,
    _zeros,
    _saturated,
    _far_out,
)
# Norms are not checked for constant or repeated values: training starts them all at one.
_OF_NORMS: tuple[Callable[[Tensor], str | None], ...] = (
    _not_finite,
    _vanishes,
    _zeros,
    _far_out,
    _negative,
)
_OF_OTHERS: tuple[Callable[[Tensor], str | None], ...] = (_not_finite, _constant, _far_out)
