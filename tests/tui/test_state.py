from __future__ import annotations

import dataclasses

import pytest
from make_trace import make
from scripted import LOADED, finished, step

from dspark_mlx.events import Finished, Prefill, Queued, StepDone
from dspark_mlx.request import Status
from tui.state import SAMPLES, LiveState


def played(events: list) -> LiveState:
    state = LiveState()
    for event in events:
        state.apply(event)
    return state


def test_counts_agree_with_what_the_engine_says_at_the_end() -> None:
    events = list(make(3, 200))
    state = played(events)
    for end in (e for e in events if isinstance(e, Finished)):
        request = state.requests[end.request_id]
        assert request.tokens == end.generation_tokens
        assert (request.rounds, request.scheduled) == (end.rounds, end.scheduled)
        assert request.accepted == end.accepted
        padded = request.reached + [0] * (len(end.reached) - len(request.reached))
        assert tuple(padded) == end.reached
        assert request.status is Status.FINISHED


def test_speed_is_tokens_over_the_time_of_the_rounds() -> None:
    state = played([step("a", ["x", "y"], n) for n in range(1, 21)])
    assert state.tps_reply == pytest.approx(40.0)
    assert state.tps_now == pytest.approx(40.0)
    assert state.requests["a"].tps_mean == pytest.approx(40.0)
    assert state.per_round == pytest.approx(2.0)


def test_a_pause_between_replies_is_not_slowness() -> None:
    first = [step("a", ["x", "y"], n) for n in range(1, 21)]
    later = [step("b", ["x", "y"], n, time=500 + n * 0.05) for n in range(1, 21)]
    state = played(first + later)
    assert state.tps_now == pytest.approx(40.0)
    assert state.tps_reply == pytest.approx(40.0)


def test_the_baseline_is_the_profiled_one_until_plain_rounds_were_seen() -> None:
    state = played([LOADED])
    assert state.baseline == 20.0
    plain = step("a", ["x"], 1, drafted=0)
    row = dataclasses.replace(plain.rows[0], drafted=(), draft_texts=(), scheduled=0)
    for n in range(1, 7):
        state.apply(dataclasses.replace(plain, rows=(row,), time=n * 0.05, round_seconds=0.04))
    assert state.baseline == pytest.approx(25.0)
    assert state.speedup is not None


def test_reliability_counts_only_positions_that_were_put_to_the_test() -> None:
    # Three drafted at .9 .8 .7, two verified, one kept: the first passed, the second failed.
    state = played([step("a", ["x", "y"], 1)])
    assert state.last_row is not None and state.last_row.scheduled == 2
    assert [(b.count, b.kept) for b in state.reliability if b.count] == [(1, 0), (1, 1)]
    assert state.reached == [1, 1] and state.survived == [1, 0]
    assert state.cuts == [0, 0, 1]
    assert state.by_position() == [1.0, 0.0]


def test_shares_sum_to_one_and_bins_give_the_calibration_error() -> None:
    state = played(list(make(2, 200)))
    assert sum(state.shares()) == pytest.approx(1.0)
    error = state.calibration_error()
    assert error is not None and 0 <= error < 0.2


def test_a_prompt_shows_its_progress_before_the_first_token() -> None:
    state = played([Queued("a", 2), Prefill("a", 5, 20, 3)])
    request = state.requests["a"]
    assert (request.ahead, request.status, request.context) == (2, Status.PREFILL, 5)
    assert request.tps_mean is None and request.acceptance is None


def test_another_model_starts_from_clean_figures() -> None:
    state = played([LOADED, *(step("a", ["x", "y"], n) for n in range(1, 5)), finished("a")])
    state.apply(dataclasses.replace(LOADED, plain_tps=30.0))
    assert state.samples, "the same model again keeps its figures"
    state.apply(dataclasses.replace(LOADED, model="other"))
    assert not state.samples and not state.cuts and state.acceptance is None


def test_memory_is_bounded_however_long_the_chat_runs() -> None:
    state = LiveState()
    for n in range(1, 3000):
        state.apply(step(f"r{n // 4}", ["x", "y"], n))
        if n % 4 == 3:
            state.apply(finished(f"r{n // 4}"))
    assert len(state.samples) == SAMPLES
    assert len(state.requests) < 70


def test_one_round_for_several_rows_counts_each_row() -> None:
    one, two = step("a", ["x", "y"], 1), step("b", ["z"], 1)
    both: StepDone = dataclasses.replace(one, rows=one.rows + two.rows)
    state = played([both])
    assert len(state.active) == 2
    assert state.samples[-1].rows == 2 and state.samples[-1].tokens == 3
