"""Charts: what has to stay inside and visible."""

from __future__ import annotations

import re

from hydraspec.study.charts import WIDTH, Bar, Chart, Points, Spot, horizontal_bars, scatter


def places(chart: Chart, key: str) -> list[float]:
    """The values of an attribute of all marks."""
    return [float(str(m.attributes[key])) for m in chart.marks if m.attributes.get(key)]


def spot(x: float, y: float, label: str = "", ci95: list[float] | None = None) -> Spot:
    return Spot(x=x, y=y, title="t", label=label, ci95=ci95)


def axis(chart: Chart) -> list[str]:
    """The labels of both axes, y first."""
    return [m.text for m in chart.marks if m.attributes.get("class") == "axis"]


def test_axes_begin_near_the_points_and_hold_their_intervals() -> None:
    """Catches four speedups in a corner above an empty plot, and a whisker outside of it."""
    near = [spot(1, 2.0, ci95=[1.9, 2.1]), spot(3, 2.2, ci95=[2.05, 2.4])]
    points = Points(name="m", color="red", values=near)
    chart = scatter([points], x_name="x", y_name="y", description="d", x_ticks=[1, 3])
    assert axis(chart) == ["y", "x", "1.9", "2", "2.1", "2.2", "2.3", "2.4", "1", "3"]
    chart = scatter([points], x_name="x", y_name="y", description="d", level=1.0)
    assert axis(chart)[2] == "1", "the level is on the chart"
    far = Points(name="m", color="red", values=[spot(1, 2.0, ci95=[0.1, 1e20])])
    chart = scatter([far], x_name="x", y_name="y", description="d")
    whiskers = [str(m.attributes["d"]) for m in chart.marks if m.tag == "path"]
    ends = [float(end) for path in whiskers for end in re.findall(r"[V ]([\d.]+)", path)]
    assert all(0 <= end <= chart.height for end in ends)
    assert axis(chart)[2] == "0", "the lowest end is far below the point"


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
    values = [spot(100.0 + i, 200.0 + i % 3, str(i)) for i in range(12)]
    points = Points(name="m", color="red", values=[*values, spot(250.0, 1.0, "z")])
    chart = scatter([points], [(1.0, 2.0)], x_name="x", y_name="y", description="d")
    for key, most in (("cx", WIDTH), ("cy", chart.height), ("x", WIDTH), ("y", chart.height)):
        assert all(0 <= value <= most for value in places(chart, key)), key
    assert len(chart.legend) == 1
    apart = [spot(0.0, 1.0, label) for label in "123"]
    same = Points(name="m", color="red", values=apart)
    chart = scatter([same], [], x_name="x", y_name="y", description="d")
    spots = [
        (m.attributes["x"], m.attributes["y"]) for m in chart.marks if m.text in ("1", "2", "3")
    ]
    numbers = [spot for spot in spots if "axis" not in spot]
    assert len(set(numbers)) == len(numbers)


def test_a_label_of_the_rightmost_point_is_to_its_left() -> None:
    far = Points(name="m", color="red", values=[spot(590.0, 1.0, "single 3"), spot(9.0, 9.0, "")])
    chart = scatter([far], [], x_name="x", y_name="y", description="d")
    point, _ = (mark for mark in chart.marks if mark.tag == "circle")
    (label,) = (mark for mark in chart.marks if mark.text == "single 3")
    assert float(str(label.attributes["x"])) < float(str(point.attributes["cx"]))
