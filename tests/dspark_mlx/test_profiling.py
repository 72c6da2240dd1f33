"""A profile prices what the engine does, is kept for exactly what it was measured on, and heals."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from decoding import ScriptProposer, dspark, make_engine, plain_text, toy_target
from hypothesis import given
from hypothesis import strategies as st

from dspark_mlx import profiling
from dspark_mlx.draft.lookup import LookupProposer
from dspark_mlx.errors import ModelError, UsageError
from dspark_mlx.events import Loading, Notice
from dspark_mlx.profiling import (
    cost_key,
    load_or_profile,
    profile_engine,
    profile_path,
    profiler,
    step_timer,
)
from dspark_mlx.profiling.prices import SHALLOW, StepKind, extra_seconds, grid, prices, typical
from dspark_mlx.profiling.profile_store import read_profile
from dspark_mlx.profiling.profiler import HOST_ROUNDS, Profiler
from dspark_mlx.profiling.step_timer import StepTimer, blank_rows
from dspark_mlx.request import Request
from dspark_mlx.schedule import make_policy
from dspark_mlx.schedule.cost import CostModel
from dspark_mlx.sources import Cancelled

SECONDS = st.floats(1e-4, 10.0)


def engine(kind: str = "llama", max_rows: int = 2, **options):
    target = toy_target(kind)
    return make_engine(target, [dspark(target), LookupProposer(4)], max_rows=max_rows, **options)


# -- the grid -------------------------------------------------------------------------------


@given(
    rows=st.integers(1, 12),
    blocks=st.dictionaries(st.sampled_from(["dspark", "lookup"]), st.integers(1, 16)),
)
def test_the_grid_names_each_shape_once_and_begins_with_the_corners(rows, blocks) -> None:
    levels = grid(rows, blocks)
    shapes = [shape for level in levels for shape in level]
    assert len(shapes) == len(set(shapes))
    assert all(1 <= s.rows <= rows for s in shapes)
    widest = max(blocks.values(), default=0) + 1
    steps = {(s.rows, s.size) for s in levels[0] if not s.method}
    assert steps == {(r, w) for r in (1, rows) for w in (1, widest)}
    one_row = {s.size for level in levels for s in level if s.rows == 1 and not s.method}
    assert one_row == set(range(1, widest + 1))
    for method, block in blocks.items():
        assert {s.size for s in shapes if s.method == method} == set(range(1, block + 1))


def test_a_long_context_is_measured_for_all_rows_or_not_at_all() -> None:
    for level in grid(8, {"dspark": 7}):
        deep = {s.rows for s in level if s.context != SHALLOW}
        assert deep in (set(), {1, 8})


# -- prices ---------------------------------------------------------------------------------


def test_a_hiccup_does_not_change_what_is_typical() -> None:
    assert typical([1.0, 1.1, 9.0, 1.05, 1.0]) == typical([1.0, 1.1, 1.2, 1.05, 1.0]) == 1.0


def test_passes_on_a_slower_machine_do_not_bend_the_prices() -> None:
    """Kinds are compared within a pass; one that was added later has only the last passes."""
    speeds, wanted = [1.0, 1.5, 0.9, 1.3, 1.1], {1: 1.0, 2: 1.1, 3: 1.4, 4: 1.3}
    samples = {
        StepKind(SHALLOW, 1, "", n): [price * s for s in speeds[n == 3 and 2 :]]
        for n, price in wanted.items()
    }
    samples[StepKind(SHALLOW, 1, "", 2)][3] *= 1.6  # a hiccup
    found = {kind.size: seconds for kind, seconds in prices(samples).items()}
    assert found == pytest.approx(wanted, rel=1e-6)  # as fast as in the faster passes: 1.0
    alone = {StepKind(SHALLOW, 1, "", 1): [1.0, 1.1, 9.0, 1.05, 1.0]}
    assert prices(alone) == {StepKind(SHALLOW, 1, "", 1): pytest.approx(1.0)}
    assert prices({}) == {}


@given(
    st.lists(
        st.lists(SECONDS, min_size=1, max_size=9),
        min_size=1,
        max_size=5,
    )
)
def test_a_price_lies_within_what_speeds_and_samples_allow(measured) -> None:
    samples = {StepKind(SHALLOW, 1, "", n): xs for n, xs in enumerate(measured, start=1)}
    assert all(seconds > 0.0 for seconds in prices(samples).values())


def test_neighbouring_rounds_tell_what_one_kind_takes_longer() -> None:
    """What disturbs single rounds, and a machine that slows down, do not enter it."""
    rounds = []
    for n in range(32):
        marked = (n + 1) // 2 % 2 == 1
        seconds = 0.1 + 0.0002 * n + 0.002 * marked + 0.03 * (n % 8 == 3) + 0.5 * (n == 11)
        rounds.append((marked, seconds))
    assert extra_seconds(rounds) == pytest.approx(0.002, abs=0.0003)
    assert extra_seconds([(not marked, seconds) for marked, seconds in rounds]) == 0.0
    assert extra_seconds([]) == extra_seconds([(True, 1.0), (True, 2.0)]) == 0.0


@pytest.mark.parametrize("limit", [12, 40, 150, 400])
def test_a_short_context_can_be_profiled(limit: int) -> None:
    cost = profile_engine(engine(context_limit=limit), 0.2)
    assert cost.known and cost.overhead > 0.0
    assert set(cost.step) <= {limit // 2, SHALLOW}


def test_plain_rounds_are_timed_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = engine(max_rows=1)
    one = Profiler(subject, float("inf"), lambda event: None, None)
    one._first = {StepKind(SHALLOW, 1, "", 1): 10.0}  # far more than a toy's round takes
    monkeypatch.setattr(profiler, "on_cpu", lambda: True)
    assert one._overlap(0.0) == 0.0
    monkeypatch.setattr(profiler, "on_cpu", lambda: False)
    assert 5.0 < one._overlap(0.0) < 10.0
    one._first = {StepKind(SHALLOW, 1, "", 1): 1e-9}
    assert one._overlap(0.0) == 0.0


def test_the_rounds_that_price_the_host_are_whole_ones() -> None:
    """Not those at the end of a reply, which verify less, whatever was accepted."""
    target = toy_target()
    text = tuple(1 + k % 4 for k in range(16))
    follows = [*text, *plain_text("llama", text, 60)]
    for proposers in ([dspark(target)], [ScriptProposer([follows], 4)]):
        subject = make_engine(target, proposers, max_rows=1)
        one = Profiler(subject, 1.0, lambda event: None, None)
        rounds = [
            row.scheduled
            for done in one._rounds(make_policy("fixed"), HOST_ROUNDS)
            for row in done.rows
        ]
        assert len(rounds) == HOST_ROUNDS and set(rounds) == {proposers[0].spec.block}, rounds


def test_half_of_the_rounds_that_price_reading_confidences_read_them() -> None:
    target = toy_target()
    one = Profiler(make_engine(target, [dspark(target)], max_rows=1), 1.0, lambda event: None, None)
    rounds = list(one._rounds(profiler._ReadHalf(), 8))
    first = [False, True, True, False]
    assert [done.draft_seconds > 0.0 for done in rounds] == [*first, *(not x for x in first)]


# -- single steps -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "llama-window", "gemma3"])
@pytest.mark.parametrize("context", [5, 700])
def test_blank_rows_stand_where_prefilled_rows_would(kind: str, context: int) -> None:
    target = toy_target(kind)
    rows = blank_rows(target, 3, context)
    for width in (1, 4):
        logits, _ = target.forward(mx.ones((3, width), dtype=mx.int32), rows)
        mx.eval(logits)
        assert logits.shape[:2] == (3, width)
        rows.trim_to([context] * 3)
    assert rows.lengths == [context] * 3
    assert all(layer.lengths == [context] * 3 for layer in rows.layers)


def test_timing_steps_leaves_caches_and_proposers_as_it_found_them() -> None:
    target = toy_target()
    proposers = [dspark(target), ScriptProposer([[1, 2, 3]], 4), LookupProposer(4)]
    here = StepTimer(target, proposers, 2, 40)
    for width in (4, 1, 3):
        assert here.step(width) > 0.0
        assert here.draft(proposers[0], min(width, proposers[0].spec.block)) > 0.0
    assert here._cache.lengths == [40, 40]
    here.close()
    assert len(proposers[0]._rows) == 0 and proposers[1]._rows == []


def test_waiting_for_a_turn_is_no_price_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, process = iter([0.0, 3.0, 10.0, 13.0]), iter([0.0, 1.0, 10.0, 11.0])
    clocks = SimpleNamespace(perf_counter=lambda: next(wall), process_time=lambda: next(process))
    monkeypatch.setattr(step_timer, "time", clocks)
    monkeypatch.setattr(step_timer, "on_cpu", lambda: True)
    assert step_timer._Stopwatch().seconds() == 1.0
    monkeypatch.setattr(step_timer, "on_cpu", lambda: False)
    assert step_timer._Stopwatch().seconds() == 3.0


# -- measuring ------------------------------------------------------------------------------


def test_a_profile_prices_every_method_and_leaves_the_engine_as_it_was() -> None:
    subject = engine()
    told: list[Loading | Notice] = []
    cost = profile_engine(subject, 0.5, told.append)
    assert cost.known and set(cost.draft) == {"dspark", "lookup"}
    assert all(set(table) >= {1, 2} for table in list(cost.step.values())[:1])
    assert cost.overhead > 0.0 and cost.sync_overhead >= 0.0
    assert cost.overlap >= 0.0
    assert 0.0 < cost.plain(1) <= cost.seconds(1, 1) + cost.overhead
    progress = [event for event in told if isinstance(event, Loading)]
    assert {event.stage for event in progress} == {"profile"}
    done = [event.done for event in progress]
    assert done == sorted(set(done)) and done[-1] == progress[-1].total == 100
    assert not subject.active and subject.kv_bytes == 0
    prompt = tuple(range(2, 20))
    subject.submit(Request("after", tokens=prompt, max_tokens=6, ignore_eos=True))
    written = []
    while subject.active:
        for event in subject.step():
            written += [t.id for row in getattr(event, "rows", ()) for t in row.tokens]
    fresh = make_engine(toy_target(), [])
    fresh.submit(Request("plain", tokens=prompt, max_tokens=6, ignore_eos=True))
    plain = []
    while fresh.active:
        for event in fresh.step():
            plain += [t.id for row in getattr(event, "rows", ()) for t in row.tokens]
    assert written == plain


def test_an_engine_at_work_is_not_profiled() -> None:
    subject = engine()
    subject.submit(Request("r", tokens=(2, 3), max_tokens=4))
    with pytest.raises(UsageError, match="idle"):
        profile_engine(subject, 0.1)


def test_a_model_that_cannot_speculate_has_nothing_to_measure(tmp_path: Path) -> None:
    subject = make_engine(toy_target(), [])
    subject.target = without_rollback(subject.target)
    with pytest.raises(ModelError, match="ArraysCache"):
        profile_engine(subject, 0.1)
    assert not load_or_profile(subject, "toy", cache_dir=tmp_path).known


def without_rollback(target):
    class Refusing:
        rollback = "none"
        no_rollback_reason = "the model's cache (ArraysCache) cannot be rolled back"

    return Refusing()


def test_a_cancelled_profile_stops_and_stores_nothing(tmp_path: Path) -> None:
    stop = threading.Event()

    def report(event: Loading | Notice) -> None:
        stop.set()

    subject = engine()
    with pytest.raises(Cancelled):
        load_or_profile(
            subject, "toy", budget_seconds=5.0, report=report, cancel=stop, cache_dir=tmp_path
        )
    assert list(tmp_path.rglob("*.json")) == []
    assert not subject.active


# -- keeping --------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Profiling replaced by a constant table; holds a budget for each time it was asked for."""
    asked: list[float | None] = []

    def profile(subject, budget, report=None, *, key=None, cancel=None):
        asked.append(budget)
        table = {r: {1: 0.1, 5: 0.2} for r in range(1, subject.max_rows + 1)}
        deep = {1: {1: 0.2}}
        return CostModel(
            {128: table, 1024: deep}, {"dspark": {1: {5: 0.01}}}, overhead=0.001, key=key
        )

    monkeypatch.setattr(profiling, "profile_engine", profile)
    return asked


