"""Truncation in three launches that read most tokens of a row once: the largest logit of every
group of tokens; the cut of each row, searched in the few groups that may hold it; and -inf below.

The k largest logits of a row are no smaller than the k-th largest of its groups' maxima, and a
nucleus reaches no lower than the smallest maximum of groups that together hold its mass. Groups
below that bound are not read again. If many groups reach it the search only takes longer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hydraspec_kernels.runtime.launch_kernel import start_next, wait_for_inputs
from hydraspec_kernels.sampling.sort_keys_kernel import (
    INFINITY_BITS,
    NO_KEY,
    halved,
    key_of,
    num_halvings,
    value_of,
)
from hydraspec_kernels.sampling.token_choice.kernel import (
    NO_TOKEN,
    finite,
    sharpness_of,
    softmax_weights,
)

# Bound of the rounding error of a sum of masses, relative to the row's mass.
MASS_SLACK: tl.constexpr = tl.constexpr(1e-5)
# Logits that differ by less than this part of their distance to the peak may be equal once scaled.
TIE_SLACK: tl.constexpr = tl.constexpr(2.0**-21)


@triton.jit
def scaled(x, peak, temperature):
    """Scaled logit (x - peak) / temperature, rounded as in torch, so that ties are the same."""
    return tl.div_rn(x - peak, temperature)


@triton.jit
def weight_of(key, peak, sharpness, SHIFT: tl.constexpr):
    """Weight exp((x - peak) / temperature) of the logit x that has the key."""
    return tl.exp2((value_of(key, SHIFT) - peak) * sharpness)


@triton.jit
def _truncation(
    num_drafts_ptr, samples_ptr, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    request, j,
):  # fmt: skip
    """Temperature, top_k, top_p, min_p of a row, and whether it is needed and truncated."""
    slot = tl.load(slots_ptr + request)
    temperature = tl.load(temperature_ptr + slot)
    top_k, top_p = tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot)
    min_p = tl.load(min_p_ptr + slot)
    is_needed = (j <= tl.load(num_drafts_ptr + request)) & (tl.load(samples_ptr + request) != 0)
    cuts = (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    return temperature, top_k, top_p, min_p, is_needed & cuts


@triton.jit
def group_statistics(
    keys_ptr,  # [B, K+1, G] int32 key of the largest logit
    masses_ptr,  # [B, K+1, G] float32 sum of exp((x - largest) / temperature); for top_p alone
    logits_ptr,  # [N, V]
    verify_rows_ptr,  # [B, K+1]
    num_drafts_ptr,  # [B]
    samples_ptr,  # [B]
    slots_ptr,  # [B]
    temperature_ptr,  # [S]
    top_k_ptr,  # [S]
    top_p_ptr,  # [S]
    min_p_ptr,  # [S]
    row_stride,
    vocab_size,
    num_groups,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFT: tl.constexpr,
    PDL: tl.constexpr,
):
    """The key of the largest logit and, for top-p, the mass of each group of a row."""
    start_next(PDL)
    place = tl.program_id(1).to(tl.int64)
    request, j = place // (K + 1), place % (K + 1)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    wait_for_inputs(PDL)
    temperature, top_k, top_p, _, is_active = _truncation(
        num_drafts_ptr, samples_ptr, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
        request, j,
    )  # fmt: skip
    if is_active:
        x_ptrs = logits_ptr + tl.load(verify_rows_ptr + place) * row_stride + token
        x = finite(tl.load(x_ptrs, mask=token < vocab_size, other=-float("inf")))
        largest = tl.max(x, 1)
        out = place * num_groups + group
        tl.store(keys_ptr + out, key_of(largest, SHIFT), mask=group < num_groups)
        if (top_k <= 0) & (top_p < 1):
            masses = tl.sum(softmax_weights(x, largest[:, None], temperature), 1)
            tl.store(masses_ptr + out, masses, mask=group < num_groups)


@triton.jit
def below_ties(key, peak, SHIFT: tl.constexpr):
    """A key below those of all logits that may be equal to the key's logit once scaled."""
    value = value_of(key, SHIFT)
    return key_of(value - (peak - value) * TIE_SLACK, SHIFT)


