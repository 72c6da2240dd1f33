"""Batches: every row gives what its prompt alone would give, whoever comes and goes beside it."""

from __future__ import annotations

from typing import Any

import pytest
from decoding import (
    Ran,
    ScriptProposer,
    Whims,
    dspark,
    make_engine,
    plain_text,
    request,
    run,
    run_one,
    toy_target,
    upto_eos,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import MODELS, prompt

from dspark_mlx.draft.lookup import LookupProposer
from dspark_mlx.errors import UsageError
from dspark_mlx.events import Finished, StepDone
from dspark_mlx.model import cache
from dspark_mlx.request import Cuts, Method, Request

LENGTHS = (3, 30, 17, 1, 55, 12)


def texts(kind: str, count: int = 32) -> list[list[int]]:
    """Six prompts, very ragged, with the target's own greedy text behind each."""
    return [
        [*prompt(n, i), *plain_text(kind, tuple(prompt(n, i)), count)]
        for i, n in enumerate(LENGTHS)
    ]


def proposers(kind: str, block: int = 5) -> list[Any]:
    """All three at once, so that one batch holds rows of each and of none."""
    target = toy_target(kind)
    return [dspark(target, block=block, lessons=texts(kind)), LookupProposer(block)]


def ask(i: int, count: int, method: Method = "auto", **options: Any) -> Request:
    return request(
        f"{i}-{count}-{method}", LENGTHS[i], i, max_tokens=count, method=method, **options
    )


def expect(kind: str, ran: dict[str, Ran]) -> None:
    for id, reply in ran.items():
        i, count, _ = id.split("-")
        own = plain_text(kind, tuple(prompt(LENGTHS[int(i)], int(i))), 32)[: int(count)]
        assert reply.tokens == upto_eos(own), id


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_ragged_rows_together_equal_each_alone(kind: str, rows: int) -> None:
    engine = make_engine(toy_target(kind), proposers(kind), max_rows=rows)
    methods: list[Method] = ["dspark", "lookup", "none", "dspark", "lookup", "dspark"]
    asked = [ask(i, 32 - 4 * i, methods[i]) for i in range(6)]
    widest = 0

    def watch(engine: Any, events: Any) -> None:
        nonlocal widest
        widest = max(widest, len(engine.batch))

    expect(kind, run(engine, *asked, each=watch))
    assert widest == rows


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_rows_that_join_leave_and_are_cancelled_in_mid_flight(data: st.DataObject) -> None:
    draw = data.draw
    kind = draw(st.sampled_from(list(MODELS)))
    policy: Any = draw(st.sampled_from(["fixed", "off", "auto", "whims"]))
    engine = make_engine(
        toy_target(kind),
        proposers(kind, draw(st.integers(1, 7))),
        policy=Whims(draw(st.integers(0, 99))) if policy == "whims" else policy,
        max_rows=draw(st.integers(1, 4)),
        prefill_chunk=draw(st.sampled_from([1, 3, 16, 512])),
        reuse=draw(st.booleans()),
    )
    later: dict[int, list[Request | str]] = {}
    cancelled = set()
    for i in range(draw(st.integers(2, 6))):
        method = draw(st.sampled_from(["dspark", "lookup", "none"]))
        count, start = draw(st.integers(1, 32)), draw(st.integers(0, 20))
        one = ask(i, count, method)
        later.setdefault(start, []).append(one)
        if draw(st.integers(0, 3)) == 0:
            cancelled.add(one.id)
            later.setdefault(start + draw(st.integers(0, 12)), []).append(one.id)
    ran = run(engine, later=later)
    whole = {id: reply for id, reply in ran.items() if reply.reason != "cancelled"}
    assert set(ran) - set(whole) <= cancelled
    expect(kind, whole)
    for id in set(ran) - set(whole):
        i = int(id.split("-")[0])
        own = upto_eos(plain_text(kind, tuple(prompt(LENGTHS[i], i)), 32))
        assert ran[id].tokens == own[: len(ran[id].tokens)]


def test_small_window_buffers_with_ragged_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "GROWTH", 8)
    monkeypatch.setattr(cache, "SLACK", 8)
    for kind in ("llama-window", "gemma3"):
        engine = make_engine(toy_target(kind), proposers(kind), max_rows=4)
        later = {4: [ask(1, 32)], 9: [ask(4, 20)], 12: [ask(2, 32, "lookup")]}
        expect(kind, run(engine, ask(0, 32), ask(3, 32), later=later))


