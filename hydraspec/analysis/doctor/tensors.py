"""Oddities of single weights: values that training does not leave behind.

Each check reads one matrix as the checkpoint stores it. A token's row of an embedding or an output
projection may be zero or a copy (unused tokens), so repeated and empty rows say nothing there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_EMPTY = 0.02  # share of rows or columns that may be zero
MOST_ZEROS = 0.2  # share of single values that may be zero
MOST_REPEATED = 0.05  # share of rows that may be copies of others
MOST_SATURATED = 0.01  # share of values that may stand at the largest magnitude
FEWEST_VALUES = 16  # different values of a matrix
FAR = 200.0  # standard deviations of the other values; released heads stay within some dozens
MOST_NEGATIVE = 0.05  # share of a norm's weights; training starts at one, and few come to zero


@dataclass(slots=True, frozen=True)
class Oddity:
    """What is odd about a weight.

    Attributes:
        name: of the weight, in the checkpoint's words.
        says: what is odd, as the end of a sentence that begins with the name.
    """

    name: str
    says: str


def is_table(name: str) -> bool:
    """Returns whether the weight has a row for each token."""
    return "embed_tokens" in name or "lm_head" in name


def oddities(tensors: Mapping[str, Tensor]) -> list[Oddity]:
    """What is odd about the weights of a head, the first finding of each; `tensors` by name."""
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
        if is_table(name) and check in (_empty, _repeated):
            continue
        says = check(w)
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


def _repeated(w: Tensor) -> str | None:
    """Equal rows have equal products with a random vector; unequal ones do not."""
    draw = torch.Generator().manual_seed(0)
    vector = torch.randn(w.shape[1], dtype=torch.float64, generator=draw).to(w.device)
    share = 1 - (w.double() @ vector).unique().numel() / len(w)
    return f"repeats {share:.0%} of its rows" if share > MOST_REPEATED else None


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
# A norm's weight may start, and stay, at one.
_OF_NORMS: tuple[Callable[[Tensor], str | None], ...] = (
    _not_finite,
    _vanishes,
    _zeros,
    _far_out,
    _negative,
)
_OF_OTHERS: tuple[Callable[[Tensor], str | None], ...] = (_not_finite, _constant, _far_out)
