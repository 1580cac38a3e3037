"""Plans in persistent device memory, which graphs read, and their upload without a wait.

A plan travels as one copy from pinned memory, by a kernel: its numbers, the places of its rows, and
those entries of the block tables that changed since the last plan. The copy runs in stream order,
so it cannot overtake a step that still reads the last plan; a pinned buffer is used again only once
its copy is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from hydraspec_kernels.step_inputs import copy_words
from torch import Tensor

from hydraspec.engine.run.device_tables import DeviceTables
from hydraspec.engine.run.inputs import PlanTensors, row_places
from hydraspec.graphs import Descriptor
from hydraspec.parallel.ranks import current
from hydraspec.types import NeededRows, RowSegment, SamplingFlags, StepPlan

NUM_STAGES = 4
ALIGNMENT = 16  # words: kernels are compiled for aligned pointers, so sections begin at such
MAX_CHANGES = 1 << 14  # table entries that a plan's copy may carry; more have a separate copy


@dataclass(slots=True, frozen=True, kw_only=True)
class UploadShape:
    """Sizes that the buffers must hold."""

    max_num_seqs: int  # B at most; the state has one more slot, which padding uses
    max_num_rows: int  # T at most
    num_speculative_tokens: int
    table_widths: tuple[int, ...]  # P of each KV group


class _Stage:
    """A staging buffer and the event of the copy that last read it."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.words = torch.zeros(num_words, dtype=torch.int64, pin_memory=is_cuda)
        self.array = np.asarray(self.words)
        self._event = torch.cuda.Event() if is_cuda else None

    def wait(self) -> None:
        """Wait until the last copy has read the buffer: long done, unless the host is far ahead."""
        if self._event is not None:
            wait_for(self._event)

    def send(self, to: Tensor, count: int) -> None:
        copy_words(to[:count], self.words[:count])
        if self._event is not None:
            self._event.record()


def wait_for(event: torch.cuda.Event) -> None:
    """Let the host wait for an event: a staging buffer's last copy, of an older step."""
    current().watch.wait_for_device(event)


