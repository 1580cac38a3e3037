"""Number of prompt rows of a step: enough to read prompts at full speed, few enough not to stall
decoding requests, up to sizes of graphs, and in chunks for every pipeline stage.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from hydraspec.graphs import PROMPT_ROWS
from hydraspec.types import Span

STEPS_OF_PROMPTS = 4  # steps over which unread prompts are spread beside decodes
FEW_ROWS = 512  # rows to which prompts fill a step that decodes, as it reads the weights anyway
LEAST_PROMPT_ROWS = 256  # beside decodes, however many these are: no prompt waits for ever
CHUNKS_PER_STAGE = 4  # chunks of the unread prompts: stages idle at most a fifth of the time
LEAST_CHUNK = 2048  # rows that keep a device busy for longer than launches take
# What decodes add to a step of prompts, in prompt rows of equal time (docs/adr/0054): reading the
# weights once more, the latency of each layer's kernels, and keys that are not split.
WEIGHT_ROWS = 170
LATENCY_SHARE = 1 / 3  # of launch_bound_rows, which grow likewise as layers become smaller
KEYS_OF_LAUNCH = 90_000  # of the longest context, which take as long as launch_bound_rows


@dataclass(slots=True, frozen=True, kw_only=True)
class PromptRows:
    """The policy of one engine. It depends on plain numbers alone, so that ranks decide alike."""

    max_rows: int  # engine.max_num_batched_tokens
    graph_rows: tuple[int, ...] = ()  # of mixed steps that are graphs, rising
    num_micro_batches: int = 1  # steps in flight of disjoint requests
    launch_bound_rows: int = 0  # see RunnerLimits
    max_mixing_cost: float | None = None  # engine.max_mixing_cost

    def most(self, num_decode_rows: int, unread: Sequence[int], longest: int = 0) -> int:
        """Most prompt rows of a step beside its decode rows.

        unread: for each request whose prompt could be read in this step, its unread tokens.
        longest: tokens of the longest request that decodes.
        """
        most, total = self.max_rows - num_decode_rows, sum(unread)
        if self.num_micro_batches > 1 and len(unread) > 1:
            num_chunks = CHUNKS_PER_STAGE * self.num_micro_batches
            most = min(most, max(LEAST_CHUNK, -(-total // num_chunks)))
        if num_decode_rows and total and self._has_large_graphs:
            most = min(most, self._beside(num_decode_rows, total, longest))
        return most

    @property
    def _has_large_graphs(self) -> bool:
        return bool(self.graph_rows) and self.graph_rows[-1] > PROMPT_ROWS[-1]

    def _beside(self, num_decode_rows: int, unread: int, longest: int) -> int:
        """Prompt rows beside decodes: a quarter of the unread ones, so that a long prompt takes few
        steps and many prompts do not add up to a stall; with the decodes at least FEW_ROWS, at most
        the largest graph. Where more have to pay for the decodes, so many, in no graph."""
        paying = self._paying(num_decode_rows, unread, longest)
        largest = self.graph_rows[-1] - num_decode_rows
        if paying > max(largest, 0):
            return paying
        wanted = max(-(-unread // STEPS_OF_PROMPTS), FEW_ROWS - num_decode_rows, paying)
        wanted = min(max(min(wanted, largest), LEAST_PROMPT_ROWS), unread)
        return self._fitted(num_decode_rows + wanted, num_decode_rows) - num_decode_rows

    def _paying(self, num_decode_rows: int, unread: int, longest: int) -> int:
        """Prompt rows of which what decodes add is the share max_mixing_cost; 0 without a bound,
        and where too few are unread."""
        if self.max_mixing_cost is None:
            return 0
        per_launch = LATENCY_SHARE + longest / KEYS_OF_LAUNCH
        added = WEIGHT_ROWS + num_decode_rows + self.launch_bound_rows * per_launch
        rows = math.ceil(added / self.max_mixing_cost)
        whole_step = max(self.max_rows, STEPS_OF_PROMPTS * self.graph_rows[-1])
        return rows if unread >= min(rows, whole_step) else 0

    def _fitted(self, num_rows: int, num_decode_rows: int) -> int:
        """Size of the nearest graph above or below `num_rows`: a chunk is cut where the padding
        would be more rows than the cut leaves for the next step."""
        above = bisect_right(self.graph_rows, num_rows - 1)
        if above in (0, len(self.graph_rows)) or num_rows <= PROMPT_ROWS[-1]:
            return num_rows
        lower, upper = self.graph_rows[above - 1], self.graph_rows[above]
        left = num_rows - lower
        is_cut = left < upper - num_rows and left <= lower - num_decode_rows
        return lower if is_cut else upper


def whole_spans(spans: Sequence[Span], start: int, rows: int, most: int) -> int:
    """Rows of a chunk that begins at `start` and cuts no span that must stay whole: at most `rows`.
    A chunk that begins with such a span has all of its rows if `most` allows them; 0: it waits."""
    span = cut_span(spans, start + rows)
    if span is None or rows < 1:
        return max(0, rows)
    if span.start > start:
        return span.start - start
    return span.length if span.length <= most else 0


def cut_span(spans: Sequence[Span], border: int) -> Span | None:
    """The span that a border before position `border` would cut, although it must stay whole; None:
    there is none."""
    for span in spans:
        if span.start < border < span.end and not span.may_be_cut:
            return span
    return None