@triton.jit
def _listed(tokens, start, SHIFT: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Ids and keys of BLOCK tokens of a list, NO_KEY past its end.

    `tokens` are the pointers to the list and to the row, the number of listed groups of GROUP
    tokens, and the size of the vocabulary.
    """
    list_ptr, x_ptr, count, vocab_size = tokens
    entry = start // GROUP + tl.arange(0, BLOCK // GROUP)
    listed = tl.load(list_ptr + entry, mask=entry < count, other=NO_TOKEN // GROUP)
    token = listed[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = finite(tl.load(x_ptr + token, mask=token < vocab_size, other=-float("inf")))
    keys = tl.where(token < vocab_size, key_of(x, SHIFT), NO_KEY)
    return tl.reshape(token, [BLOCK]), tl.reshape(keys, [BLOCK])


@triton.jit
def _bound_of_top_k(keys, top_k, lowest, SHIFT: tl.constexpr):
    """The top_k-th largest of `keys`; `lowest` if there are fewer."""
    low, high = lowest.to(tl.int64), tl.max(keys, 0).to(tl.int64) + 1
    for _ in range(num_halvings(low, high, SHIFT)):
        middle = (low + high) >> 1
        count = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0)
        low, high = halved(low, middle, high, count >= top_k)
    return low.to(tl.int32)


@triton.jit
def _bound_of_top_p(
    keys, masses, top_p, total, peak, sharpness, lowest, GROUP: tl.constexpr, SHIFT: tl.constexpr
):
    """A key such that the tokens at or above it certainly have the mass of the nucleus.

    A group's tokens below x have less than exp(x) each, so those at or above x have the rest of the
    group's mass, and at least that of its largest.
    """
    largest = weight_of(keys, peak, sharpness, SHIFT)
    wanted = (top_p + MASS_SLACK) * total
    low, high = lowest.to(tl.int64), tl.max(keys, 0).to(tl.int64) + 1
    for _ in range(num_halvings(low, high, SHIFT)):
        middle = (low + high) >> 1
        key = middle.to(tl.int32)
        below = weight_of(key, peak, sharpness, SHIFT) * (GROUP - 1)
        certain = tl.where(keys >= key, tl.maximum(masses - below, largest), 0.0)
        low, high = halved(low, middle, high, tl.sum(certain, 0) >= wanted)
    return low.to(tl.int32)


@triton.jit
def _mass_from(
    key, tokens, peak, sharpness, SHIFT: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr
):
    """Mass of the listed tokens whose keys are at least `key`."""
    masses = tl.zeros([BLOCK], tl.float32)
    for start in range(0, tokens[2] * GROUP, BLOCK):
        _, keys = _listed(tokens, start, SHIFT, BLOCK, GROUP)
        masses += tl.where(keys >= key, weight_of(keys, peak, sharpness, SHIFT), 0.0)
    return tl.sum(masses, 0)


@triton.jit
def _count(low, high, tokens, SHIFT: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Number of listed tokens with keys from `low` to `high`."""
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, tokens[2] * GROUP, BLOCK):
        _, keys = _listed(tokens, start, SHIFT, BLOCK, GROUP)
        counts += ((keys >= low) & (keys <= high)).to(tl.int32)
    return tl.sum(counts, 0)


