from __future__ import annotations

import copy
import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_trace import make
from rich.cells import cell_len

from dspark_mlx.events import Finished, Token
from dspark_mlx.stats import EngineStats
from tui.canvas import Canvas, nice_ceiling
from tui.charts import draft_strip, gauges, scheduling, timelines

DRAWS = [
    value
    for module in (timelines, scheduling, gauges)
    for value in vars(module).values()
    if callable(value) and getattr(value, "__annotations__", {}).get("return") == "Canvas"
]


@pytest.fixture(scope="module")
def state() -> EngineStats:
    live = EngineStats()
    for event in make(3, 300):
        live.apply(event)
    return live


@given(st.text(), st.integers(-5, 12), st.integers(-2, 4))
def test_rows_always_fill_the_width_exactly(text: str, x: int, y: int) -> None:
    canvas = Canvas(10, 3)
    canvas.text(x, y, "".join(text.splitlines()), "a")
    for row in range(3):
        assert sum(cell_len(run) for run, _ in canvas.row(row)) == 10


def test_a_wide_character_never_hangs_over_the_edge() -> None:
    canvas = Canvas(3, 1)
    canvas.text(0, 0, "你你")
    assert canvas.plain() == ["你"]


def test_dots_make_braille_and_text_stays_on_top() -> None:
    canvas = Canvas(2, 1)
    for py in range(4):
        canvas.dot(0, py, "a")
    canvas.text(1, 0, "x")
    canvas.dot(2, 0, "a")
    assert canvas.plain() == ["⡇x"]


def test_bars_are_exact_to_an_eighth_and_never_hide_what_is_there() -> None:
    canvas = Canvas(4, 1)
    canvas.bar(0, 0, 4, 0.5 + 1 / 32, "a")
    assert canvas.plain() == ["██▏"]
    column = Canvas(1, 2)
    column.column(0, 0, 2, 0.75, "a")
    assert column.plain() == ["▄", "█"]
    tiny = Canvas(1, 2)
    tiny.column(0, 0, 2, 0.001, "a")
    assert tiny.plain() == ["", "▁"]


@given(st.floats(1e-6, 1e9))
def test_an_axis_ends_above_its_highest_value_and_not_far_above(value: float) -> None:
    top = nice_ceiling(value)
    assert value <= top * 1.000001 and top <= 2.1 * value


def test_there_are_charts_for_all_that_is_promised() -> None:
    names = {draw.__name__ for draw in DRAWS}
    assert names >= {
        "speed", "acceptance", "accepted_length", "cuts_over_time", "cut_histogram", "by_position",
        "step_time", "slowdown", "shares", "memory", "context", "cost_curve", "decision",
        "reliability", "requests_table", "status_line",
    }  # fmt: skip


@pytest.mark.parametrize("draw", DRAWS, ids=lambda d: d.__name__)
@pytest.mark.parametrize("size", [(0, 0), (1, 1), (7, 2), (38, 6), (80, 20), (200, 3)])
def test_every_chart_draws_at_any_size_and_with_nothing_known(draw, size, state) -> None:
    for live in (EngineStats(), state):
        canvas = draw(live, *size)
        assert canvas.width == max(0, size[0])
        for y in range(canvas.height):
            runs = list(canvas.row(y))
            assert sum(cell_len(text) for text, _ in runs) == canvas.width


def test_the_speed_up_is_a_number_on_the_screen(state: EngineStats) -> None:
    title = timelines.speed(state, 60, 6).plain()[0]
    assert f"×{state.speedup:.2f}" in title and f"plain {state.plain_tps:.1f}" in title
    assert f"×{state.speedup:.2f}" in gauges.status_line(state, 100).plain()[0]


def test_axes_do_not_depend_on_the_data_where_the_scale_is_known(state: EngineStats) -> None:
    assert "100%" in timelines.acceptance(state, 40, 6).plain()[1]
    assert timelines.acceptance(EngineStats(), 40, 6).plain()[1].startswith("100%")
    assert timelines.cuts_over_time(state, 40, 6).plain()[1].strip().startswith("7")
    assert timelines.accepted_length(state, 40, 6).plain()[1].strip().startswith("8")


def test_the_decision_marks_the_chosen_length(state: EngineStats) -> None:
    text = "\n".join(scheduling.decision(state, 40, 8).plain())
    assert "◆" in text and state.last_draft is not None
    assert f"verify {state.last_draft.scheduled}:" in text


def test_time_lines_show_the_same_rounds(state: EngineStats) -> None:
    draws = (timelines.acceptance, timelines.accepted_length)
    rows = [draw(state, 45, 8).plain() for draw in draws]
    assert all(any(0x2800 < ord(c) < 0x2900 for c in "".join(r[1:])) for r in rows)


def test_the_strip_shows_tokens_fates_cut_and_reason(state: EngineStats) -> None:
    request = next(r for r in state.requests.values() if r.last_draft and r.last_draft.drafted)
    request.last_draft = next(
        row
        for event in make(1, 200)
        if hasattr(event, "rows") and hasattr(event, "step")
        for row in event.rows
        if 0 < row.accepted < row.scheduled < len(row.drafted)
    )
    row = request.last_draft
    lines = draft_strip.draw(request, 120, draft_strip.FULL).plain()
    text = "\n".join(lines)
    assert (
        f"{len(row.drafted)} drafted → {row.scheduled} verified → {row.accepted} kept" in lines[0]
    )
    assert lines[4].count("✓ kept") == row.accepted and lines[4].count("✗ wrong") == 1
    assert lines[4].count("· cut") == len(row.drafted) - row.scheduled
    assert "┃" in lines[1] and row.reason in lines[5] and "target's" in text
    assert f"{100 * row.confidence[0]:.0f}%" in lines[2]
    assert f"{100 * row.survival[1]:.0f}%" in lines[3]
    short = draft_strip.draw(request, 60, draft_strip.SHORT).plain()
    assert row.reason in short[3] and "✓" in short[2]