def test_a_profile_is_measured_once(tmp_path: Path, measured: list) -> None:
    first = load_or_profile(engine(), "toy", "drafter", cache_dir=tmp_path)
    second = load_or_profile(engine(), "toy", "drafter", cache_dir=tmp_path)
    assert len(measured) == 1
    assert second.to_json() == first.to_json()
    load_or_profile(engine(), "toy", "drafter", cache_dir=tmp_path, again=True)
    assert len(measured) == 2


@pytest.mark.parametrize("field", ["model", "quantisation", "device", "mlx"])
def test_a_changed_key_measures_again(
    tmp_path: Path, measured: list, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    load_or_profile(engine(), "toy", cache_dir=tmp_path)
    key = replace(cost_key(engine(), "toy"), **{field: "another"})
    monkeypatch.setattr(profiling, "cost_key", lambda *_: key)
    load_or_profile(engine(), "toy", cache_dir=tmp_path)
    assert len(measured) == 2
    assert len(list(tmp_path.rglob("*.json"))) == 2


def test_the_key_tells_models_drafters_precisions_and_blocks_apart() -> None:
    target = toy_target()
    keys = [
        cost_key(engine(), "toy"),
        cost_key(engine(), "toy", "drafter"),
        cost_key(engine(), "other"),
        cost_key(make_engine(target, [LookupProposer(4)]), "toy"),
        cost_key(make_engine(target, [LookupProposer(6)]), "toy"),
        cost_key(make_engine(toy_target(dtype="bfloat16"), [LookupProposer(6)]), "toy"),
        cost_key(make_engine(toy_target(kv_bits=8), [LookupProposer(6)]), "toy"),
    ]
    assert len(set(keys)) == len(keys)
    assert len({profile_path(key) for key in keys}) == len(keys)


def test_more_rows_than_were_measured_measure_again(tmp_path: Path, measured: list) -> None:
    load_or_profile(engine(max_rows=4), "toy", cache_dir=tmp_path)
    load_or_profile(engine(max_rows=2), "toy", cache_dir=tmp_path)
    assert len(measured) == 1
    load_or_profile(engine(max_rows=8), "toy", cache_dir=tmp_path)
    assert len(measured) == 2


@pytest.mark.parametrize("damage", ["", "{", '{"step": {}}', "[1, 2]", '{"step": {"0": 5}}'])
def test_a_damaged_profile_is_measured_again(tmp_path: Path, measured: list, damage: str) -> None:
    load_or_profile(engine(), "toy", cache_dir=tmp_path)
    path = profile_path(cost_key(engine(), "toy"), tmp_path)
    path.write_text(damage)
    assert load_or_profile(engine(), "toy", cache_dir=tmp_path).known
    assert len(measured) == 2
    assert json.loads(path.read_text())["step"]


def test_a_profile_that_cannot_be_stored_is_used_all_the_same(
    tmp_path: Path, measured: list
) -> None:
    (tmp_path / "profiles").write_text("a file where the folder should be")
    told: list[Loading | Notice] = []
    cost = load_or_profile(engine(), "toy", report=told.append, cache_dir=tmp_path)
    assert cost.known
    assert any(
        isinstance(event, Notice) and "could not be stored" in event.message for event in told
    )


def test_a_profile_survives_the_disk(tmp_path: Path) -> None:
    subject = engine()
    cost = load_or_profile(subject, "toy", budget_seconds=0.2, cache_dir=tmp_path)
    key = cost_key(subject, "toy")
    back = read_profile(profile_path(key, tmp_path), key)
    assert back is not None and back.to_json() == cost.to_json() and back.key == key
    assert read_profile(profile_path(key, tmp_path), replace(key, mlx="0")) is None