def test_a_row_alone_at_first_and_at_last() -> None:
    """From one row to several and back: the shapes change, the text does not."""
    kind = "qwen3"
    engine = make_engine(toy_target(kind), proposers(kind), max_rows=4)
    sizes = []

    def watch(engine: Any, events: Any) -> None:
        sizes.extend(len(e.rows) for e in events if isinstance(e, StepDone))

    expect(
        kind, run(engine, ask(1, 32, "none"), later={3: [ask(0, 4)], 5: [ask(2, 6)]}, each=watch)
    )
    assert sizes[0] == 1 == sizes[-1] and max(sizes) > 1


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_no_round_is_thrown_away_when_rows_come_and_go(kind: str) -> None:
    """A round dispatched early lands before a row joins, and goes on for those that stay."""
    engine = make_engine(toy_target(kind), proposers(kind), policy="off", max_rows=3)
    forwards = rounds = kept = 0
    forward = engine.batch.forward_tokens

    def count(*args: Any) -> Any:
        nonlocal forwards
        forwards += 1
        return forward(*args)

    engine.batch.forward_tokens = count  # type: ignore[method-assign]

    def watch(engine: Any, events: Any) -> None:
        nonlocal rounds, kept
        rounds += sum(isinstance(e, StepDone) for e in events)
        left = any(isinstance(e, Finished) for e in events)
        kept += left and engine._next is not None

    # One that stops in mid-flight where nobody could foresee it, one that is cancelled.
    own = engine.tokenizer.decode(plain_text(kind, tuple(prompt(LENGTHS[1], 1)), 10))
    stops = request("stops", LENGTHS[1], 1, max_tokens=32, method="none", stop=(own[-3:],))
    later = {2: [ask(2, 30, "none")], 7: [ask(2, 30, "none").id], 16: [ask(3, 16, "none")]}
    ran = run(engine, ask(0, 32, "none"), stops, later=later, each=watch)
    stopped = ran.pop("stops")
    assert stopped.reason == "stop" and stopped.text == own[: own.index(own[-3:])]
    assert ran.pop("2-30-none").reason == "cancelled"
    expect(kind, ran)
    assert forwards == rounds
    assert kept


@pytest.mark.parametrize("pipelined", [False, True])
def test_plain_rounds_are_dispatched_early_where_the_engine_is_pipelined(pipelined: bool) -> None:
    engine = make_engine(toy_target("llama"), policy="off", pipelined=pipelined)
    early = []
    expect("llama", run(engine, ask(0, 12), each=lambda e, _: early.append(e._next is not None)))
    assert any(early) == pipelined


def test_rows_that_could_draft_are_planned_for_most_rounds() -> None:
    """A quarter of the plain rounds so far, at most, go by without asking the policy."""
    engine = make_engine(toy_target("llama"), [ScriptProposer([], 4)], policy="off")
    asked = []
    plan = engine.policy.plan
    engine.policy.plan = lambda rows: asked.append(engine._reporter.steps) or plan(rows)  # type: ignore[method-assign]
    run(engine, request("a", max_tokens=60, ignore_eos=True))
    assert asked[:4] == [0, 1, 2, 3] and 8 < len(asked) < 30


@pytest.mark.parametrize("count", [1, 2, 31, 32])
def test_all_rows_end_in_the_same_round(count: int) -> None:
    engine = make_engine(toy_target("llama"), proposers("llama"), max_rows=4)
    expect("llama", run(engine, *(ask(i, count) for i in range(4))))
    assert not engine.active and engine.batch.rows is None


def test_prefill_of_one_does_not_stop_the_others() -> None:
    """A long prompt comes in small pieces while others decode."""
    engine = make_engine(toy_target("llama"), prefill_chunk=16, max_rows=2)
    rounds_between = []

    def watch(engine: Any, events: Any) -> None:
        if any(r.id.startswith("4") for r, _ in engine.prefiller.joining):
            rounds_between.append(sum(isinstance(e, StepDone) for e in events))

    ran = run(engine, ask(0, 32), later={3: [ask(4, 8)]}, each=watch)
    expect("llama", ran)
    assert len(rounds_between) >= 10 and all(rounds_between)


def test_requests_are_served_in_the_order_they_came() -> None:
    engine = make_engine(toy_target("llama"), max_rows=1)
    order = []

    def watch(engine: Any, events: Any) -> None:
        order.extend(e.request_id for e in events if hasattr(e, "generation_tokens"))

    asked = [request(str(i), seed=i, max_tokens=4) for i in range(5)]
    run(engine, *asked, each=watch)
    assert order == ["0", "1", "2", "3", "4"]


