"""Pipelined rounds are priced together."""

from __future__ import annotations

import pytest
from decoding import make_engine, request, run, toy_target

from dspark_mlx.engine.clock import PipelinedTime
from dspark_mlx.schedule.policy import Outcome


def told(taken: list[float]) -> list[float]:
    """What is learned from a plain stretch of rounds that took ``taken``."""
    pipelined, last = PipelinedTime(), len(taken) - 1
    return [
        pipelined.of_round(t, dispatched_early=n > 0, next_dispatched=n < last)
        for n, t in enumerate(taken)
    ]


def test_a_full_queue_makes_the_first_wait_for_the_second_and_the_last_for_nothing() -> None:
    assert told([95.0, 50.0, 49.0, 51.0, 9.0]) == [0.0, 50.0, 49.0, 51.0, 52.0]
    assert told([95.0, 9.0]) == [0.0, 52.0]


def test_without_that_wait_it_is_the_same() -> None:
    assert told([55.0, 50.0, 51.0]) == [0.0, 50.0, 53.0]
    assert told([57.0]) == [57.0]


def test_a_round_that_was_dispatched_and_dropped_is_forgotten() -> None:
    def seconds(taken: float, early: bool, following: bool) -> float:
        return pipelined.of_round(taken, dispatched_early=early, next_dispatched=following)

    pipelined = PipelinedTime()
    assert seconds(95.0, False, True) == 0.0  # a row joins now
    assert seconds(60.0, False, False) == 60.0
    assert seconds(70.0, False, True) == 0.0
    assert seconds(50.0, True, False) == pytest.approx(60.0)


def test_a_policy_is_told_no_price_for_the_round_that_began_the_next() -> None:
    engine = make_engine(toy_target("llama"), [], policy="off")
    outcomes: list[Outcome] = []
    engine.policy.observe = outcomes.append  # type: ignore[method-assign]
    run(engine, request("a", 5, 0, max_tokens=12, ignore_eos=True))
    seconds = [outcome.round_seconds for outcome in outcomes]
    assert len(seconds) > 3 and seconds[0] == 0.0 and all(s > 0.0 for s in seconds[1:])