class PlanUpload:
    """Device memory of one plan. Sections of requests have fixed places; others depend on the rows.

    Words: slots, rows, drafts, query_start_loc, samples and proposes of all requests, then for
    mixed plans the request and the offset of each row and the rows to sample from or verify, then
    the needed rows (see NeededRows) if they are not all, then changed table entries.
    """

    def __init__(self, shape: UploadShape, device: torch.device) -> None:
        self.shape = shape
        self._device = device
        b, k = shape.max_num_seqs, shape.num_speculative_tokens
        each = _aligned(b)
        self._slots, self._rows, self._drafts, self._starts = (i * each for i in range(4))
        self._samples = self._starts + _aligned(b + 1)
        self._proposes = self._samples + _aligned(-(-b // 8))  # a byte each
        self._header = self._proposes + _aligned(-(-b // 8))
        words = self._header + 2 * _aligned(shape.max_num_rows) + _aligned(b * (k + 1))
        words += 2 * _aligned(b * (k + 1)) + _aligned(b) + _aligned(b + 1)  # needed rows
        words += 2 * MAX_CHANGES + ALIGNMENT
        self._words = torch.zeros(words, dtype=torch.int64, device=device)
        self._stages = [_Stage(words, device) for _ in range(NUM_STAGES)]
        self._turn = 0
        self._tables = DeviceTables(shape.max_num_seqs, shape.table_widths, device)
        every = torch.arange(max(b, shape.max_num_rows, b * (k + 1)) + 1, device=device)
        self._every = every
        self._uniform: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self._fewer: dict[tuple[int, int], Tensor] = {}
        self._first_of = every[:b].unsqueeze(1).repeat(1, k + 1)  # one row of logits a request

    @property
    def tables(self) -> list[Tensor]:
        """Block tables on the device, [max B, P] per KV group."""
        return self._tables.groups

    def view(
        self,
        descriptor: Descriptor,
        segments: tuple[RowSegment, ...],
        all_greedy: bool,
        flags: SamplingFlags,
        *,
        rows_of_logits: int | None = None,
        has_padding: bool = True,
        needed: NeededRows | None = None,
        draft_length: int | None = None,
        num_verified: int | None = None,
        by_request: bool = False,
    ) -> PlanTensors:
        """The tensors of plans of this shape. rows_of_logits: how many each request of a mixed
        plan gets, 0, 1 or (None) K+1; a uniform plan has logits of every row, and so has a mixed
        one with no more rows than that. needed: as written with the plan. draft_length: drafts that
        its steps propose; None: K. num_verified: width of the drafts under verification, the most
        of any request; None: K. by_request: some requests may want no drafts."""
        b, t = descriptor.num_requests, descriptor.num_rows
        k = self.shape.num_speculative_tokens if num_verified is None else num_verified
        each = k + 1 if rows_of_logits is None else rows_of_logits
        slots, num_rows, num_drafts = (
            self._words[first : first + b] for first in (self._slots, self._rows, self._drafts)
        )
        logits_rows: Tensor | None = None
        verify_rows = self._verify_rows(descriptor, k, each)
        if descriptor.rows_per_request is not None:
            row_request, row_offset, starts = self._uniform_rows(b, descriptor.rows_per_request)
        else:
            first, second, third = self._row_sections(t)
            row_request = self._words[first : first + t]
            row_offset = self._words[second : second + t]
            named = self._words[third : third + b * each]
            if each > k and t <= b * each:
                verify_rows = named.view(b, k + 1)
            else:
                logits_rows = named
            starts = self._words[self._starts : self._starts + b + 1]
        return PlanTensors(
            num_rows=num_rows,
            num_drafts=num_drafts,
            samples=self._flags(self._samples, b),
            query_start_loc=starts,
            row_request=row_request,
            row_offset=row_offset,
            logits_rows=logits_rows,
            verify_rows=verify_rows,
            slots=slots,
            tables=[table[:b] for table in self.tables],
            segments=segments,
            all_greedy=all_greedy,
            flags=flags,
            num_speculative_tokens=k,
            has_padding=has_padding,
            needed=needed and self._sent(needed, self._end_of_rows(descriptor, each)),
            draft_length=draft_length,
            proposes=self._flags(self._proposes, b) if by_request else None,
        )

    def _flags(self, first: int, b: int) -> Tensor:
        """A section of flags of requests, [b] bool, from word `first` on."""
        return self._words[first : self._header].view(torch.bool)[:b]

    def _sent(self, needed: NeededRows, first: int) -> NeededRows:
        """The needed rows on the device, in sections from word `first` on."""
        parts, targets = _parts(needed), needed.targets
        places = zip(_sections(parts, first), parts, strict=False)
        rows, requests, starts, *more = (self._words[at : at + len(part)] for at, part in places)
        if targets is not None:
            (targets,) = more
        return replace(
            needed, rows=rows, requests=requests, query_start_loc=starts, targets=targets
        )

    def _end_of_rows(self, descriptor: Descriptor, rows_of_logits: int) -> int:
        third = self._row_sections(descriptor.num_rows)[2]
        return third + descriptor.num_requests * rows_of_logits

    def _row_sections(self, num_rows: int) -> tuple[int, int, int]:
        """First words of a mixed plan's sections: request and offset of each row, logits rows."""
        each = _aligned(num_rows)
        return self._header, self._header + each, self._header + 2 * each

    def _uniform_rows(self, b: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Request and offset of each row, and start locations, of `b` requests of `rows` rows."""
        found = self._uniform.get((b, rows))
        if found is None:
            every = self._every
            found = self._uniform[b, rows] = (
                every[: b * rows].div(rows, rounding_mode="floor"),
                every[: b * rows].remainder(rows),
                every[: b + 1] * rows,
            )
        return found

    def _verify_rows(self, descriptor: Descriptor, k: int, rows_of_logits: int) -> Tensor:
        """Rows [b, k+1] of a plan with logits of every row, or of one row a request. Requests with
        fewer rows than that repeat the last one."""
        b, rows = descriptor.num_requests, descriptor.rows_per_request
        if rows is None or rows > k:
            whole = self._every[: b * (k + 1)].view(b, k + 1)
            return whole if rows_of_logits > k or not k else self._first_of[:b]
        found = self._fewer.get((b, rows))
        if found is None:
            each = self._every[: k + 1].clamp(max=rows - 1)
            found = self._fewer[b, rows] = (self._every[:b] * rows).unsqueeze(1) + each
        return found

    def write(
        self,
        descriptor: Descriptor,
        plan: StepPlan | None,
        rows_of_logits: int | None = None,
        needed: NeededRows | None = None,
    ) -> None:
        """Write a plan (None: padding alone) to the places of `descriptor`; the rest is padding.
        `needed` goes with a mixed plan, in host memory.
        """
        stage = self._stages[self._turn]
        self._turn = (self._turn + 1) % NUM_STAGES
        stage.wait()
        words = stage.array
        self._write_header(words, plan)
        count = self._header
        if descriptor.rows_per_request is None:
            count = self._write_rows(words, descriptor, plan, rows_of_logits)
        if needed is not None:
            parts = _parts(needed)
            *sections, count = _sections(parts, count)
            for first, part in zip(sections, parts, strict=True):
                words[first : first + len(part)] = part
        index, values = self._tables.changes([] if plan is None else plan.block_tables)
        n = len(index)
        if n <= MAX_CHANGES:
            words[count : count + n] = index
            words[count + n : count + 2 * n] = values
        stage.send(self._words, count + (2 * n if n <= MAX_CHANGES else 0))
        if n > MAX_CHANGES:
            self._tables.send(index, values)
        elif n:
            sent = self._words[count : count + 2 * n].view(2, n)
            self._tables.flat.index_copy_(0, sent[0], sent[1])
        self._tables.were_sent()

    def _write_header(self, words: np.ndarray, plan: StepPlan | None) -> None:
        size = self.shape.max_num_seqs
        words[: self._header] = 0
        words[self._slots : self._slots + size] = size  # the slot of padding
        if plan is None:
            return
        b, starts = len(plan.slots), self._starts
        words[self._slots : self._slots + b] = plan.slots
        words[self._rows : self._rows + b] = plan.num_rows
        words[self._drafts : self._drafts + b] = plan.num_drafts
        words[self._samples : self._proposes].view(np.bool_)[:b] = plan.samples
        proposes = True if plan.proposes is None else plan.proposes
        words[self._proposes : self._header].view(np.bool_)[:b] = proposes
        np.cumsum(plan.num_rows, out=words[starts + 1 : starts + 1 + b])
        words[starts + 1 + b : starts + 1 + size] = words[starts + b]

    def _write_rows(
        self,
        words: np.ndarray,
        descriptor: Descriptor,
        plan: StepPlan | None,
        rows_of_logits: int | None,
    ) -> int:
        """Write the request and offset of each row, and the rows that need logits; returns the end
        of these sections."""
        t, k = descriptor.num_rows, self.shape.num_speculative_tokens
        each = k + 1 if rows_of_logits is None else rows_of_logits
        first, second, third = self._row_sections(t)
        end = self._end_of_rows(descriptor, each)
        words[first : first + t] = -1
        words[second:end] = 0
        if plan is not None:
            starts, row_request, row_offset = row_places(plan.num_rows)
            n, b = len(row_request), len(plan.num_rows)
            words[first : first + n] = row_request
            words[second : second + n] = row_offset
            if each:
                newest = starts[1:] - plan.num_drafts - 1
                ahead = np.minimum(np.arange(each), plan.num_drafts[:, None])
                words[third : third + b * each] = (newest[:, None] + ahead).ravel()
        return end


def _parts(needed: NeededRows) -> list[np.ndarray]:
    parts = [needed.rows, needed.requests, needed.query_start_loc]
    if needed.targets is not None:
        parts.append(needed.targets)
    return [np.asarray(part) for part in parts]


def _sections(parts: Sequence[np.ndarray], first: int) -> list[int]:
    """First word of each part, stored from `first` on, and the end of the last part."""
    found = [_aligned(first)]
    for part in parts[:-1]:
        found.append(found[-1] + _aligned(len(part)))
    return [*found, found[-1] + len(parts[-1])]


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