def test_the_strip_has_room_for_the_whole_reason_and_marks_one_that_is_cut(
    state: EngineStats,
) -> None:
    request = copy.copy(
        next(r for r in state.requests.values() if r.last_draft and r.last_draft.drafted)
    )
    assert request.last_draft
    reason = "verifying 2 more would cost 211.8 ms for 0.21 expected tokens"
    request.last_draft = dataclasses.replace(request.last_draft, reason=reason, calibrated=False)
    for width, height in ((76, draft_strip.FULL), (76, draft_strip.SHORT)):  # a pane of 120 columns
        lines = draft_strip.draw(request, width, height).plain()
        assert lines[-1].endswith(reason)
    wide = draft_strip.draw(request, 120, draft_strip.FULL).plain()
    assert wide[2].endswith("uncalibrated") and "uncalibrated" not in wide[-1]
    request.last_draft = dataclasses.replace(request.last_draft, copied=True)
    assert draft_strip.draw(request, 120, draft_strip.FULL).plain()[2].endswith("copied from above")
    narrow = draft_strip.draw(request, 38, draft_strip.SHORT).plain()
    assert narrow[-1].endswith("…") and reason.startswith(narrow[-1].strip(" …"))
    assert draft_strip.draw(None, 38, draft_strip.SHORT).plain()[0].endswith("…")


def test_a_round_that_a_drafted_token_ends_has_no_token_of_the_targets_own(
    state: EngineStats,
) -> None:
    request = copy.copy(
        next(r for r in state.requests.values() if r.last_draft and r.last_draft.drafted)
    )
    row = request.last_draft
    assert row
    ended = tuple(Token(id, "x", "draft", 0.5, 0.5) for id in row.drafted)
    request.last_draft = dataclasses.replace(
        row, scheduled=len(row.drafted), accepted=len(row.drafted), tokens=ended
    )
    lines = draft_strip.draw(request, 120, draft_strip.FULL).plain()
    assert lines[0].endswith("kept") and "target's" not in "\n".join(lines)


@pytest.mark.parametrize("width", [0, 5, 20, 40])
def test_the_strip_survives_narrow_screens_and_odd_tokens(width: int, state: EngineStats) -> None:
    assert draft_strip.draw(None, width, 6).height == 6
    for request in state.requests.values():
        draft_strip.draw(request, width, 6)
    assert draft_strip.token_text(" a\n\x1b[31m\t") == "·a⏎⇥"
    assert draft_strip.token_text("") == "∅"
    assert cell_len(draft_strip.token_text("字" * 40)) <= 14


def test_what_runs_is_counted_now_and_not_as_of_the_last_round(state: EngineStats) -> None:
    live = copy.deepcopy(state)
    live.load = dataclasses.replace(live.load, active=2, queued=1)
    for request in live.active:
        live.apply(Finished(request.id, "cancelled"))
    assert not live.active
    assert "0 active 0 queued" in timelines.slowdown(live, 60, 6).plain()[0]
    assert "0 active, 0 queued" in gauges.requests_table(live, 120, 6).plain()[0]


def test_the_gain_stands_beside_the_mean_it_is_made_of() -> None:
    for requests in (1, 2, 3):
        live = EngineStats()
        for event in make(requests, 300):
            live.apply(event)
            if not live.samples:
                continue
            row = gauges.status_line(live, 160).plain()[0]
            title = timelines.speed(live, 160, 6).plain()[0]
            each = " a reply" if len(live.active) > 1 else ""
            found = re.search(rf"mean ([\d.]+){each}  ×([\d.]+) over ([\d.]+) plain", row)
            assert found, row
            mean, gain, plain = map(float, found.groups())
            assert mean / plain == pytest.approx(gain, abs=0.02)
            assert f"mean {mean} ×{gain:.2f}" in title


def test_long_request_ids_are_told_apart_by_their_ends() -> None:
    live = EngineStats()
    for id in ("recorded-1-cc7108866", "recorded-1-c656ef88e", "c12345678"):
        live.request(id)
    table = "\n".join(gauges.requests_table(live, 80, 6).plain())
    for end in ("…-cc7108866", "…-c656ef88e", "c12345678"):
        assert f"{end} " in table


def test_requests_are_named_by_their_conversation_and_id() -> None:
    live = EngineStats()
    live.request("c12345678").label = "Explain hash maps to me"
    live.request("c87654321").label = "你好，世界。" * 9
    for width, name in ((80, "Explain"), (200, "Explain hash maps to me c12345678")):
        table = gauges.requests_table(live, width, 6)
        shown = "\n".join(table.plain())
        assert name in shown and "c12345678 " in shown and "c87654321 " in shown and "你" in shown
        for y in range(table.height):
            assert sum(cell_len(text) for text, _ in table.row(y)) == width
