"""Figures come from the runs they are said to come from."""

from __future__ import annotations

import json

import pytest

from dspark_mlx.bench import comparison_report as report
from dspark_mlx.bench.results import CellName, Fork, Results, Run, summarise


def run(tokens: int, seconds: float, **counts) -> Run:
    return Run(((0,) * tokens,), seconds, (0.1,), **counts)


def cell(system: str = "a", domain: str = "chat") -> CellName:
    return CellName(system, domain, 0.0, 1)


def test_rates_take_each_groups_median_and_ranges_are_of_whole_repeats() -> None:
    mine = [
        [run(10, 1.0), run(30, 2.0)],
        [run(10, 9.0), run(30, 2.0)],
        [run(10, 1.0), run(30, 9.0)],
    ]
    base = [[run(10, 2.0), run(30, 4.0)]] * 3
    found = summarise(cell(), mine, base)
    assert found.tps == pytest.approx(40 / 3)  # neither hiccup counts
    assert (found.tps_low, found.tps_high) == (pytest.approx(40 / 11), pytest.approx(40 / 3))
    assert found.ratio == pytest.approx(2.0)
    assert (found.ratio_low, found.ratio_high) == (pytest.approx(6 / 11), pytest.approx(2.0))
    assert (found.replies, found.tokens) == (6, 120)


def test_a_repeat_that_was_stopped_half_way_still_counts() -> None:
    mine = [[run(10, 1.0), run(10, 1.0)], [run(10, 3.0)], []]
    assert summarise(cell(), mine).tps == pytest.approx(20 / 3)


def test_hindsight_takes_the_best_fixed_length_of_the_same_method_and_place() -> None:
    made = Results({}, "mlx-lm")
    for system, seconds in (
        ("none", 4.0), ("dspark auto", 2.0), ("dspark fixed:1", 2.5), ("dspark fixed:4", 1.9),
        ("lookup fixed:4", 0.5),
    ):  # fmt: skip
        made.add(cell(system), 0, run(10, seconds))
    [verdict] = report.hindsight(made)
    assert (verdict.name.system, verdict.best) == ("dspark auto", "dspark fixed:4")
    assert verdict.of_best == pytest.approx(0.95) and verdict.of_plain == pytest.approx(2.0)
    assert "95 % of the best fixed length (dspark fixed:4), 200 % of plain" in report.line(verdict)


def test_rounds_are_counted_by_the_rule_that_decided_them() -> None:
    made = Results({}, "mlx-lm")
    made.add(cell(), 0, run(8, 1.0, rules=(("auto", 3), ("plain", 1))))
    made.add(cell(domain="code"), 0, run(8, 1.0, rules=(("auto", 2),)))
    assert "rounds of a decided by: auto 5, plain 1" in report.text(made)


def test_one_repeat_has_no_range() -> None:
    found = summarise(cell(), [[run(10, 1.0)]], [[run(5, 1.0)]])
    assert (found.ratio, found.tps_low, found.ratio_high) == (2.0, None, None)


def test_waste_lengths_and_acceptance_follow_the_counts() -> None:
    one = run(
        9, 1.0, row_rounds=4, drafted=20, scheduled=12, accepted=5, reached=(4, 4, 4),
        survived=(3, 2, 0), wall_seconds=1.0, draft_seconds=0.2,
        verify_seconds=0.7, host_seconds=0.05,
    )  # fmt: skip
    found = summarise(cell(), [[one, one]])
    assert found.accepted_length == 9 / 4
    assert (found.drafted_length, found.scheduled_length) == (5.0, 3.0)
    assert found.waste == pytest.approx(7 / 12)
    assert found.acceptance == (0.75, 0.5, 0.0)
    assert (found.draft_share, found.verify_share) == (pytest.approx(0.2), pytest.approx(0.7))
    shorter = run(1, 1.0, reached=(1,), survived=(1,))
    assert summarise(cell(), [[one, shorter]]).acceptance[0] == pytest.approx(4 / 5)


def results(*forks: Fork) -> Results:
    made = Results({"model": "toy", "tokens": 8, "repeats": 1}, "mlx-lm", systems=["mlx-lm", "a"])
    for domain in ("chat", "code"):
        made.add(
            cell("a", domain), 0, run(8, 1.0, row_rounds=4, drafted=8, scheduled=8, accepted=4)
        )
        made.add(cell("mlx-lm", domain), 0, run(8, 2.0))
    made.compared, made.forks = 4, list(forks)
    return made


def test_the_report_names_every_system_and_ends_with_the_verdict() -> None:
    words = report.text(results())
    assert "2.00×" in words and "1 request at a time" in words and "all domains" in words
    lines = [line for line in words.splitlines() if line.startswith(("mlx-lm ", "a "))]
    assert lines[0].startswith("mlx-lm")
    assert words.splitlines()[-1].startswith("lossless: yes, all of 4 replies")


def test_forks_are_told_apart_and_none_is_left_out() -> None:
    tie = Fork("a", "say hello", 3, 1e-6, True)
    wrong = Fork("a", "say hello", 0, 2.5, False)
    assert results(tie).lossless and not results(tie, wrong).lossless
    assert "near-ties, where 1 of 4" in report.text(results(tie))
    words = report.text(results(tie, wrong))
    assert "lossless: NO, 1 of 4" in words
    assert "token 1 of 'say hello', top-2 margin 2.5 (NOT a tie)" in words
    assert "token 4 of 'say hello', top-2 margin 1e-06 (near-tie)" in words


def test_results_are_json_and_charts() -> None:
    made = results()
    data = json.loads(json.dumps(made.to_json()))
    assert {c["name"]["system"] for c in data["cells"]} == {"a", "mlx-lm"}
    assert data["lossless"] is True
    assert report.charts(made)
    assert report.losslessness(Results({}, "mlx-lm")) == ["lossless: nothing was compared"]
