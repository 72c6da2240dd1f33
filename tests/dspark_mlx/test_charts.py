"""Every page of charts is well-formed SVG, in a light and a dark colour scheme."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_mlx.charts import BarChart, LineChart, Series, page

FLOATS = st.floats(-1e6, 1e6) | st.just(float("nan"))
SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str | None]:
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@given(
    name=st.text(max_size=20),
    points=st.lists(st.tuples(st.floats(0.0, 1e4), FLOATS), max_size=30),
    step=st.booleans(),
    from_zero=st.booleans(),
    legend=st.sampled_from(["right", "below", "shared"]),
)
def test_a_line_chart_is_well_formed(name, points, step, from_zero, legend) -> None:
    name = "".join(c for c in name if c.isprintable())
    series = Series(name, tuple(sorted(points)), step)
    bands = ((0.0, 1.0, name),)
    chart = LineChart(name, "x", "y <ms>", (series,), bands, from_zero=from_zero)
    svg = page([chart, None, chart], f"note & {name}", columns=2, legend=legend)
    assert texts(svg).count("y <ms>") == 2 and f"note & {name}" in texts(svg)
    assert "nan" not in svg.replace(name, "")


def test_bars_leave_out_what_was_not_measured() -> None:
    chart = BarChart(
        "t", "tokens/s", ("chat", "code"), ("a", "b"), ((1.0, None), (2.0, 4.0)),
        (((0.5, 1.5), None), (None, (3.0, 5.0))),
    )  # fmt: skip
    root = ElementTree.fromstring(page([chart]))
    bars = [e for e in root.iter(f"{SVG}rect") if e.get("class", "").startswith("bar")]
    assert len(bars) == 3 + 2  # and the legend's two
    heights = sorted(float(e.get("height", 0)) for e in bars if e.get("height") != "11")
    assert heights[2] == pytest.approx(4 * heights[0], rel=0.02)


def test_a_reliability_diagram_has_a_diagonal_and_dots_by_weight() -> None:
    points = ((0.1, 0.2), (0.9, 0.8))
    chart = LineChart(
        "p", "predicted", "observed", (Series("a", points, weights=(0.1, 0.9)),), diagonal=True
    )
    root = ElementTree.fromstring(page([chart], width=200, height=200, legend="shared"))
    small, large = (float(e.get("r", 0)) for e in root.iter(f"{SVG}circle"))
    assert 0 < small < large
    assert any(e.text == "1" for e in root.iter(f"{SVG}text"))  # up to 1, with whatever values


def test_a_shared_legend_names_each_series_once() -> None:
    chart = LineChart("p", "x", "y", (Series("one", ((0, 1), (1, 2))), Series("two", ())))
    found = texts(page([chart, chart, chart], columns=3, legend="shared"))
    assert found.count("one") == found.count("two") == 1
    assert texts(page([chart, chart], legend="below")).count("one") == 2


def test_a_page_has_colours_for_a_dark_screen() -> None:
    assert "prefers-color-scheme:dark" in page([])
