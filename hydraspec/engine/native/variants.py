"""Ways of sampling that have graphs of their own. What comes after the first few shares the general
one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from hydraspec.types import SamplingFlags, SamplingParams

GREEDY = SamplingFlags(any_greedy=True, any_top_k=False, any_top_p=False, any_min_p=False)
GREEDY_VARIANT = (True, GREEDY)  # all_greedy and flags of the plans a graph serves
MAX_VARIANTS = 4


def flags_of(requests: Iterable[SamplingParams]) -> tuple[bool, SamplingFlags]:
    """Whether all requests are greedy, and what they ask of the sampler."""
    every = list(requests)
    return all(s.temperature == 0.0 for s in every), SamplingFlags(
        any_greedy=any(s.temperature == 0.0 for s in every),
        any_top_k=any(s.top_k > 0 for s in every),
        any_top_p=any(s.top_p < 1.0 for s in every),
        any_min_p=any(s.min_p > 0.0 for s in every),
    )


class SamplingVariants:
    """Chooses the variant of a graph that serves a step which is not all greedy."""

    def __init__(self) -> None:
        self._known: list[SamplingFlags] = []

    def serving(self, flags: SamplingFlags) -> Hashable:
        """The variant with the fewest flags that covers `flags`; a new one where none does."""
        covering = [known for known in self._known if _covers(known, flags)]
        if covering:
            return False, min(covering, key=_num_true)
        if len(self._known) >= MAX_VARIANTS:
            flags = SamplingFlags()  # everything may be asked for
        self._known.append(flags)
        return False, flags


def _values(flags: SamplingFlags) -> tuple[bool, ...]:
    return flags.any_greedy, flags.any_top_k, flags.any_top_p, flags.any_min_p


def _covers(known: SamplingFlags, flags: SamplingFlags) -> bool:
    return all(has or not asked for has, asked in zip(_values(known), _values(flags), strict=True))


def _num_true(flags: SamplingFlags) -> int:
    return sum(_values(flags))
