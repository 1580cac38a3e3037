"""Plans in persistent device memory, results on their way back, and plans in two parts: without a
model."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from caches import kv_cache, kv_group

from hydraspec.engine.run.results import RESULT_RING, ResultRing
from hydraspec.engine.run.upload import MAX_CHANGES, PlanUpload, UploadShape, _Stage
from hydraspec.engine.schedule.plans import split_plan
from hydraspec.graphs import Descriptor
from hydraspec.types import (
    BlockTable,
    RowSegment,
    SamplingFlags,
    StepPlan,
)

FLAGS = SamplingFlags()
OWNERS = itertools.count(1)


def shape(requests: int, rows: int, each: int | None) -> Descriptor:
    return Descriptor(num_requests=requests, num_rows=rows, rows_per_request=each)


def block_table(table: np.ndarray, owners: list[int] | None = None) -> BlockTable:
    """Rows without freed entries, of new owners unless they are given."""
    num_rows, width = table.shape
    serial = owners or [next(OWNERS) for _ in range(num_rows)]
    live = np.array([[owner, 0, width] for owner in serial], dtype=np.int64)
    return BlockTable(list(table.astype(np.int64)), live, width)


def plan_of(rows: list[int], drafts: list[int], tables: list[np.ndarray], k: int = 2) -> StepPlan:
    firsts = np.cumsum([0, *rows[:-1]])
    return StepPlan(
        slots=np.arange(len(rows))[::-1].copy(),
        num_rows=np.array(rows),
        num_drafts=np.array(drafts),
        samples=np.array([True] * len(rows)),
        segments=tuple(
            RowSegment(int(f), i, 1, r, 9)
            for i, (f, r) in enumerate(zip(firsts, rows, strict=True))
        ),
        block_tables=[block_table(table) for table in tables],
        all_greedy=True,
        num_speculative_tokens=k,
    )


def make_upload() -> PlanUpload:
    return PlanUpload(
        UploadShape(max_num_seqs=4, max_num_rows=24, num_speculative_tokens=2, table_widths=(5, 3)),
        torch.device("cpu"),
    )


def test_a_uniform_plan_is_padded_as_the_contract_says() -> None:
    upload = make_upload()
    place = shape(4, 12, 3)
    table = np.array([[7, 8], [9, 3]])
    upload.write(place, plan_of([3, 3], [2, 2], [table, table[:, :1]]))
    seen = upload.view(place, (), True, FLAGS)
    assert seen.slots.tolist() == [1, 0, 4, 4], "padding has the last slot"
    assert seen.num_rows.tolist() == [3, 3, 0, 0]
    assert seen.num_drafts.tolist() == [2, 2, 0, 0]
    assert seen.samples.tolist() == [True, True, False, False]
    assert seen.query_start_loc.tolist() == [0, 3, 6, 9, 12], "as captured"
    assert seen.row_request.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert seen.row_offset.tolist() == [0, 1, 2] * 4
    assert seen.logits_rows is None
    assert seen.verify_rows.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert seen.tables[0].tolist() == [[7, 8, 0, 0, 0], [9, 3, 0, 0, 0], [0] * 5, [0] * 5]
    assert seen.tables[1].tolist() == [[7, 0, 0], [9, 0, 0], [0] * 3, [0] * 3]


def test_a_mixed_plan_says_where_rows_belong_and_which_need_logits() -> None:
    upload = make_upload()
    place = shape(3, 10, None)
    upload.write(place, plan_of([3, 5], [2, 0], [np.ones((2, 1)), np.ones((2, 1))]))
    seen = upload.view(place, (), True, FLAGS)
    assert seen.query_start_loc.tolist() == [0, 3, 8, 8], "rows of padding come last"
    assert seen.row_request.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, -1, -1]
    assert seen.row_offset.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 0]
    assert seen.logits_rows is not None
    assert seen.logits_rows.tolist() == [0, 1, 2, 7, 7, 7, 0, 0, 0]
    assert seen.verify_rows.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    one = upload.view(place, (), True, FLAGS, rows_of_logits=1)
    upload.write(place, plan_of([3, 5], [0, 0], [np.ones((2, 1)), np.ones((2, 1))]), 1)
    assert one.logits_rows is not None
    assert one.logits_rows.tolist() == [2, 7, 0]
    assert one.verify_rows.tolist() == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]


def test_a_mixed_plan_of_few_rows_has_logits_of_them_all() -> None:
    """Room for 3 x 3 rows that are verified, 9 rows: naming some of them would save nothing."""
    upload = make_upload()
    place = shape(3, 9, None)
    upload.write(place, plan_of([3, 5], [1, 0], [np.ones((2, 1)), np.ones((2, 1))]))
    seen = upload.view(place, (), True, FLAGS)
    assert seen.logits_rows is None
    assert seen.verify_rows.tolist() == [[1, 2, 2], [7, 7, 7], [0, 0, 0]]
    one = upload.view(place, (), True, FLAGS, rows_of_logits=1)
    assert one.logits_rows is not None
    assert one.logits_rows.shape == (3,)


def test_views_keep_their_memory_over_shrinking_batches() -> None:
    """A view made once reads every later plan; what a larger batch left is gone."""
    upload = make_upload()
    place = shape(4, 12, 3)
    seen = upload.view(place, (), True, FLAGS)
    full = np.arange(1, 13).reshape(4, 3)
    for count in (4, 1, 3, 2):
        tables = [full[:count] * (count + 1), full[:count, :2]]
        upload.write(place, plan_of([3] * count, [2] * count, tables))
        assert seen.slots.tolist() == [*range(count - 1, -1, -1), *[4] * (4 - count)]
        assert seen.tables[0][:count, :3].tolist() == tables[0].tolist()
        assert seen.tables[0][count:].count_nonzero() == 0
        assert seen.tables[1][count:].count_nonzero() == 0
    upload.write(place, None)
    assert seen.slots.tolist() == [4] * 4
    assert seen.num_rows.tolist() == [0] * 4
    assert seen.tables[0].count_nonzero() == 0


def test_more_changes_than_a_plan_carries_travel_by_themselves() -> None:
    width = MAX_CHANGES // 4 + 7
    upload = PlanUpload(
        UploadShape(
            max_num_seqs=8, max_num_rows=8, num_speculative_tokens=0, table_widths=(width,)
        ),
        torch.device("cpu"),
    )
    table = np.arange(1, 8 * width + 1).reshape(8, width)
    upload.write(shape(8, 8, 1), plan_of([1] * 8, [0] * 8, [table], k=0))
    assert torch.equal(upload.tables[0], torch.from_numpy(table))


def test_tables_are_whole_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C between reading what changed and sending it: the next plan brings everything."""
    upload = make_upload()
    place = shape(4, 12, 3)
    tables = [np.array([[7, 8], [9, 3]]), np.array([[5], [6]])]
    plan = plan_of([3, 3], [2, 2], tables)
    upload.write(place, plan_of([3] * 4, [2] * 4, [np.full((4, 5), 11), np.full((4, 3), 12)]))
    with monkeypatch.context() as patch:

        def interrupted(*args: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(_Stage, "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            upload.write(place, plan)
    upload.write(place, plan)
    assert upload.tables[0].tolist() == [[7, 8, 0, 0, 0], [9, 3, 0, 0, 0], [0] * 5, [0] * 5]
    assert upload.tables[1].tolist() == [[5, 0, 0], [6, 0, 0], [0] * 3, [0] * 3]


def test_tables_on_the_device_follow_the_cache() -> None:
    """Requests grow, slide, end and take over slots and places in the batch, in any order: what
    the device has after a plan is what the cache said when the plan was made."""
    rng = np.random.default_rng(0)
    specs = [kv_group("full", (0,), 2), kv_group("sliding", (1,), 2, 5)]
    kv = kv_cache(specs, (200, 200), 4, 40)
    upload = PlanUpload(
        UploadShape(
            max_num_seqs=4, max_num_rows=8, num_speculative_tokens=0, table_widths=kv.table_widths
        ),
        torch.device("cpu"),
    )
    lengths = [0] * 4
    late: list[tuple[BlockTable, np.ndarray]] = []
    for _ in range(300):
        for slot in rng.permutation(4)[:2].tolist():
            if rng.random() < 0.15:
                kv.release(slot)
                lengths[slot] = 0
            lengths[slot] = min(40, lengths[slot] + int(rng.integers(1, 6)))
            assert kv.allocate(slot, lengths[slot])
            kv.slide(slot, max(0, lengths[slot] - 3))
        slots = rng.permutation([s for s in range(4) if lengths[s]])[: rng.integers(1, 5)]
        tables = kv.block_tables(slots, max(lengths))
        plan = plan_of([1] * len(slots), [0] * len(slots), [], k=0)
        plan.block_tables = tables
        upload.write(shape(4, 4, 1), plan)
        for table, seen in zip(tables, upload.tables, strict=True):
            dense = table.dense()
            assert seen[: len(slots), : table.width].tolist() == dense.tolist()
            assert seen[len(slots) :].count_nonzero() == 0
            assert dense.any(1).all()
            late.append((table, dense))
    for table, dense in late:
        assert np.array_equal(table.dense(), dense), "a plan's numbers changed later"


def test_results_that_are_fetched_late_are_kept() -> None:
    ring = ResultRing(4, 1, torch.device("cpu"))
    launched = [
        ring.launched([(torch.full((3, 5), n), 2), (torch.full((3, 5), -n), 1)])
        for n in range(RESULT_RING + 2)
    ]
    for n, step in enumerate(launched):
        result = step.result()
        assert result.tokens.tolist() == [[n, n], [n, n], [-n, -n]]
        assert result.num_sampled.tolist() == result.not_finite.tolist() == [n, n, -n]
        assert result.draft_tokens.tolist() == [[n], [n], [-n]]


def test_a_split_plan_is_two_plans() -> None:
    table = np.arange(6).reshape(3, 2)
    plan = plan_of([3, 3, 7], [2, 2, 0], [table])
    plan.segments = (RowSegment(0, 0, 2, 3, 9), RowSegment(6, 2, 1, 7, 20))
    first, rest = split_plan(plan, 2)
    assert first.segments == (RowSegment(0, 0, 2, 3, 9),)
    assert rest.segments == (RowSegment(0, 0, 1, 7, 20),)
    assert (first.slots.tolist(), rest.slots.tolist()) == ([2, 1], [0])
    assert rest.block_tables[0].dense().tolist() == [[4, 5]]
    assert (first.num_drafts.tolist(), rest.num_rows.tolist()) == ([2, 2], [7])
