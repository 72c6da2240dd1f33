"""Figures come from the runs they are said to come from."""

from __future__ import annotations

import json

import pytest

from dspark_mlx.bench import report
from dspark_mlx.bench.result import CellName, Fork, Results, Run, by_position, summarise
from dspark_mlx.bench.shape import Shape, shared


def run(tokens: int, seconds: float, **counts) -> Run:
    return Run(((0,) * tokens,), seconds, (0.1,), **counts)


def cell(side: str = "a", domain: str = "chat") -> CellName:
    return CellName(side, domain, 0.0, 1)


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
    for side, seconds in (
        ("none", 4.0), ("dspark auto", 2.0), ("dspark fixed:1", 2.5), ("dspark fixed:4", 1.9),
        ("lookup fixed:4", 0.5),
    ):  # fmt: skip
        made.add(cell(side), 0, run(10, seconds))
    [verdict] = report.hindsight(made)
    assert (verdict.name.side, verdict.best) == ("dspark auto", "dspark fixed:4")
    assert verdict.of_best == pytest.approx(0.95) and verdict.of_plain == pytest.approx(2.0)
    assert "95 % of the best fixed length (dspark fixed:4), 200 % of plain" in report.line(verdict)


def test_evened_rounds_cost_what_their_shape_does_as_a_rule() -> None:
    """A side that met a slow minute is judged by its choices; what has no rounds stays."""
    plain, wide = Shape(1, 0, 0, 0, False, False), Shape(1, 1, 4, 4, False, False)
    looked, first = wide._replace(looked=True), plain._replace(after_draft=True)

    def rounds(state: float, **counts: int) -> tuple[tuple[Shape, float], ...]:
        price = {"plain": (plain, 1.0), "wide": (wide, 2.0), "looked": (looked, 2.1)}
        return tuple(
            (price[k][0], state * price[k][1]) for k, n in counts.items() for _ in range(n)
        )

    made = Results({}, "mlx-lm")
    made.add(cell("a"), 0, run(10, 9.9, rounds=rounds(1.0, plain=60, wide=40)))
    made.add(cell("b"), 0, run(10, 9.9, rounds=rounds(1.0, wide=80, looked=10)))
    made.add(cell("slow"), 0, run(10, 9.9, rounds=rounds(2.0, wide=30, looked=70)))
    odd = ((first, 9.0), (wide, 50.0))
    made.add(cell("odd"), 0, run(10, 9.9, rounds=(*odd, *rounds(1.0, plain=20))))
    made.add(cell("mlx-lm"), 0, run(10, 4.0))
    seconds = {name.side: runs[0][0].seconds for name, runs in made.evened().runs.items()}
    assert made.runs[cell("a")][0][0].seconds == 9.9
    assert seconds.pop("mlx-lm") == 4.0
    wanted = {"a": 140.0, "b": 181.0, "slow": 207.0, "odd": 20.0 + 2.0 + 9.0}
    assert seconds == pytest.approx(wanted, rel=0.05)


def test_plain_rounds_in_a_row_share_what_they_took() -> None:
    """Each is begun before the last is read; a change of rows or a draft ends the row."""
    plain, wide = Shape(1, 0, 0, 0, False, False), Shape(1, 1, 4, 4, False, False)
    two = plain._replace(rows=2)
    times = [(wide, 3.0), (plain, 9.0), (plain, 5.0), (plain, 1.0), (two, 7.0), (wide, 2.0)]
    found = list(shared(times))
    assert [shape for shape, _ in found] == [shape for shape, _ in times]
    assert [seconds for _, seconds in found] == [3.0, 5.0, 5.0, 5.0, 7.0, 2.0]


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
    assert by_position([one, run(1, 1.0, reached=(1,), survived=(1,))])[0] == pytest.approx(4 / 5)


def results(*forks: Fork) -> Results:
    made = Results({"model": "toy", "tokens": 8, "repeats": 1}, "mlx-lm", sides=["mlx-lm", "a"])
    for domain in ("chat", "code"):
        made.add(
            cell("a", domain), 0, run(8, 1.0, row_rounds=4, drafted=8, scheduled=8, accepted=4)
        )
        made.add(cell("mlx-lm", domain), 0, run(8, 2.0))
    made.compared, made.forks = 4, list(forks)
    return made


def test_the_report_names_every_side_and_ends_with_the_verdict() -> None:
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
    assert {c["name"]["side"] for c in data["cells"]} == {"a", "mlx-lm"}
    assert data["lossless"] is True
    assert report.charts(made)
    assert report.losslessness(Results({}, "mlx-lm")) == ["lossless: nothing was compared"]
