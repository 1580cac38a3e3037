"""Charts: what has to stay inside and visible."""

from __future__ import annotations

import re

from hydraspec.study.charts import WIDTH, Bar, Chart, Points, horizontal_bars, scatter


def places(chart: Chart, key: str) -> list[float]:
    """The values of an attribute of all marks."""
    return [float(str(m.attributes[key])) for m in chart.marks if m.attributes.get(key)]


def test_an_interval_that_is_far_too_wide_leaves_the_bars_visible() -> None:
    bars = [
        Bar(label="a", value=2.0, text="2", color="red", ci95=[0.1, 1e20]),
        Bar(label="b", value=1.0, text="1", color="red", ci95=[0.9, 1.1]),
    ]
    chart = horizontal_bars(bars, description="d", mark=1.0)
    wide, narrow = (float(str(m.attributes["width"])) for m in chart.marks if m.tag == "rect")
    assert wide > 100
    assert narrow > 50
    whiskers = [str(m.attributes["d"]) for m in chart.marks if m.tag == "path"]
    ends = [float(end) for path in whiskers for end in re.findall(r"[MH]([\d.]+)", path)]
    assert max(ends) <= WIDTH


def test_points_and_labels_stay_inside_and_apart() -> None:
    """Twelve jobs with nearly the same speed, and one far away."""
    values = [(100.0 + i, 200.0 + i % 3, "t", str(i)) for i in range(12)] + [(250.0, 1.0, "t", "z")]
    points = Points(name="m", color="red", values=values)
    chart = scatter([points], [(1.0, 2.0)], x_name="x", y_name="y", description="d")
    for key, most in (("cx", WIDTH), ("cy", chart.height), ("x", WIDTH), ("y", chart.height)):
        assert all(0 <= value <= most for value in places(chart, key)), key
    assert len(chart.legend) == 1
    apart = [(0.0, 1.0, "t", "1"), (0.0, 1.0, "t", "2"), (0.0, 1.0, "t", "3")]
    same = Points(name="m", color="red", values=apart)
    chart = scatter([same], [], x_name="x", y_name="y", description="d")
    spots = [
        (m.attributes["x"], m.attributes["y"]) for m in chart.marks if m.text in ("1", "2", "3")
    ]
    numbers = [spot for spot in spots if "axis" not in spot]
    assert len(set(numbers)) == len(numbers)


def test_a_label_of_the_rightmost_point_is_to_its_left() -> None:
    far = Points(name="m", color="red", values=[(590.0, 1.0, "t", "single 3"), (9.0, 9.0, "t", "")])
    chart = scatter([far], [], x_name="x", y_name="y", description="d")
    point, _ = (mark for mark in chart.marks if mark.tag == "circle")
    (label,) = (mark for mark in chart.marks if mark.text == "single 3")
    assert float(str(label.attributes["x"])) < float(str(point.attributes["cx"]))