def test_an_id_cannot_be_active_twice_but_can_be_used_again() -> None:
    engine = make_engine(toy_target("llama"))
    engine.submit(request("same"))
    with pytest.raises(UsageError, match="already active"):
        engine.submit(request("same"))
    engine.step()
    with pytest.raises(UsageError, match="already active"):
        engine.submit(request("same"))
    while engine.active:
        engine.step()
    assert run_one(engine, request("same")).reason in ("stop", "length")
    assert not engine.cancel("same")


@pytest.mark.parametrize("when", ["queued", "prefill", "decoding", "ahead"])
def test_cancelling_at_any_moment(when: str) -> None:
    target = toy_target("llama")
    engine = make_engine(target, policy="off", max_rows=1, prefill_chunk=4)
    engine.submit(request("first", 12, 0, max_tokens=40, ignore_eos=True))
    steps = {"queued": 1, "prefill": 1, "decoding": 3, "ahead": 9}[when]
    if when == "queued":
        engine.submit(request("second", 12, 1))
    for _ in range(steps):
        engine.step()
    victim = "second" if when == "queued" else "first"
    if when == "prefill":
        assert engine.prefiller.joining
    if when == "ahead":
        assert engine._next is not None
    assert engine.cancel(victim)
    events = engine.step()
    ended = [e for e in events if getattr(e, "reason", None) == "cancelled"]
    assert [e.request_id for e in ended] == [victim]
    rest = (
        run(engine, request("third", 12, 2, max_tokens=12, ignore_eos=True))
        if (when != "queued")
        else {}
    )
    if rest:
        assert tuple(rest["third"].tokens) == plain_text("llama", tuple(prompt(12, 2)), 12)
    while engine.active:
        engine.step()
    assert engine.batch.rows is None and not engine.batch.sequences


def test_scripts_and_cuts_differ_by_row() -> None:
    kind = "gemma3"
    engine = make_engine(
        toy_target(kind), [ScriptProposer(texts(kind), 6, 0.2)], policy="threshold", max_rows=4
    )
    cuts = [Cuts(draft_length=0), Cuts(p_min=0.5), Cuts(draft_length=2), Cuts()]
    expect(kind, run(engine, *(ask(i, 24, cuts=cuts[i]) for i in range(4))))


def test_two_hundred_short_requests_leave_nothing_behind() -> None:
    """Lists, caches and tables are as empty afterwards as before."""
    engine = make_engine(toy_target("llama"), proposers("llama"), max_rows=4, reuse=False)
    methods: list[Method] = ["dspark", "lookup", "none"]
    later = {
        i: [request(f"r{i}", 2 + i % 7, i, max_tokens=1 + i % 5, method=methods[i % 3])]
        for i in range(200)
    }
    ran = run(engine, later=later)
    assert len(ran) == 200
    assert engine.kv_bytes == 0
    assert engine.batch.rows is None and not engine.batch.sequences
    assert not engine.prefiller.queue and not engine.prefiller.joining
    assert not engine.prefiller.prefixes._entries
    for proposer in engine.batch.proposers.values():
        assert len(proposer._rows) == 0
    assert not engine._events and engine._next is None
    engine.step()
    assert engine.logits_of("r199") is None


def test_kept_prefixes_are_bounded() -> None:
    engine = make_engine(toy_target("llama"), proposers("llama"), max_rows=4)
    for i in range(40):
        run(engine, request(f"r{i}", 4 + i, i, max_tokens=3))
        assert len(engine.prefiller.prefixes._entries) <= 8


def test_many_rows_reserve_no_more_than_the_limit() -> None:
    """Also when one is long and the others, padded to it, are short."""
    target = toy_target("llama")
    positions = 3000
    limit = int(target.kv_bytes_per_token * positions)
    engine = make_engine(target, kv_limit=limit, reuse=False, prefill_chunk=512)
    held = []

    def watch(engine: Any, events: Any) -> None:
        held.append((engine.kv_bytes, len(engine.batch)))

    asked = [request("long", 2000, 0, max_tokens=6, ignore_eos=True)] + [
        request(f"s{i}", 10, i, max_tokens=30, ignore_eos=True) for i in range(7)
    ]
    ran = run(engine, *asked, each=watch)
    assert all(reply.reason == "length" for reply in ran.values())
    slack = 8 * cache.GROWTH * target.kv_bytes_per_token  # buffers grow in whole steps
    assert max(bytes for bytes, _ in held) <= limit + slack
    assert max(rows for _, rows in held) == 7
