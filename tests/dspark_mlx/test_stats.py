"""The fold of events into statistics: counts, speeds, reliability, and bounded memory."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable

import pytest

from dspark_mlx.events import (
    Event,
    Failed,
    Finished,
    Load,
    Loaded,
    Memory,
    Prefill,
    Queued,
    RowStep,
    StepDone,
    Token,
)
from dspark_mlx.stats import FINISHED_REQUESTS, RECENT_ROUNDS, DraftCounts, EngineStats

LOADED = Loaded("toy", "toy-drafter", "dspark", "registered", "auto", 4, 4096, 10, 20.0)


def row(id: str, drafted: int = 3, scheduled: int = 2, accepted: int = 1) -> RowStep:
    """``drafted`` at confidences .9, .8, .7 and so on; the last token is the target's own."""
    tokens = tuple(
        Token(k, "x", "draft" if k < accepted else "target") for k in range(accepted + 1)
    )
    confidence = tuple(0.9 - 0.1 * k for k in range(drafted))
    texts = ("x",) * drafted
    return RowStep(id, 10, "dspark", tuple(range(drafted)), texts, confidence, confidence,
                   scheduled, accepted, tokens)  # fmt: skip


def step(rows: Iterable[RowStep], number: int = 1, time: float | None = None) -> StepDone:
    when = number * 0.05 if time is None else time
    return StepDone(
        number, when, tuple(rows), "auto", 0.05, 0.01, 0.035, 0.005, 0.048, 40.0, 40.0, 1,
        Load(1, 0, 1.1, 1.0), Memory(1000, 200, 1500),
    )  # fmt: skip


def played(*events: Event) -> EngineStats:
    stats = EngineStats()
    for event in events:
        stats.apply(event)
    return stats


def rounds(id: str, count: int = 20, after: float = 0.0) -> list[StepDone]:
    return [step([row(id)], n, after + n * 0.05) for n in range(1, count + 1)]


def test_counts_are_sums_over_the_rounds_of_each_request_and_of_all() -> None:
    draw = random.Random(0)
    made: dict[str, list[RowStep]] = {"a": [], "b": [], "c": []}
    events: list[Event] = []
    for number in range(200):
        rows = []
        for id in draw.sample(sorted(made), draw.randint(1, 3)):
            drafted = draw.randint(0, 7)
            scheduled = draw.randint(0, drafted)
            rows.append(row(id, drafted, scheduled, draw.randint(0, scheduled)))
            made[id].append(rows[-1])
        events.append(step(rows, number))
    stats = played(*events)
    for id, rows in [*made.items(), ("", [r for one in made.values() for r in one])]:
        counts = stats.requests[id].counts if id else stats.totals
        assert counts.rounds == len(rows) == sum(counts.cuts)
        assert counts.tokens == sum(len(r.tokens) for r in rows)
        assert counts.drafted == sum(len(r.drafted) for r in rows)
        assert counts.scheduled == sum(r.scheduled for r in rows) == sum(counts.reached)
        assert counts.accepted == sum(r.accepted for r in rows) == sum(counts.survived)
        for k in range(7):
            assert counts.reached[k] == sum(r.scheduled > k for r in rows)
            assert counts.survived[k] == sum(r.accepted > k for r in rows)
        shares = [share for share in counts.acceptance_by_position() if share is not None]
        assert all(0 <= share <= 1 for share in shares)


def test_nothing_counted_gives_no_ratio() -> None:
    counts = DraftCounts()
    assert counts.acceptance is None and counts.tokens_per_round is None
    assert counts.acceptance_by_position() == []
    assert EngineStats().speedup is None and EngineStats().time_shares() == (0.0, 0.0, 0.0)


def test_speed_is_tokens_over_the_time_of_the_rounds() -> None:
    stats = played(*rounds("a"))
    assert stats.tps_per_request == pytest.approx(40.0)
    assert stats.tps_now == pytest.approx(40.0)
    assert stats.requests["a"].tps_mean == pytest.approx(40.0)
    assert stats.recent_tokens_per_round == stats.totals.tokens_per_round == pytest.approx(2.0)
    assert stats.recent_acceptance == stats.totals.acceptance == pytest.approx(0.5)


def test_a_pause_between_replies_is_not_slowness() -> None:
    stats = played(*rounds("a"), *rounds("b", after=500))
    assert stats.tps_now == pytest.approx(40.0)
    assert stats.tps_per_request == pytest.approx(40.0)


def test_the_plain_speed_is_the_measured_one_until_plain_rounds_were_seen() -> None:
    stats = played(LOADED)
    assert stats.plain_tps == 20.0
    for n in range(1, 7):
        plain = step([row("a", 0, 0, 0)], n)
        stats.apply(dataclasses.replace(plain, round_seconds=0.04))
    assert stats.plain_tps == pytest.approx(25.0)
    assert stats.speedup is not None


def test_reliability_counts_only_positions_that_were_tested() -> None:
    # Three drafted at .9 .8 .7, two verified, one accepted: the first passed, the second failed.
    stats = played(step([row("a")]))
    assert stats.last_draft is not None and stats.last_draft.scheduled == 2
    assert [(b.count, b.accepted) for b in stats.reliability if b.count] == [(1, 0), (1, 1)]
    assert stats.totals.cuts == [0, 0, 1]
    assert stats.totals.acceptance_by_position() == [1.0, 0.0]
    assert stats.calibration_error() == pytest.approx((0.1 + 0.8) / 2)


def test_time_shares_sum_to_one() -> None:
    assert sum(played(*rounds("a")).time_shares()) == pytest.approx(1.0)


def test_a_prompt_shows_its_progress_before_the_first_token() -> None:
    request = played(Queued("a", 2), Prefill("a", 5, 20, 3)).requests["a"]
    assert (request.ahead, request.phase, request.context) == (2, "prefill", 5)
    assert request.tps_mean is None and request.counts.acceptance is None


def test_another_model_starts_from_clean_figures() -> None:
    stats = played(LOADED, *rounds("a"), Finished("a", "stop"))
    stats.apply(dataclasses.replace(LOADED, plain_tps=30.0))
    assert stats.samples, "the same model again keeps its figures"
    stats.apply(dataclasses.replace(LOADED, model="other"))
    assert not stats.samples and not stats.totals.cuts and stats.recent_acceptance is None


def test_a_failed_load_is_shown_until_the_model_from_before_works_again() -> None:
    stats = played(LOADED, Failed("no network"))
    assert stats.failure is not None
    stats.apply(step([row("a")]))
    assert stats.failure is None


def test_memory_is_bounded_however_long_the_run() -> None:
    stats = EngineStats()
    for n in range(1, 3000):
        stats.apply(step([row(f"r{n // 4}")], n))
        if n % 4 == 3:
            stats.apply(Finished(f"r{n // 4}", "stop"))
    assert len(stats.samples) == RECENT_ROUNDS
    assert len(stats.requests) <= FINISHED_REQUESTS + 2


def test_a_round_of_several_requests_counts_each() -> None:
    stats = played(step([row("a"), row("b", accepted=0)]))
    assert len(stats.active) == 2
    assert stats.samples[-1].rows == 2 and stats.samples[-1].tokens == 3
    assert stats.totals.rounds == 2
