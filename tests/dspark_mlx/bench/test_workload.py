"""Tables line up, cost tables are shown, prompts and variants mean one thing."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dspark_mlx.bench import cost_report
from dspark_mlx.bench.text_tables import number, spread, text_table
from dspark_mlx.bench.workload import load_prompts, variants
from dspark_mlx.charts import page
from dspark_mlx.errors import UsageError
from dspark_mlx.schedule.cost import CostKey, CostModel


def test_a_cost_table_marks_what_was_interpolated() -> None:
    key = CostKey("toy", "float32", "a machine", "1.0")
    cost = CostModel(
        {128: {1: {1: 0.1, 4: 0.2}, 2: {1: 0.12}}}, {"dspark": {1: {4: 0.01}}}, key=key
    )
    words = cost_report.text(cost)
    assert "a machine" in words and "120.0" in words and "100.0" in words
    assert words.count("*") == 1  # two rows of four tokens
    ElementTree.fromstring(page(cost_report.charts(cost), cost_report.note(cost)))


def test_tables_line_up() -> None:
    lines = text_table(("name", "x"), [["a [b]", "1.00"], ["longer", "10.00"]]).splitlines()
    assert lines == ["name        x", "a [b]    1.00", "longer  10.00"]
    assert number(None) == "–" and spread(1.0, None) == "–" and spread(1.0, 2.0) == "1.0–2.0"


def test_columns_without_anything_in_them_are_left_out() -> None:
    lines = text_table(("a", "b", "c"), [["–", "–", "1"], ["–", "–", "–"]]).splitlines()
    assert lines == ["a  c", "–  1", "–  –"]


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
