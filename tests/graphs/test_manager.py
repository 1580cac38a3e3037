"""Graph modes, dispatch and pieces: without a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hydraspec_kernels.runtime import breaks
from recorded_graphs import CalledAgain, RecordedOps

from hydraspec.graphs import (
    MODES,
    Descriptor,
    GraphManager,
    default_capture_sizes,
    mixed_row_sizes,
    no_graphs,
    resolve_modes,
)
from hydraspec.graphs.capture import KeptOutputs

# --------------------------------------------------------------------------- modes


def resolve(requested: str, **changes: Any) -> Any:
    return resolve_modes(requested, **{"drafts": True, "cannot_draft_in_graph": None} | changes)


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


@pytest.mark.parametrize("requested", MODES)
def test_without_a_drafter_no_mode_needs_a_reason(requested: str) -> None:
    info = resolve(requested, drafts=False).as_info()
    assert (info["target"], info["draft"], info["reason"]) == (requested, "none", None)


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
    assert mixed_row_sizes([1, 2, 4, 8, 16, 20], 3, 60, 20) == [12, 24, 48, 60]
    assert mixed_row_sizes([1, 2, 4, 8, 16], 1, 16, 100) == [8, 16, 32, 64, 96]
    assert mixed_row_sizes([1, 2], 4, 6, 6) == [6]


# --------------------------------------------------------------------------- manager


def shape(requests: int, rows: int, each: int | None, variant: str = "") -> Descriptor:
    return Descriptor(num_requests=requests, num_rows=rows, rows_per_request=each, variant=variant)


def manager_of(*descriptors: Descriptor) -> GraphManager[Any, Any]:
    manager: GraphManager[Any, Any] = GraphManager("test", CalledAgain())
    manager.capture_all(list(descriptors), lambda each: captured_empty(manager, each))
    return manager


def captured_empty(manager: GraphManager[Any, Any], descriptor: Descriptor) -> None:
    manager.capture(descriptor, lambda descriptor: descriptor, lambda inputs: None)


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
    captured_empty(manager, shape(4, 16, 4))
    assert served(manager, shape(2, 8, 4)) == shape(4, 16, 4)


def test_captures_go_from_large_to_small_with_fresh_inputs_each() -> None:
    """An object that warm-up has initialised would hide from the capture what it must hold."""
    made: list[tuple[int, object]] = []
    ran: list[object] = []

    def make(descriptor: Descriptor) -> object:
        made.append((descriptor.num_requests, object()))
        return made[-1][1]

    manager: GraphManager[Any, Any] = GraphManager("test", CalledAgain())
    sizes = [shape(n, n, 1) for n in (1, 4, 2)]
    manager.capture_all(sizes, lambda each: manager.capture(each, make, ran.append))
    assert [size for size, _ in made] == [4, 4, 2, 2, 1, 1]
    assert ran == [inputs for _, inputs in made]
    assert len(set(map(id, ran))) == 6


def test_nothing_is_dispatched_inside_a_capture() -> None:
    backend = CalledAgain()
    found: list[object] = []
    manager: GraphManager[Any, Any] = GraphManager("test", backend)
    manager.capture(shape(1, 1, 1), lambda d: d, lambda d: found.append(manager.dispatch(d)))
    assert found == [None, None]
    assert manager.dispatch(shape(1, 1, 1)) is not None


def test_a_failing_capture_says_which_one_and_what_to_do() -> None:
    def fail(inputs: object) -> None:
        raise RuntimeError("no")

    manager: GraphManager[Any, Any] = GraphManager("step", RecordedOps())
    with pytest.raises(RuntimeError) as raised:
        manager.capture(shape(2, 8, 4), lambda d: d, fail)
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


def test_smaller_captures_keep_outputs_where_larger_ones_do() -> None:
    """60 layers' attention outputs of every row count would take gigabytes beside the KV cache."""
    kept = KeptOutputs()
    large = kept.copied(0, (torch.ones(8, 3), None))
    small = kept.copied(0, (torch.full((5, 3), 2.0), None))
    assert small[0].data_ptr() == large[0].data_ptr()
    assert torch.equal(small[0], torch.full((5, 3), 2.0))
    others = [kept.copied(1, torch.ones(5, 3)), kept.copied(0, (torch.ones(5, 4), None))[0]]
    others.append(kept.copied(1, torch.ones(9, 3)))
    assert len({large[0].data_ptr(), *(other.data_ptr() for other in others)}) == 4
