"""Modes of running the parts of a step as CUDA graphs, and whether the graphs include drafting.

`decode` is how steps run whose requests all verify K drafts, `mixed` how all others do, `draft` how
a drafter's decode pass runs outside such a graph. The module uses no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NONE, PIECEWISE, FULL = "none", "piecewise", "full"

MIN_MIXED_ROWS = 8  # fewer rows cost no less
# Rows of captured mixed steps for which reading the weights takes longer than the rows' products.
PROMPT_ROWS = (32, 64, 96, 128, 192, 256)
# Rows of captured mixed steps whose products take longer: at most a quarter apart, since padding
# costs as much as rows.
LARGE_ROWS = (320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)

# Name → (decode, mixed).
MODES: dict[str, tuple[str, str]] = {
    "none": (NONE, NONE),
    "piecewise": (PIECEWISE, PIECEWISE),
    "full": (FULL, FULL),
    "full_decode_only": (FULL, NONE),
    "full_and_piecewise": (FULL, PIECEWISE),
}


@dataclass(slots=True, frozen=True, kw_only=True)
class GraphModes:
    """A requested mode, and how it is carried out."""

    requested: str
    decode: str
    mixed: str
    draft: str  # "full" or "none"; a drafter's decode pass is never cut in pieces
    holds_propose: bool  # drafting is part of the step's graph
    max_mixed_rows: int = PROMPT_ROWS[-1]  # of the largest step with prompts that has a graph
    reasons: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        """The name in MODES of the mode that the target runs with."""
        return next(name for name, parts in MODES.items() if parts == (self.decode, self.mixed))

    @property
    def has_eager_steps(self) -> bool:
        """Returns whether decode steps, or steps with prompts, never use graphs."""
        return NONE in (self.decode, self.mixed)

    @property
    def has_large(self) -> bool:
        """Returns whether mixed steps of LARGE_ROWS are captured. All mixed steps are whole then:
        for pieces the host launches each layer, and what every attention call returns is kept.
        """
        is_whole = self.decode == FULL and self.mixed != NONE
        return is_whole and self.max_mixed_rows > PROMPT_ROWS[-1]

    def in_pieces(self, *, mixed: bool) -> bool:
        """Returns whether decode steps, or with `mixed` all others, are captured in pieces."""
        if mixed:
            return self.mixed == PIECEWISE and not self.has_large
        return self.decode == PIECEWISE

    @property
    def enabled(self) -> bool:
        """Returns whether any part of a step is captured."""
        return (self.decode, self.mixed) != (NONE, NONE)

    def as_info(self) -> dict[str, str | None]:
        """The summary's record: requested, target, draft, reason (None: as requested)."""
        return {
            "requested": self.requested,
            "target": self.target,
            "draft": self.draft,
            "reason": "; ".join(self.reasons) or None,
        }


def no_graphs(requested: str, reason: str | None) -> GraphModes:
    """Modes in which every step runs eagerly, with the `reason` why `requested` does not run."""
    reasons = (reason,) if reason and requested != "none" else ()
    return GraphModes(
        requested=requested,
        decode=NONE,
        mixed=NONE,
        draft=NONE,
        holds_propose=False,
        reasons=reasons,
    )


def resolve_modes(
    requested: str,
    *,
    drafts: bool,
    cannot_draft_in_graph: str | None,
    max_mixed_rows: int = PROMPT_ROWS[-1],
) -> GraphModes:
    """Modes in which `requested` runs, with a reason where drafting is not in its graphs.

    Attention allows every mode: its kernels read rows and lengths on the device, for every kind of
    KV group. drafts: whether there is a drafter. cannot_draft_in_graph: the reason, if drafting
    cannot be captured.
    """
    decode, mixed = MODES[requested]
    reasons: list[str] = []
    if decode == NONE:
        return no_graphs(requested, None)
    draft = FULL if drafts and decode == FULL else NONE
    if drafts and decode == PIECEWISE:
        reasons.append("a drafter's decode pass is a full graph or eager")
    if drafts and cannot_draft_in_graph is not None:
        draft = NONE
        reasons.append(f"drafting is not captured: {cannot_draft_in_graph}")
    return GraphModes(
        requested=requested,
        decode=decode,
        mixed=mixed,
        draft=draft,
        holds_propose=cannot_draft_in_graph is None,
        max_mixed_rows=max_mixed_rows,
        reasons=tuple(reasons),
    )


def default_capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes worth a graph: 1, 2, 4, then every 8, the largest batch included."""
    sizes = [1, 2, 4, *range(8, max_num_seqs + 1, 8), max_num_seqs]
    return sorted({size for size in sizes if size <= max_num_seqs})


def mixed_row_sizes(
    sizes: Sequence[int],
    rows_per_decode: int,
    max_decode_rows: int,
    max_rows: int,
    *,
    max_large_rows: int = 0,
) -> list[int]:
    """Row counts of mixed steps to capture: batch sizes rounded up to powers of two, times the rows
    of a decode, and PROMPT_ROWS, and LARGE_ROWS up to max_large_rows, for the chunks of prompts
    beside them.

    max_decode_rows: rows of a step that only decodes, at most. max_rows: rows of any step.
    """
    wanted = {1 << (size - 1).bit_length() for size in sizes}
    rows = {min(size * rows_per_decode, max_decode_rows) for size in wanted}
    large = tuple(count for count in LARGE_ROWS if count <= max_large_rows)
    rows |= {count for count in PROMPT_ROWS + large if count <= max_rows}
    return [count for count in sorted(rows) if count >= MIN_MIXED_ROWS] or [max(rows)]
