"""Graph modes, dispatch, pieces, and plans in persistent memory: without a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hydraspec_kernels import breaks
from recorded_graphs import CalledAgain, RecordedOps

from hydraspec.engine.native.kv_cache import KVCache
from hydraspec.engine.native.launch import RESULT_RING, ResultRing
from hydraspec.engine.native.runner import split_plan
from hydraspec.engine.native.upload import MAX_CHANGES, PlanUpload, UploadShape, _Stage
from hydraspec.graphs import (
    MODES,
    Capability,
    Descriptor,
    GraphManager,
    default_capture_sizes,
    mixed_row_sizes,
    no_graphs,
    resolve_modes,
)
from hydraspec.types import BlockTable, KVGroupSpec, RowSegment, SamplingFlags, StepPlan

# --------------------------------------------------------------------------- modes


def resolve(requested: str, attention: Capability = Capability.ALWAYS, **changes: Any) -> Any:
    facts = {"rows_per_decode": 4, "drafts": True, "cannot_draft_in_graph": None} | changes
    return resolve_modes(requested, attention=attention, attention_name="it", **facts)


@pytest.mark.parametrize("requested", MODES)
def test_a_mode_that_can_be_had_is_used_as_asked(requested: str) -> None:
    modes = resolve(requested)
    assert modes.as_info() == {
        "requested": requested,
        "target": requested,
        "draft": "none" if requested in ("none", "piecewise") else "full",
        "reason": "a drafter's decode pass is a full graph or eager"
        if requested == "piecewise"
        else None,
    }


@pytest.mark.parametrize(
    ("requested", "attention", "rows", "target"),
    [
        ("full", Capability.UNIFORM_BATCH, 4, "full_and_piecewise"),
        ("full", Capability.UNIFORM_SINGLE_TOKEN, 4, "piecewise"),
        ("full", Capability.UNIFORM_SINGLE_TOKEN, 1, "full_and_piecewise"),
        ("full", Capability.NEVER, 1, "piecewise"),
        ("full_and_piecewise", Capability.UNIFORM_BATCH, 4, "full_and_piecewise"),
        ("full_and_piecewise", Capability.UNIFORM_SINGLE_TOKEN, 4, "piecewise"),
        ("full_decode_only", Capability.UNIFORM_BATCH, 8, "full_decode_only"),
        ("full_decode_only", Capability.NEVER, 1, "piecewise"),
        ("piecewise", Capability.NEVER, 4, "piecewise"),
    ],
)
def test_downgrades_carry_a_reason(
    requested: str, attention: Capability, rows: int, target: str
) -> None:
    """Backend by mode by K: what attention cannot do inside a graph, it does between pieces."""
    info = resolve(requested, attention, rows_per_decode=rows, drafts=False).as_info()
    assert info["target"] == target
    assert (info["reason"] is None) == (target == requested)
    if target != requested:
        assert f"it allows {attention.name.lower()}" in str(info["reason"])


def test_a_drafter_may_stay_outside() -> None:
    modes = resolve("full", cannot_draft_in_graph="it asks the device")
    assert (modes.target, modes.draft, modes.holds_propose) == ("full", "none", False)
    assert "it asks the device" in str(modes.as_info()["reason"])


def test_no_graphs_says_why_only_where_some_were_wanted() -> None:
    assert no_graphs("full", "device is cpu").as_info()["reason"] == "device is cpu"
    assert no_graphs("none", "device is cpu").as_info()["reason"] is None


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20])],
)
def test_default_sizes_end_with_the_largest_batch(most: int, sizes: list[int]) -> None:
    assert default_capture_sizes(most) == sizes


def test_mixed_sizes_are_few_and_bounded() -> None:
    assert mixed_row_sizes([1, 2, 4, 8, 16, 20], 3, 60) == [12, 24, 48, 60]
    assert mixed_row_sizes([1, 2], 4, 6) == [6]


# --------------------------------------------------------------------------- manager


def shape(requests: int, rows: int, each: int | None, variant: str = "") -> Descriptor:
    return Descriptor(num_requests=requests, num_rows=rows, rows_per_request=each, variant=variant)


def manager_of(*descriptors: Descriptor) -> GraphManager[Any, Any]:
    manager: GraphManager[Any, Any] = GraphManager(
        "test", CalledAgain(), lambda descriptor: descriptor, lambda inputs: None
    )
    manager.capture_all(list(descriptors))
    return manager


def served(manager: GraphManager[Any, Any], wanted: Descriptor) -> Descriptor | None:
    captured = manager.dispatch(wanted)
    return None if captured is None else captured.descriptor


def test_dispatch_falls_through_to_larger_sizes() -> None:
    """Three rows a decode stand at 6 and 9; a mixed batch of 5 rows must find the mixed 8."""
    small, large, mixed = shape(2, 6, 3), shape(3, 9, 3), shape(3, 8, None)
    manager = manager_of(small, large, mixed)
    assert served(manager, shape(2, 5, None)) == mixed
    assert served(manager, shape(2, 6, 3)) == small
    assert served(manager, shape(1, 3, 3)) == small
    assert served(manager, shape(3, 9, 3)) == large
    assert served(manager, shape(3, 9, None)) is None
    assert served(manager, shape(4, 8, None)) is None, "more requests than it holds"
    assert served(manager, shape(2, 6, 2)) == mixed, "equally many rows, but not its number"
    assert served(manager, shape(2, 6, 3, "sampled")) is None


def test_a_new_graph_serves_what_none_did_before() -> None:
    manager = manager_of(shape(1, 4, 4))
    assert served(manager, shape(2, 8, 4)) is None
    manager.capture(shape(4, 16, 4))
    assert served(manager, shape(2, 8, 4)) == shape(4, 16, 4)


def test_captures_go_from_large_to_small_with_fresh_inputs_each() -> None:
    """An object that warm-up has initialised would hide from the capture what it must hold."""
    made: list[tuple[int, object]] = []
    ran: list[object] = []

    def make(descriptor: Descriptor) -> object:
        made.append((descriptor.num_requests, object()))
        return made[-1][1]

    manager = GraphManager("test", CalledAgain(), make, ran.append)
    manager.capture_all([shape(n, n, 1) for n in (1, 4, 2)])
    assert [size for size, _ in made] == [4, 4, 2, 2, 1, 1]
    assert ran == [inputs for _, inputs in made]
    assert len(set(map(id, ran))) == 6


def test_nothing_is_dispatched_inside_a_capture() -> None:
    backend = CalledAgain()
    found: list[object] = []
    manager: GraphManager[Any, Any] = GraphManager(
        "test", backend, lambda d: d, lambda d: found.append(manager.dispatch(d))
    )
    manager.capture(shape(1, 1, 1))
    assert found == [None, None]
    assert manager.dispatch(shape(1, 1, 1)) is not None


def test_a_failing_capture_says_which_one_and_what_to_do() -> None:
    def fail(inputs: object) -> None:
        raise RuntimeError("no")

    manager: GraphManager[Any, Any] = GraphManager("step", RecordedOps(), lambda d: d, fail)
    with pytest.raises(RuntimeError) as raised:
        manager.capture(shape(2, 8, 4))
    (note,) = raised.value.__notes__
    assert "step graph of 2 requests, 8 rows (4 each)" in note
    assert "cudagraph=none" in note


# --------------------------------------------------------------------------- capture


def captured(run: Callable[[], Any], *, in_pieces: bool = False) -> tuple[Any, Any, RecordedOps]:
    backend = RecordedOps()
    out, graph = backend.capture(run, in_pieces=in_pieces)
    graph.replay  # noqa: B018  a graph has one
    return out, graph, backend


def test_a_recorded_capture_reads_its_inputs_anew_and_freezes_the_host() -> None:
    """What the tests of the engine rest on: memory counts, Python does not."""
    x, factor = torch.arange(3.0), [2.0]
    out, graph, _ = captured(lambda: (x * factor[0]).add_(x.view(3)))
    assert out.tolist() == [0, 3, 6]
    x.copy_(torch.tensor([10.0, 20.0, 30.0]))
    factor[0] = 100.0
    graph.replay()
    assert out.tolist() == [30, 60, 90]


def test_a_recorded_capture_refuses_to_ask_the_device() -> None:
    with pytest.raises(AssertionError, match="asks the device"):
        captured(lambda: torch.ones(1).item())


@dataclass
class Pair:
    a: torch.Tensor
    b: torch.Tensor | None


def test_pieces_alternate_with_eager_calls() -> None:
    """Two breaks: five parts, each seeing what stands in memory at that moment of the replay."""
    x = torch.ones(2)
    called: list[list[float]] = []

    def attend(y: torch.Tensor, scale: float) -> torch.Tensor:
        called.append(y.tolist())
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None, "inside a piece"
        return y * scale

    def run() -> torch.Tensor:
        y = breaks.run(attend, x + 1, 10.0)
        return breaks.run(attend, y + 1, 100.0) - 1

    out, graph, backend = captured(run, in_pieces=True)
    assert backend.num_pieces == [5]
    assert out.tolist() == [2099, 2099]
    x.fill_(2)
    graph.replay()
    assert out.tolist() == [3099, 3099]
    assert called[2:] == [[3, 3], [31, 31]]


def test_a_break_may_return_a_record_and_is_plain_elsewhere() -> None:
    x = torch.ones(2)

    def both(y: torch.Tensor) -> Pair:
        return Pair(y + 1, None)

    out, graph, _ = captured(lambda: breaks.run(both, x * 2).a * 2, in_pieces=True)
    x.fill_(5)
    graph.replay()
    assert out.tolist() == [22, 22]
    assert breaks.run(both, x).a.tolist() == [6, 6]
    out, _, backend = captured(lambda: breaks.run(both, x).a)  # whole: a part of the graph
    assert backend.num_pieces == [1]
    with pytest.raises(TypeError, match="not list"):
        captured(lambda: breaks.run(lambda: [x]), in_pieces=True)


def test_breaks_inside_a_break_are_plain() -> None:
    x = torch.ones(1)
    inner = lambda y: y + 1  # noqa: E731
    outer = lambda y: breaks.run(inner, y) * 2  # noqa: E731
    out, graph, backend = captured(lambda: breaks.run(outer, x) + 0, in_pieces=True)
    x.fill_(3)
    graph.replay()
    assert (out.tolist(), backend.num_pieces) == ([8], [3])


# --------------------------------------------------------------------------- plans on the device

FLAGS = SamplingFlags()
OWNERS = itertools.count(1)


def block_table(table: np.ndarray, owners: list[int] | None = None) -> BlockTable:
    """Rows without freed entries, of owners that nobody had before unless they are given."""
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
    assert seen.slots.tolist() == [1, 0, 4, 4], "padding has the slot of nobody"
    assert seen.layout.num_rows.tolist() == [3, 3, 0, 0]
    assert seen.layout.num_drafts.tolist() == [2, 2, 0, 0]
    assert seen.layout.samples.tolist() == [True, True, False, False]
    assert seen.layout.query_start_loc.tolist() == [0, 3, 6, 9, 12], "as captured"
    assert seen.layout.row_request.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert seen.layout.row_offset.tolist() == [0, 1, 2] * 4
    assert seen.layout.logits_rows is None
    assert seen.layout.verify_rows.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert seen.tables[0].tolist() == [[7, 8, 0, 0, 0], [9, 3, 0, 0, 0], [0] * 5, [0] * 5]
    assert seen.tables[1].tolist() == [[7, 0, 0], [9, 0, 0], [0] * 3, [0] * 3]


def test_a_mixed_plan_says_where_rows_belong_and_which_need_logits() -> None:
    upload = make_upload()
    place = shape(3, 10, None)
    upload.write(place, plan_of([3, 5], [2, 0], [np.ones((2, 1)), np.ones((2, 1))]))
    seen = upload.view(place, (), True, FLAGS)
    assert seen.layout.query_start_loc.tolist() == [0, 3, 8, 8], "rows of nobody lie behind it"
    assert seen.layout.row_request.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, -1, -1]
    assert seen.layout.row_offset.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 0]
    assert seen.layout.logits_rows is not None
    assert seen.layout.logits_rows.tolist() == [0, 1, 2, 7, 7, 7, 0, 0, 0]
    one = upload.view(place, (), True, FLAGS, rows_of_logits=1)
    upload.write(place, plan_of([3, 5], [0, 0], [np.ones((2, 1)), np.ones((2, 1))]), 1)
    assert one.layout.logits_rows is not None
    assert one.layout.logits_rows.tolist() == [2, 7, 0]
    assert one.layout.verify_rows.tolist() == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]


def test_views_keep_their_memory_over_shrinking_batches() -> None:
    """A view made once reads every later plan; what a larger batch left behind is gone."""
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
    assert seen.layout.num_rows.tolist() == [0] * 4
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
    specs = [
        KVGroupSpec(name=name, layers=(g,), num_kv_heads=1, head_dim=1, block_size=2, window=window)
        for g, (name, window) in enumerate((("full", None), ("sliding", 5)))
    ]
    kv = KVCache(
        specs,
        (200, 200),
        num_layers=2,
        num_slots=4,
        max_tokens=40,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
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
        assert np.array_equal(table.dense(), dense), "a plan's numbers changed behind it"


def test_results_nobody_fetched_in_time_are_kept() -> None:
    ring = ResultRing(4, 1, torch.device("cpu"))
    launched = [
        ring.launched([(torch.full((3, 4), n), 2), (torch.full((3, 4), -n), 1)], None)
        for n in range(RESULT_RING + 2)
    ]
    for n, step in enumerate(launched):
        result = step.result()
        assert result.tokens.tolist() == [[n, n], [n, n], [-n, -n]]
        assert result.num_sampled.tolist() == [n, n, -n]
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
