"""Drafts from the host, in the state on the device (docs/adr/0047)."""

from __future__ import annotations

import numpy as np
import torch
from hydraspec_kernels import lookup as kernels
from hydraspec_kernels.lookup import Lookup

from hydraspec.types import Continuations, RequestState

WIDTH = 256  # columns of texts are looked at in whole pieces of so many


def write_drafts(state: RequestState, found: Continuations, lookup: Lookup | None = None) -> None:
    """Write K drafts after the newest token of each request, as `hydraspec_kernels.lookup` says.
    The host waits for nothing."""
    numbers, token_ids = torch.from_numpy(found.numbers), state.token_ids
    num_drafts = (numbers.shape[1] - 3) // 2
    width = int(found.numbers[:, 1].max()) + num_drafts + 1
    if token_ids.is_cuda:
        numbers = numbers.pin_memory().to(token_ids.device, non_blocking=True)
    kernels.write_drafts(
        token_ids,
        state.num_computed,
        numbers,
        width=-(-width // WIDTH) * WIDTH,
        is_ahead=found.is_ahead,
        lookup=lookup,
    )


def rehearse_drafts(state: RequestState, num_drafts: int, lookup: Lookup | None) -> None:
    """Write no drafts in every way, to the slot of padding: kernels are compiled."""
    numbers = np.full((1, 2 * num_drafts + 3), -1)
    numbers[0, :2] = state.num_computed.shape[0] - 1, 1
    for is_ahead in (False, True):
        write_drafts(state, Continuations(numbers=numbers, is_ahead=is_ahead), lookup)
