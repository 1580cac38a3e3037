"""Builds the records of one step for the tests of this folder, with everything unused poisoned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from hydraspec_kernels.sampling.records import EVERYTHING
from torch import Tensor
from triton_interpreter import mend_interpreter

from hydraspec.sampling.verifier import Verifier
from hydraspec.types import Batch, RequestState, SamplingFlags, SlotRules, Verdict


@dataclass(slots=True, kw_only=True)
class Step:
    """What a verifier is given."""

    logits: Tensor
    batch: Batch
    state: RequestState

    def verdict(self, verifier: Verifier, flags: SamplingFlags = EVERYTHING) -> Verdict:
        return verifier(self.logits, self.batch, self.state, flags)

    def to(self, device: str) -> Step:
        """A copy whose tensors are on a device."""
        batch, state = (_moved(record, device) for record in (self.batch, self.state))
        return Step(logits=self.logits.to(device, copy=True), batch=batch, state=state)


def _moved(record: Any, device: str) -> Any:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    moved = {n: x.to(device) for n, x in values.items() if torch.is_tensor(x)}
    moved |= {n: _moved(x, device) for n, x in values.items() if isinstance(x, SlotRules)}
    return replace(record, **moved)


def _per_request(value: float | Tensor, count: int, dtype: torch.dtype) -> Tensor:
    return torch.as_tensor(value, dtype=dtype).expand(count).clone()


def build_step(
    logits: Tensor,  # [B, K+1, V] of the target
    draft_tokens: Tensor,  # [B, K]
    *,
    draft_probs: Tensor | None = None,  # [B, K, V]
    num_drafts: Tensor | None = None,  # [B], by default K
    samples: Tensor | None = None,  # [B], by default true
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    seed: int | Tensor = 0,
    num_computed: int | Tensor = 7,
    all_greedy: bool = False,
) -> Step:
    """A decode step; slots run backwards, with one idle slot between any two that are in use."""
    num_requests, num_rows, vocab_size = logits.shape
    num_slots, width = 2 * num_requests, num_rows - 1
    if num_drafts is None:
        num_drafts = torch.full((num_requests,), width)
    if samples is None:
        samples = torch.ones(num_requests, dtype=torch.bool)
    column = torch.arange(num_rows)
    slots = torch.arange(num_slots - 2, -1, -2)
    poisoned = torch.where((column <= num_drafts[:, None])[..., None], logits, torch.nan)

    def by_slot(value: float | Tensor, dtype: torch.dtype) -> Tensor:
        return torch.zeros(num_slots, dtype=dtype).index_copy(
            0, slots, _per_request(value, num_requests, dtype)
        )

    slot_probs = None
    if draft_probs is not None:
        slot_probs = torch.full((num_slots, width, vocab_size), torch.nan)
        offered = (column[:width] < num_drafts[:, None])[..., None]
        slot_probs[slots] = torch.where(offered, draft_probs, torch.nan)
    state = RequestState(
        token_ids=torch.zeros(num_slots, 1, dtype=torch.long),
        num_computed=by_slot(num_computed, torch.long),
        temperature=by_slot(temperature, torch.float32),
        top_k=by_slot(top_k, torch.long),
        top_p=by_slot(top_p, torch.float32),
        min_p=by_slot(min_p, torch.float32),
        seed=by_slot(seed, torch.long),
        draft_probs=slot_probs,
    )
    rows = torch.minimum(column, num_drafts[:, None])
    batch = Batch(
        segments=(),
        slots=slots,
        row_request=torch.zeros(num_requests * num_rows, dtype=torch.long),
        input_ids=torch.zeros(num_requests * num_rows, dtype=torch.long),
        positions=torch.zeros(num_requests * num_rows, dtype=torch.long),
        query_start_loc=torch.nn.functional.pad((num_drafts + 1).cumsum(0), (1, 0)),
        seq_lens=state.num_computed[slots] + num_drafts + 1,
        slot_mapping=[],
        block_tables=[],
        logits_rows=None,
        verify_rows=rows + num_rows * torch.arange(num_requests)[:, None],
        draft_tokens=torch.where(column[:width] < num_drafts[:, None], draft_tokens, -1),
        num_drafts=num_drafts,
        samples=samples,
        all_greedy=all_greedy,
    )
    return Step(logits=poisoned.flatten(0, 1), batch=batch, state=state)


@pytest.fixture(autouse=True)
def _mended_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    mend_interpreter(monkeypatch)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """On a busy machine threads that wait for each other made these tensors ten times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_step() -> Callable[..., Step]:
    """`build_step`: importlib mode has no imports between test files."""
    return build_step
