"""Assignment of requests to replicas, so that equal prefixes are computed on one of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import takewhile

from hydraspec.types import Request

NUM_TOKENS = 32  # equal tokens, after the common start of all prompts, that make a shared prefix


def by_prefix(requests: Sequence[Request], num_replicas: int) -> list[list[Request]]:
    """The requests that each replica takes first, in their order; one list for all replicas where
    no prefix is shared, or all prompts begin alike. Groups go to the replica with the fewest
    requests so far."""
    prompts = [request.prompt_token_ids or [] for request in requests]
    first, last = min(prompts, default=[]), max(prompts, default=[])
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    num_common = sum(1 for _ in equal)  # the same for all as for first and last in sorted order
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    end = num_common + NUM_TOKENS
    for place, prompt in enumerate(prompts):
        spans = (span for span in requests[place].spans if span.start < end)
        groups[*prompt[:end], *spans].append(place)
    if len(groups) in (1, len(requests)):
        return [list(requests)]
    places: list[list[int]] = [[] for _ in range(num_replicas)]
    for group in groups.values():
        min(places, key=len).extend(group)
    return [[requests[place] for place in sorted(of_replica)] for of_replica in places]