@triton.jit
def _nth_id(n, low, high, tokens, SHIFT: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """The n-th id, in ascending order, of the listed tokens with keys from `low` to `high`."""
    found, before = NO_TOKEN + n * 0, 0
    for start in range(0, tokens[2] * GROUP, BLOCK):
        token, keys = _listed(tokens, start, SHIFT, BLOCK, GROUP)
        is_in = ((keys >= low) & (keys <= high)).to(tl.int32)
        is_it = (before + tl.cumsum(is_in, 0) == n) & (is_in != 0)
        found = tl.minimum(found, tl.min(tl.where(is_it, token, NO_TOKEN), 0))
        before += tl.sum(is_in, 0)
    return found


@triton.jit
def _ties_of(
    key, scale, tokens, SHIFT: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """The least and the greatest key of the listed tokens that are ties of `key` once scaled."""
    lowest, peak, temperature = scale
    wanted = scaled(value_of(key, SHIFT), peak, temperature)
    least, greatest = key + tl.zeros([BLOCK], tl.int32), key + tl.zeros([BLOCK], tl.int32)
    for start in range(0, tokens[2] * GROUP, BLOCK):
        _, keys = _listed(tokens, start, SHIFT, BLOCK, GROUP)
        is_tie = scaled(value_of(keys, SHIFT), peak, temperature) == wanted
        least = tl.where(is_tie, tl.minimum(least, keys), least)
        greatest = tl.where(is_tie, tl.maximum(greatest, keys), greatest)
    # Tokens without mass are not listed, and need no cut.
    first = tl.where(wanted == -float("inf"), lowest, tl.min(least, 0))
    return first, tl.max(greatest, 0)


@triton.jit
def _first_of_min_p(min_p, lowest, peak_key, peak, temperature, SHIFT: tl.constexpr):
    """The least key whose logit is at least min_p times as probable as the best."""
    low, high = lowest.to(tl.int64) - 1, peak_key.to(tl.int64)
    for _ in range(num_halvings(low, high, SHIFT)):
        middle = (low + high) >> 1
        x = value_of(middle.to(tl.int32), SHIFT)
        low, high = halved(low, middle, high, tl.exp(scaled(x, peak, temperature)) < min_p)
    return high.to(tl.int32)


@triton.jit
def _search(row, tokens, SHIFT: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """The cut of top_k and top_p among the listed tokens, which hold all keys from `bound` on: the
    least key that is kept, the greatest that is its tie, and the last id kept of those ties.
    """
    top_k, top_p, total, bound, lowest, peak_key, temperature, sharpness = row
    peak = value_of(peak_key, SHIFT)
    scale = (lowest, peak, temperature)
    least, greatest, last = lowest, lowest, NO_TOKEN + lowest * 0
    if top_k > 0:
        low, high = bound.to(tl.int64), peak_key.to(tl.int64) + 1
        for _ in range(num_halvings(low, high, SHIFT)):
            middle = (low + high) >> 1
            count = _count(middle.to(tl.int32), peak_key, tokens, SHIFT, BLOCK, GROUP)
            low, high = halved(low, middle, high, count >= top_k)
        least, _ = _ties_of(low.to(tl.int32), scale, tokens, SHIFT, BLOCK, GROUP)
    if top_p < 1:
        if top_k > 0:
            total = _mass_from(least, tokens, peak, sharpness, SHIFT, BLOCK, GROUP)
        wanted = top_p * total
        low, high = tl.maximum(bound, least).to(tl.int64), peak_key.to(tl.int64) + 1
        for _ in range(num_halvings(low, high, SHIFT)):
            middle = (low + high) >> 1
            key = middle.to(tl.int32)
            mass = _mass_from(key, tokens, peak, sharpness, SHIFT, BLOCK, GROUP)
            low, high = halved(low, middle, high, mass >= wanted)
        key = low.to(tl.int32)
        first, greatest = _ties_of(key, scale, tokens, SHIFT, BLOCK, GROUP)
        least = tl.maximum(least, first)
        # Ties have equal masses: as many are kept as are needed to reach the wanted mass.
        above = _mass_from(greatest + 1, tokens, peak, sharpness, SHIFT, BLOCK, GROUP)
        kept = tl.maximum((wanted - above) / weight_of(key, peak, sharpness, SHIFT), 1.0)
        if kept < _count(least, greatest, tokens, SHIFT, BLOCK, GROUP).to(tl.float32):
            n = tl.ceil(kept).to(tl.int32)
            last = _nth_id(n, least, greatest, tokens, SHIFT, BLOCK, GROUP)
    return least, greatest, last


@triton.jit(do_not_specialize=["num_groups"])
def find_cuts(
    least_ptr,  # [B, K+1] int32 the least key that is kept; the key of -inf where all are kept
    greatest_ptr,  # [B, K+1] int32 the greatest key that is a tie of the least
    last_ptr,  # [B, K+1] int32 the last id that is kept of these ties
    list_ptr,  # [B, K+1, G + LISTED] int32 groups that may hold kept tokens, then these tokens
    keys_ptr,  # [B, K+1, G]
    masses_ptr,  # [B, K+1, G]
    logits_ptr,  # [N, V]
    verify_rows_ptr,  # [B, K+1]
    num_drafts_ptr,  # [B]
    samples_ptr,  # [B]
    slots_ptr,  # [B]
    temperature_ptr,  # [S]
    top_k_ptr,  # [S]
    top_p_ptr,  # [S]
    min_p_ptr,  # [S]
    row_stride,
    vocab_size,
    num_groups,
    K: tl.constexpr,
    LISTED: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFT: tl.constexpr,
    ALL_GROUPS: tl.constexpr,  # power of two, at least num_groups
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The least key that top-k, top-p and min-p keep in a row, and the last id among its ties."""
    start_next(PDL)
    place = tl.program_id(0).to(tl.int64)
    request, j = place // (K + 1), place % (K + 1)
    group = tl.arange(0, ALL_GROUPS)
    is_group = group < num_groups
    wait_for_inputs(PDL)
    temperature, top_k, top_p, min_p, is_active = _truncation(
        num_drafts_ptr, samples_ptr, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
        request, j,
    )  # fmt: skip
    lowest = -1 - (INFINITY_BITS >> SHIFT) + num_groups * 0  # the key of -inf
    least, greatest, last = lowest, lowest, NO_TOKEN + num_groups * 0
    if is_active:
        x_ptr = logits_ptr + tl.load(verify_rows_ptr + place) * row_stride
        list_ptr += place * (num_groups + LISTED)
        keys = tl.load(keys_ptr + place * num_groups + group, mask=is_group, other=NO_KEY)
        peak_key = tl.max(keys, 0)
        peak = value_of(peak_key, SHIFT)
        sharpness = sharpness_of(temperature)
        if (peak_key > lowest) & ((top_k > 0) | (top_p < 1)):
            total = 0.0
            if top_k > 0:
                bound = _bound_of_top_k(keys, top_k, lowest, SHIFT)
            else:
                masses = tl.load(masses_ptr + place * num_groups + group, mask=is_group, other=0.0)
                masses *= tl.where(is_group, weight_of(keys, peak, sharpness, SHIFT), 0.0)
                total = tl.sum(masses, 0)
                bound = _bound_of_top_p(
                    keys, masses, top_p, total, peak, sharpness, lowest, GROUP, SHIFT
                )
            bound = below_ties(bound, peak, SHIFT)
            reaches = (keys >= bound) & is_group
            tl.store(list_ptr + tl.cumsum(reaches.to(tl.int32), 0) - 1, group, mask=reaches)
            count = tl.sum(reaches.to(tl.int32), 0)
            tl.debug_barrier()
            found = 0
            groups = (list_ptr, x_ptr, count, vocab_size)
            for start in range(0, count * GROUP, WIDE):
                if found <= LISTED:
                    token, listed = _listed(groups, start, SHIFT, WIDE, GROUP)
                    is_in = listed >= bound
                    at = found + tl.cumsum(is_in.to(tl.int32), 0) - 1
                    tl.store(list_ptr + num_groups + at, token, mask=is_in & (at < LISTED))
                    found += tl.sum(is_in.to(tl.int32), 0)
            tl.debug_barrier()
            row = (top_k, top_p, total, bound, lowest, peak_key, temperature, sharpness)
            if found <= LISTED:
                tokens = (list_ptr + num_groups, x_ptr, found, vocab_size)
                least, greatest, last = _search(row, tokens, SHIFT, BLOCK, 1)
            else:
                least, greatest, last = _search(row, groups, SHIFT, WIDE, GROUP)
        if (peak_key > lowest) & (min_p > 0):
            first = _first_of_min_p(min_p, lowest, peak_key, peak, temperature, SHIFT)
            least = tl.maximum(least, first)
    tl.store(least_ptr + place, least)
    tl.store(greatest_ptr + place, greatest)
    tl.store(last_ptr + place, last)


@triton.jit(do_not_specialize=["num_groups"])
def cut_rows(
    logits_ptr,  # [N, V], also read
    least_ptr,  # [B, K+1]
    greatest_ptr,  # [B, K+1]
    last_ptr,  # [B, K+1]
    keys_ptr,  # [B, K+1, G]
    verify_rows_ptr,  # [B, K+1]
    row_stride,
    vocab_size,
    num_groups,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sets the logits of a row that are cut to minus infinity."""
    start_next(PDL)
    place = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    wait_for_inputs(PDL)
    least, last = tl.load(least_ptr + place), tl.load(last_ptr + place)
    if least > -1 - (INFINITY_BITS >> SHIFT):  # something is cut
        greatest = value_of(tl.load(greatest_ptr + place), SHIFT)
        key_ptrs = keys_ptr + place * num_groups + group
        keys = tl.load(key_ptrs, mask=group < num_groups, other=NO_KEY)
        is_read = (keys >= least)[:, None] & (token < vocab_size)
        x_ptrs = logits_ptr + tl.load(verify_rows_ptr + place) * row_stride + token
        given = tl.load(x_ptrs, mask=is_read, other=-float("inf"))
        x = finite(given)
        is_kept = (x >= value_of(least, SHIFT)) & ((x > greatest) | (token <= last))
        tl.store(x_ptrs, tl.where(is_kept, given, -float("inf")), mask=token < vocab_size)
