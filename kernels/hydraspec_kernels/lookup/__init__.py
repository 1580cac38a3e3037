"""Drafts copied from the text of a request, after the place where its last tokens stood before.

Letters: S slots, L tokens that a slot can hold, B requests, N of them that verify drafts, K drafts.
"""

from __future__ import annotations

from torch import Tensor

from hydraspec_kernels.lookup import reference
from hydraspec_kernels.lookup.records import Lookup
from hydraspec_kernels.runtime.launch import check_contiguous, runs_kernels

__all__ = ["Lookup", "continued", "write_drafts"]


def continued(
    token_ids: Tensor, slots: Tensor, last: Tensor, *, num_drafts: int, least: int, most: int
) -> Tensor:
    """Drafts [B, K] for the texts of slots [B] of token_ids [S, L+1] that end at column `last` [B].

    They are the tokens after the longest match of a text's last tokens, at most `most` of them, of
    several the latest, and -1 for a text whose last `least` tokens did not stand together before.
    Near its end a text repeats itself.
    """
    if runs_kernels(token_ids):
        # Triton is imported only where kernels run.
        from hydraspec_kernels.lookup.kernel import continued_kernel as run
    else:
        run = reference.continued_reference
    return run(token_ids, slots, last, num_drafts=num_drafts, least=least, most=most)


def write_drafts(
    token_ids: Tensor,
    num_computed: Tensor,
    numbers: Tensor,
    *,
    width: int,
    is_ahead: bool,
    lookup: Lookup | None,
) -> None:
    """Writes K drafts after the newest token of each text in token_ids [S, L+1], -1 where there is
    none.

    numbers [N, 2K+3]: slot, tokens of the text that the host knows, and tokens that may follow
    these (-1: no more). With `is_ahead` the device may have sampled up to K+1 tokens more, by
    num_computed [S]: drafts are the tokens after those if all agree; if not, or if none is left,
    they are looked up in the first `width` columns of the text, which hold all of it.
    """
    check_contiguous(token_ids, num_computed, numbers)
    if runs_kernels(token_ids):
        from hydraspec_kernels.lookup.kernel import write_drafts_kernel as run
    else:
        run = reference.write_drafts_reference
    run(token_ids, num_computed, numbers, width=width, is_ahead=is_ahead, lookup=lookup)
