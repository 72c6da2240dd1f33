"""Simulated cells are measured against hindsight, and say how far they are from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from decoding import make_engine, toy_target

from dspark_mlx.bench import simulation
from dspark_mlx.bench.simulator.reply_trace import synthetic
from dspark_mlx.bench.simulator.tables import tables
from dspark_mlx.draft.lookup import LookupProposer
from dspark_mlx.errors import UsageError
from dspark_mlx.events import to_json
from dspark_mlx.request import Request


@pytest.fixture(scope="module")
def cells():
    worlds = {name: tables()[name] for name in ("flat", "linear")}
    texts = {"code": [synthetic("code", 60, 5, seed) for seed in range(2)]}
    return simulation.run(worlds, texts, ["auto", "fixed", "off"], [1, 2])


def test_every_cell_is_there_with_every_fixed_length(cells) -> None:
    assert len(cells) == 2 * 1 * 2 * 3
    assert all(set(cell.fixed) == set(range(6)) for cell in cells)


def test_the_yardsticks_are_what_they_are_called(cells) -> None:
    for cell in cells:
        assert cell.fixed[cell.best] == max(cell.fixed.values())
        assert cell.plain == cell.fixed[0]
        if cell.schedule == "off":
            assert cell.of_plain == pytest.approx(1.0)
        if cell.schedule == "fixed":
            assert cell.tps == pytest.approx(cell.fixed[5])
            assert cell.of_best <= 1.0 + 1e-9


def test_the_length_and_what_of_it_was_wasted_are_told(cells) -> None:
    for cell in cells:
        if cell.schedule == "off":
            assert cell.length == 0.0 and cell.waste is None
        if cell.schedule == "fixed":
            assert 4.0 < cell.length <= 5.0 and cell.waste is not None and 0.0 < cell.waste < 1.0


def test_schedules_are_named_as_everywhere_in_the_benchmark() -> None:
    worlds, texts = simulation.costs("flat"), {"code": [synthetic("code", 60, 5, 0)]}
    cells = simulation.run(worlds, texts, ["fixed:2", "threshold:0.9", "threshold:0.1"], [1])
    two, strict, lax = cells
    assert two.tps == pytest.approx(two.fixed[2]) and two.length <= 2.0
    assert strict.length < lax.length
    for spec in ("fixed:x", "auto:1", "best"):
        with pytest.raises(UsageError, match="schedule"):
            simulation.run(worlds, texts, [spec], [1])


def test_where_tokens_are_free_the_block_is_best_and_where_they_are_not_nothing_is(cells) -> None:
    best = {(c.table, c.concurrency): c.best for c in cells}
    assert best["flat", 1] == 5 and best["linear", 2] == 0


def test_the_words_name_the_worst_cell(cells) -> None:
    words = simulation.text(cells)
    assert words.count("of plain decoding at worst") == 3
    assert "the best single length" in words
    assert len(simulation.charts(cells)) == 2
    assert len(simulation.to_json(cells)) == len(cells)


def test_tables_and_traces_come_from_names_and_files(tmp_path: Path) -> None:
    assert set(simulation.costs("all")) == set(tables())
    assert list(simulation.costs("cliff-after-4")) == ["cliff-after-4"]
    file = tmp_path / "mine.json"
    file.write_text(tables()["flat"].to_json())
    assert simulation.costs(str(file))["mine"].to_json() == tables()["flat"].to_json()
    assert set(simulation.replies("all")) == {"chat", "code", "math", "mixed", "weak"}
    with pytest.raises(UsageError, match="cannot read the cost table"):
        simulation.costs(str(tmp_path / "none.json"))
    with pytest.raises(UsageError, match="cannot read the trace"):
        simulation.replies(str(tmp_path / "none.jsonl"))


def test_a_recorded_run_is_simulated(tmp_path: Path) -> None:
    engine = make_engine(toy_target(), [LookupProposer(4)])
    engine.submit(Request("r", tokens=(5, 6, 7) * 5, max_tokens=30, ignore_eos=True))
    lines = []
    while engine.active:
        lines += [to_json(event) for event in engine.step()]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(lines))
    cells = simulation.run(simulation.costs("flat"), simulation.replies(str(file)), ["fixed"], [1])
    assert cells[0].replies == "trace" and cells[0].tps > 0
