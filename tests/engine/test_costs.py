"""The table of step costs: interpolation, its edges, and the format of its file."""

import json
from dataclasses import replace

import pytest
import records
from records import part

from hydraspec.engine.costs import (
    HALF,
    CostTable,
    StepTimes,
    filled_to,
    from_json,
    half_size,
    over_contexts,
    read,
)
from hydraspec.engine.run.step_costs import MAX_RUNS, NUM_STEPS, Plane, with_ragged
from hydraspec.engine.schedule.draft_lengths import DraftLengths
from hydraspec.errors import ConfigurationError
from hydraspec.types import Request, SamplingParams, Span

TABLE = CostTable(
    batches=(1, 4, 16),
    drafts=(0, 2, 3),
    step_ms=((1.0, 2.0, 3.0), (4.0, 6.0, 8.0), (10.0, 20.0, 30.0)),
    draft_ms=((0.0, 0.5, 1.0), (0.0, 1.0, 2.0), (0.0, 3.0, 4.0)),
)
RATES = (0.9, 0.75, 0.5)


def test_measured_entries_come_back_exactly():
    for row, batch in enumerate(TABLE.batches):
        for column, num_drafts in enumerate(TABLE.drafts):
            cost = TABLE.at(batch, num_drafts)
            assert cost.step_ms == TABLE.step_ms[row][column]
            assert cost.draft_ms == TABLE.draft_ms[row][column]
            assert cost.verify_ms == cost.step_ms - cost.draft_ms


def test_between_neighbours_it_is_linear_in_both():
    assert TABLE.at(4, 1).step_ms == 5.0
    assert TABLE.at(10, 2).step_ms == 13.0
    assert TABLE.at(2.5, 1).step_ms == pytest.approx((1.5 + 5.0) / 2)
    assert TABLE.at(10, 3).draft_ms == 3.0


@pytest.mark.parametrize(
    ("batch", "num_drafts", "step_ms"), [(32, 0, 10.0), (0.5, 2, 2.0), (4, 5, 8.0), (17, 9, 30.0)]
)
def test_outside_the_range_it_is_the_nearest_edge(batch, num_drafts, step_ms):
    assert TABLE.at(batch, num_drafts).step_ms == step_ms


def step(widths, ms, *, drafting=None, prefill=False, draft_length=None):
    parts = [part(i, n, emitted=1, prefill_rows=prefill * (1 + n)) for i, n in enumerate(widths)]
    phases = {} if drafting is None else {"propose": drafting}
    return records.step(*parts, ms=ms, phase_ms=phases, draft_length=draft_length)


def test_only_steps_in_which_all_requests_verify_all_drafts_are_timed():
    """A prompt, unequal drafts, and drafts of the step before's length are no size's steps."""
    times = StepTimes()
    for record in (
        step([2, 2], 4.0, drafting=1.0),
        step([2, 2], 6.0, drafting=3.0),
        step([2, 2], 90.0, prefill=True),
        step([2, 1], 90.0),
        step([2, 2], 90.0, draft_length=3),
        step([1], 3.0, draft_length=1),
    ):
        times.add(record)
    assert times.table([2], [2]) == CostTable(
        batches=(2,), drafts=(2,), step_ms=((5.0,),), draft_ms=((2.0,),)
    )
    assert times.table([1], [1]).draft_ms is None


def test_times_are_the_devices_where_it_has_a_clock():
    """A host that was late fetches two results at once, and has 90 ms and 1 ms of two equal
    steps."""
    times = StepTimes()
    for host_ms in (90.0, 1.0):
        times.add(replace(step([2, 2], host_ms), device_ms=5.0))
    assert times.step_ms[2, 2] == [5.0, 5.0]


def test_only_steps_after_one_of_the_same_length_are_timed():
    """Of whatever number of requests; the first step of a length has the end of another one's work
    in it."""
    plane = Plane(None, DraftLengths((0, 1, 2)), 1)
    for number, widths in enumerate(
        ([0, 0], [0], [2, 2], [2, 2], [2, 1], [2, 2], [2, 2], [0, 2], [2, 0])
    ):
        plane.add(step(widths, 1.0 + number, draft_length=max(widths)))
    assert plane.times.step_ms == {(1, 0): [2.0], (2, 2): [4.0, 7.0], (2, HALF): [9.0]}


