"""The table of step costs: interpolation, its edges, and the format of its file."""

import json
from dataclasses import replace

import pytest

from hydraspec.engine.costs import CostTable, averaged, from_json, merged, read
from hydraspec.errors import ConfigurationError

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
            assert not cost.outside


def test_between_neighbours_it_is_linear_in_both():
    assert TABLE.at(4, 1).step_ms == 5.0
    assert TABLE.at(10, 2).step_ms == 13.0
    assert TABLE.at(2.5, 1).step_ms == pytest.approx((1.5 + 5.0) / 2)
    assert TABLE.at(10, 3).draft_ms == 3.0


@pytest.mark.parametrize(
    ("batch", "num_drafts", "step_ms"), [(32, 0, 10.0), (0.5, 2, 2.0), (4, 5, 8.0), (17, 9, 30.0)]
)
def test_outside_the_range_it_says_so(batch, num_drafts, step_ms):
    cost = TABLE.at(batch, num_drafts)
    assert cost.outside
    assert cost.step_ms == step_ms


def of_one_k(num_drafts, first, last, *, drafting=None):
    return CostTable(
        batches=(1, 4),
        drafts=(num_drafts,),
        step_ms=((first,), (last,)),
        draft_ms=None if drafting is None else ((drafting,), (drafting,)),
    )


def test_tables_of_several_k_become_one():
    found = merged([of_one_k(1, 2.0, 3.0, drafting=0.5), of_one_k(3, 4.0, 7.0, drafting=1.5)])
    assert found.drafts == (1, 3)
    assert found.step_ms == ((2.0, 4.0), (3.0, 7.0))
    assert found.draft_ms == ((0.5, 1.5), (0.5, 1.5))
    assert merged([of_one_k(1, 2.0, 3.0, drafting=0.5), of_one_k(3, 4.0, 7.0)]).draft_ms is None


def test_repeated_measurements_are_averaged():
    found = averaged([of_one_k(0, 2.0, 3.0), of_one_k(0, 4.0, 7.0)])
    assert found == of_one_k(0, 3.0, 5.0)


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
        ({"schema_version": 2}, "schema_version"),
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
