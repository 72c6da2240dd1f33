"""Pictures are well-formed, tables line up, prompts and variants mean one thing."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_mlx.bench import costs, picture
from dspark_mlx.bench.energy import joules
from dspark_mlx.bench.prompts import load_prompts
from dspark_mlx.bench.tables import number, spread, table, without_blanks
from dspark_mlx.bench.variants import variants
from dspark_mlx.errors import UsageError
from dspark_mlx.schedule.cost import CostKey, CostModel

FLOATS = st.floats(0.0, 1e6) | st.just(float("nan"))


@given(
    name=st.text(max_size=20),
    points=st.lists(st.tuples(st.floats(0.0, 1e4), FLOATS), max_size=30),
    step=st.booleans(),
)
def test_a_line_chart_is_well_formed(name: str, points: list, step: bool) -> None:
    name = "".join(c for c in name if c.isprintable())
    series = picture.Series(name, tuple(sorted(points)), step)
    chart = picture.Lines(name, "x", "y <ms>", (series,), ((0.0, 1.0, name),))
    root = ElementTree.fromstring(picture.page([chart, chart], f"note & {name}"))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("y <ms>") == 2 and f"note & {name}" in texts
    assert "nan" not in picture.page([chart]).replace(name, "")


def test_bars_leave_out_what_was_not_measured() -> None:
    chart = picture.Bars(
        "t", "tokens/s", ("chat", "code"), ("a", "b"), ((1.0, None), (2.0, 4.0)),
        (((0.5, 1.5), None), (None, (3.0, 5.0))),
    )  # fmt: skip
    svg = picture.page([chart])
    root = ElementTree.fromstring(svg)
    bars = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if "x" in e.attrib]
    assert len(bars) == 3 + 2  # and the legend's two
    heights = sorted(float(e.get("height", 0)) for e in bars if e.get("height") != "11")
    assert heights[2] == pytest.approx(4 * heights[0], rel=0.02)


def test_a_cost_table_marks_what_was_interpolated() -> None:
    key = CostKey("toy", "float32", "a machine", "1.0")
    cost = CostModel(
        {128: {1: {1: 0.1, 4: 0.2}, 2: {1: 0.12}}}, {"dspark": {1: {4: 0.01}}}, key=key
    )
    words = costs.text(cost)
    assert "a machine" in words and "120.0" in words and "100.0" in words
    assert words.count("*") == 1  # two rows of four tokens
    ElementTree.fromstring(costs.svg(cost))


def test_tables_line_up() -> None:
    lines = table(("name", "x"), [["a", "1.00"], ["longer", "10.00"]]).splitlines()
    assert lines == ["name        x", "a        1.00", "longer  10.00"]
    assert number(None) == "–" and spread(1.0, None) == "–" and spread(1.0, 2.0) == "1.0–2.0"


def test_columns_without_anything_in_them_are_left_out() -> None:
    head, rows = without_blanks(("a", "b", "c"), [["–", "–", "1"], ["–", "–", "–"]])
    assert (head, rows) == (["a", "c"], [["–", "1"], ["–", "–"]])


# -- prompts --------------------------------------------------------------------------------


def test_our_own_prompts_have_four_domains_of_several_prompts() -> None:
    found = load_prompts()
    assert {p.domain for p in found} == {"chat", "code", "math", "copy"}
    assert all(sum(p.domain == d for p in found) >= 4 for d in ("chat", "code", "math", "copy"))
    assert [p.domain for p in load_prompts(limit=1)] == ["chat", "code", "math", "copy"]


def test_prompt_files_of_every_form(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    lines = [
        {"turns": ["first", "second"], "category": "qa"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
        {"prompt": "raw text", "domain": "raw"},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    a, b, c = load_prompts([file])
    assert (a.domain, a.messages[0]["content"]) == ("qa", "first")
    assert (b.domain, len(b.messages), b.title) == ("mine", 2, "u")
    assert (c.domain, c.text, c.messages) == ("raw", "raw text", ())


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"turns": []}', '{"turns": [" "]}', '{"prompt": 3}', '{"messages": [1]}']
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "good"}\n' + line)
    with pytest.raises(UsageError, match="line 2"):
        load_prompts([file])


def test_missing_and_empty_prompt_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        load_prompts([tmp_path / "none.jsonl"])
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="no prompts"):
        load_prompts([tmp_path / "empty.jsonl"])


# -- variants -------------------------------------------------------------------------------


def test_methods_cross_schedules_and_plain_decoding_comes_once() -> None:
    made = variants(["none", "dspark", "lookup"], ["auto", "fixed:3", "threshold:0.4"])
    assert [v.label for v in made] == [
        "none",
        *(f"{m} {s}" for m in ("dspark", "lookup") for s in ("auto", "fixed:3", "threshold:0.4")),
    ]
    assert made[2].options == {"draft_length": 3}
    assert made[3].options == {"p_survival_min": 0.4}


@pytest.mark.parametrize(
    ("methods", "schedules"),
    [
        (["nonsense"], ["auto"]),
        (["dspark"], ["nonsense"]),
        (["dspark"], ["fixed:x"]),
        (["dspark"], ["auto:3"]),
        (["dspark", "dspark"], ["auto"]),
        (["dspark"], ["threshold:high"]),
    ],
)
def test_variants_that_make_no_sense_are_refused(methods: list, schedules: list) -> None:
    with pytest.raises(UsageError):
        variants(methods, schedules)


# -- energy ---------------------------------------------------------------------------------


def test_energy_counts_packages_once_or_says_nothing(tmp_path: Path) -> None:
    assert joules(tmp_path) is None
    for zone, microjoules in (
        ("intel-rapl:0", 3_000_000),
        ("intel-rapl:0:0", 500_000),
        ("intel-rapl:1", 1_500_000),
    ):
        (tmp_path / zone).mkdir()
        (tmp_path / zone / "energy_uj").write_text(f"{microjoules}\n")
    assert joules(tmp_path) == pytest.approx(4.5)
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert joules(tmp_path) is None