def test_every_length_is_timed_in_runs_that_begin_with_as_many_prompts_as_lengths():
    """Eleven steps of prompts and seven without, eighteen being six lengths three times: in fixed
    turns the same lengths would always meet prompts."""
    plane = Plane(None, DraftLengths(range(5)), 1)
    plane.size, script = 2, plane.script()
    for _ in range(MAX_RUNS):
        for number in range(18):
            length = next(script)
            widths = [length] * 2 if isinstance(length, int) else list(length)
            plane.add(step(widths, 1.0, draft_length=max(widths), prefill=number < 11))
    assert plane.is_known(2)
    assert max(map(len, plane.times.step_ms.values())) < 2 * NUM_STEPS


def test_a_step_of_two_numbers_of_drafts_is_timed_apart():
    """Half of the requests with K drafts, the rest with none, where K are proposed."""
    assert half_size(step([2, 0, 0], 1.0, draft_length=2)) == (3, HALF)
    assert half_size(step([0, 2, 2, 0], 1.0, draft_length=2)) == (4, HALF)
    for widths, length in (([2, 2, 0], 2), ([2, 0], 3), ([2, 1], 2), ([2], 2), ([0, 0], 0)):
        assert half_size(step(widths, 1.0, draft_length=length)) is None
    assert half_size(step([0, 2], 1.0, draft_length=2, prefill=True)) is None


def test_what_ragged_steps_take_longer():
    """With drafting timed a share of verification: 5 - 1 ms are verified in place of 2.5. Without,
    milliseconds for each draft by which the mean is below K: 1 at 1 of 2 drafts."""
    times = StepTimes()
    times.step_ms[2, HALF] = [5.0] * 3
    eager = CostTable(
        batches=(1, 2),
        drafts=(0, 2),
        step_ms=((1.0, 2.0), (2.0, 4.0)),
        draft_ms=((0.0, 1.0), (0.0, 1.0)),
    )
    found = with_ragged(eager, times).ragged_ms
    assert found[0] == (0.0, 0.0)
    assert found[1] == pytest.approx((2.0 * 0.6, 3.0 * 0.6))
    graphs = replace(eager, step_ms=((1.0, 2.0), (2.0, 6.0)), draft_ms=None)
    found = with_ragged(graphs, times)
    assert found.ragged_ms == ((0.0, 0.0), (2.0, 0.0))
    assert found.at(2, 1).step_ms + found.at(2, 1).ragged_ms == 5.0
    times.step_ms[2, HALF] = [1.0]  # noise: it is never charged less than equal rows
    assert with_ragged(graphs, times).ragged_ms[1] == (0.0, 0.0)
    assert from_json(json.loads(json.dumps(found.as_json())), "a") == found


@pytest.mark.parametrize(
    ("shares", "given", "found"),
    [
        ((0.05, 0.05), [*[2.0] * 46, 1000.0, 1000.0], 2.0),
        ((0.05, 0.05), [3.0], 3.0),
        ((0.05, 0.05), [*[2.0] * 32, *[8.0] * 16], 4.0),
        ((0.0, 0.5), [9.0, 1.0, 2.0], 1.5),
    ],
    ids=[
        "a few outliers do not count",
        "a single time",
        "interrupted steps count in proportion, where a median would not see them",
        "the faster half",
    ],
)
def test_the_typical_time(shares, given, found):
    assert StepTimes(*shares).typical(given) == pytest.approx(found, rel=0.05)


def test_a_table_survives_its_file(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(TABLE.as_json()), encoding="utf-8")
    assert read(path) == TABLE
    without = CostTable(batches=(2,), drafts=(0,), step_ms=((1.5,),))
    path.write_text(json.dumps(without.as_json()), encoding="utf-8")
    assert read(path) == without
    assert read(path).at(2, 0).verify_ms is None
    assert "rates" not in without.as_json()
    path.write_text(json.dumps(replace(TABLE, rates=RATES).as_json()), encoding="utf-8")
    assert read(path).rates == RATES


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"schema_version": 3}, "schema_version"),
        ({"contexts": [64, 32]}, "contexts"),
        ({"contexts": [64, 128]}, "2 contexts of 3 batches by 3 drafts"),
        ({"contexts": [64], "step_ms": [[], [], []], "draft_ms": None}, "without any batch"),
        ({"contexts": [64], "step_ms": [[1, 2, 3], [4, 6, 8], []]}, "batches that step_ms has"),
        ({"batches": [4, 1, 16]}, "batches"),
        ({"batches": [0, 4, 16]}, "batches"),
        ({"batches": [1, 4.5, 16]}, "4.5"),
        ({"drafts": [0, 2]}, "3 batches by 2 drafts"),
        ({"step_ms": [[1, 2, 3], [4, 6, 8]]}, "step_ms"),
        ({"step_ms": [[1, 2, 3], [4, 6, 8], [10, 20, float("nan")]]}, "finite"),
        ({"step_ms": [[0, 2, 3], [4, 6, 8], [10, 20, 30]]}, "positive"),
        ({"draft_ms": [[2, 0, 0], [0, 0, 0], [0, 0, 0]]}, "more than"),
        ({"draft_ms": [["x", 0, 0], [0, 0, 0], [0, 0, 0]]}, "x"),
        ({"rates": [0.8]}, "rates is not of"),
        ({"rates": [1.2] * 8}, "from 0 to 1"),
        ({"rates": 0.8}, "not iterable"),
    ],
)
def test_a_file_that_is_no_table_is_one_message(changed, says):
    content = json.loads(json.dumps({**TABLE.as_json(), **changed}))
    with pytest.raises(ConfigurationError, match=r"a\.json: no table of step costs") as caught:
        from_json(content, "a.json")
    assert says in str(caught.value)


SHORT = CostTable(batches=(1, 4), drafts=(0, 2), step_ms=((1.0, 2.0), (4.0, 6.0)))
LONG = CostTable(batches=(1,), drafts=(0, 2), step_ms=((3.0, 8.0),))
BY_CONTEXT = over_contexts({512: SHORT, 4608: LONG}, RATES)


@pytest.mark.parametrize(
    ("batch", "num_drafts", "context", "step_ms"),
    [
        (1, 2, 512, 2.0),
        (1, 2, 4608, 8.0),
        (1, 2, 2560, 5.0),
        (1, 1, 1536, 1.5 + 0.25 * 4.0),
        (4, 0, 100, 4.0),
        (1, 0, 99999, 3.0),
        (4, 0, 4608, 3.0),
        (4, 2, None, 6.0),
    ],
    ids=[
        *("measured", "measured, long", "between contexts", "between all", "shorter", "longer"),
        *("a batch that did not fit costs as the largest that did", "no context: the shortest"),
    ],
)
def test_a_table_by_context(batch, num_drafts, context, step_ms):
    assert BY_CONTEXT.at(batch, num_drafts, context).step_ms == pytest.approx(step_ms)


def test_a_table_without_contexts_is_the_same_at_each():
    assert TABLE.at(4, 2, 32768) == TABLE.at(4, 2)
    assert TABLE.at(4, 2, 1) == TABLE.at(4, 2)


def test_a_table_by_context_survives_its_file_and_files_without_contexts_are_read():
    found = from_json(json.loads(json.dumps(BY_CONTEXT.as_json())), "a.json")
    assert found == BY_CONTEXT
    assert found.rates == RATES
    old = {**TABLE.as_json(), "schema_version": 1}
    assert "contexts" not in old
    assert from_json(old, "a.json") == TABLE


def test_a_missing_key_and_a_missing_file_are_named(tmp_path):
    content = TABLE.as_json()
    del content["drafts"]
    with pytest.raises(ConfigurationError, match="'drafts' is missing"):
        from_json(content, "a.json")
    with pytest.raises(ConfigurationError, match="to do: give the path"):
        read(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("no json", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="no table of step costs"):
        read(tmp_path / "text.json")


@pytest.mark.parametrize(("context", "ids"), [(8, [5, 6, 7, 5, 6, 7, 5, 6]), (2, [5, 6])])
def test_a_filled_prompt_is_text(context, ids):
    span = Span(kind="image", start=1, length=2, digest="", may_be_cut=True)
    request = Request(
        index=0, id="a", sampling=SamplingParams(), prompt_token_ids=[5, 6, 7], spans=(span,)
    )
    found = filled_to(request, context)
    assert found.prompt_token_ids == ids
    assert found.num_filled == context - 1
    assert found.spans == ()
    assert request.spans == (span,)
