"""Prefix reuse: a warm turn gives the text of a cold one, and prefills only what is new."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import pytest
from decoding import (
    Ran,
    ScriptProposer,
    dspark,
    make_engine,
    plain_text,
    request,
    run,
    run_one,
    toy_drafter,
    toy_target,
)
from toys import MODELS, prompt

from dspark_mlx.draft.dspark.network import Drafter
from dspark_mlx.draft.dspark.proposer import DSparkProposer
from dspark_mlx.draft.lookup import LookupProposer
from dspark_mlx.engine.engine import Engine
from dspark_mlx.engine.prefix_cache import Prefix, PrefixCache
from dspark_mlx.model import cache
from dspark_mlx.request import Method, Request, SamplingParams

METHODS: tuple[Method, ...] = ("none", "lookup", "dspark")


@functools.cache
def drafter_for(kind: str) -> Drafter:
    lesson = [*prompt(20), *plain_text(kind, tuple(prompt(20)), 40)]
    return toy_drafter(toy_target(kind), block=4, lessons=[lesson])


def engine_for(kind: str = "llama", bits: int | None = None, **options: Any) -> Engine:
    target = toy_target(kind, kv_bits=bits)
    proposers = [DSparkProposer(drafter_for(kind), target.vocab_size), LookupProposer(4)]
    return make_engine(target, proposers, **options)


def turn(
    engine: Engine, tokens: list[int], method: Method = "dspark", id: str = "a", **options: Any
) -> Ran:
    options.setdefault("max_tokens", 12)
    options.setdefault("ignore_eos", True)
    return run_one(engine, Request(id, tokens=tuple(tokens), method=method, **options))


def prefilled(ran: Ran) -> int:
    assert ran.finished is not None
    return ran.prefills[-1].done - ran.finished.reused_tokens


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("kind", "bits", "temperature"),
    [*((k, None, 0.0) for k in MODELS), ("llama", 8, 0.0), ("gemma3", None, 0.9)],
    ids=str,
)
def test_a_warm_turn_equals_a_cold_one(
    kind: str, bits: int | None, temperature: float, method: Method
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=4)
    warm = engine_for(kind, bits)
    chat, before = prompt(20), 1
    for number in range(1, 4):
        ran = turn(warm, chat, method, sampling=sampling)
        cold = turn(engine_for(kind, bits, reuse=False), chat, method, sampling=sampling)
        assert ran.tokens == cold.tokens
        assert ran.finished is not None and cold.finished is not None
        assert cold.finished.reused_tokens == 0
        # everything but the last token of the reply before, which was not in the cache yet
        expected = before - 1
        assert ran.finished.reused_tokens == expected
        assert prefilled(ran) == len(chat) - 1 - expected
        chat = chat + ran.tokens
        before = len(chat)
        chat = chat + prompt(5, number)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_regenerating_and_editing_branch_off_correctly(kind: str, method: Method) -> None:
    engine = engine_for(kind)
    first = turn(engine, prompt(40), method)
    again = turn(engine, prompt(40), method)
    assert again.tokens == first.tokens
    assert again.finished is not None and again.finished.reused_tokens == 39
    edited = [*prompt(40)[:30], *prompt(9, 5)]
    branch = turn(engine, edited, method)
    assert branch.tokens == turn(engine_for(kind, reuse=False), edited, method).tokens
    assert branch.finished is not None and branch.finished.reused_tokens == 30
    shorter = prompt(40)[:25]
    cut = turn(engine, shorter, method)
    assert cut.tokens == turn(engine_for(kind, reuse=False), shorter, method).tokens
    assert cut.finished is not None and cut.finished.reused_tokens == 24


@pytest.mark.parametrize("then", METHODS)
@pytest.mark.parametrize("first", METHODS)
def test_the_method_may_change_between_turns(first: Method, then: Method) -> None:
    engine = engine_for()
    chat = prompt(20)
    chat = [*chat, *turn(engine, chat, first).tokens, *prompt(3, 8)]
    second = turn(engine, chat, then)
    assert second.tokens == turn(engine_for(reuse=False), chat, then).tokens
    chat = [*chat, *second.tokens, *prompt(3, 9)]
    third = turn(engine, chat, first)
    assert third.tokens == turn(engine_for(reuse=False), chat, first).tokens
    assert second.finished is not None
    # A drafter's context must have no hole: what it has not seen is prefilled again.
    hole = then == "dspark" != first
    assert second.finished.reused_tokens == (0 if hole else 31)


@pytest.mark.parametrize("shared", [0, 60])
@pytest.mark.parametrize("method", METHODS)
def test_two_conversations_side_by_side_keep_their_own_state(method: Method, shared: int) -> None:
    """Also behind one long system prompt, which neither takes away from the other."""
    engine = engine_for()
    system = prompt(shared, 99)
    chats = {id: [*system, *prompt(20 + 5 * i, i)] for i, id in enumerate("xy")}
    for number in range(2):
        for id in "xy":
            ran = turn(engine, chats[id], method, id)
            cold = turn(engine_for(reuse=False), chats[id], method, id)
            assert ran.tokens == cold.tokens
            assert ran.finished is not None
            if number:
                # all of its own last turn but the last token; the five new ones are prefilled
                assert prefilled(ran) == 5
            elif id == "y":
                assert ran.finished.reused_tokens == shared
            chats[id] = [*chats[id], *ran.tokens, *prompt(5, number)]


def test_two_conversations_at_the_same_time() -> None:
    engine = engine_for(max_rows=2)
    chats = {id: prompt(20 + 9 * i, i) for i, id in enumerate("xy")}
    for number in range(3):
        asked = [
            request(id, tokens=tuple(chats[id]), max_tokens=8 + 5 * i, ignore_eos=True)
            for i, id in enumerate("xy")
        ]
        for id, ran in run(engine, *asked).items():
            own = plain_text("llama", tuple(chats[id]), len(ran.tokens))
            assert tuple(ran.tokens) == own
            assert not number or prefilled(ran) == 5
            chats[id] = [*chats[id], *ran.tokens, *prompt(5, number)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("step", [1, 2, 4, 7])
def test_a_cancelled_reply_leaves_what_can_be_built_on(method: Method, step: int) -> None:
    engine = engine_for(prefill_chunk=8, policy="fixed")
    asked = Request("a", tokens=tuple(prompt(20)), max_tokens=60, ignore_eos=True, method=method)
    ran = run(engine, asked, later={step: ["a"]})["a"]
    assert ran.reason == "cancelled"
    chat = [*prompt(20), *ran.tokens, *prompt(4, 6)]
    after = turn(engine, chat, method)
    assert after.tokens == turn(engine_for(reuse=False), chat, method).tokens
    assert after.finished is not None
    assert after.finished.reused_tokens == min(8 * step, 19 + len(ran.tokens))


def test_a_failed_reply_leaves_what_can_be_built_on() -> None:
    def fails(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.shape[0] >= 25:
            raise RuntimeError("no more")
        return logits

    for method in METHODS:
        engine = engine_for()
        ran = turn(engine, prompt(20), method, logits_processors=(fails,))
        assert ran.reason == "error" and len(ran.tokens) == 5
        chat = [*prompt(20), *ran.tokens, 7]
        after = turn(engine, chat, method)
        assert after.tokens == turn(engine_for(reuse=False), chat, method).tokens
        assert after.finished is not None and after.finished.reused_tokens == 24


def test_windows_that_went_too_far_are_prefilled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that a sliding window dropped cannot come back; a warm turn knows."""
    monkeypatch.setattr(cache, "GROWTH", 8)
    monkeypatch.setattr(cache, "SLACK", 8)
    for kind in ("llama-window", "gemma3"):
        engine = engine_for(kind)
        chat = prompt(20)
        reply = turn(engine, chat, "dspark", max_tokens=60).tokens
        again = turn(engine, chat, "dspark", max_tokens=60)
        assert again.tokens == reply
        assert again.finished is not None and again.finished.reused_tokens == 0
        going_on = [*chat, *reply, 5, 6]
        on = turn(engine, going_on, "dspark")
        assert on.tokens == turn(engine_for(kind, reuse=False), going_on, "dspark").tokens
        assert on.finished is not None and on.finished.reused_tokens == 79


def test_reuse_can_be_switched_off() -> None:
    engine = engine_for(reuse=False)
    for _ in range(2):
        ran = turn(engine, prompt(20))
        assert ran.finished is not None and ran.finished.reused_tokens == 0
        assert engine.kv_bytes == 0


def test_kept_states_are_bounded_in_bytes() -> None:
    target = toy_target("llama")
    limit = int(target.kv_bytes_per_token * 4096)
    engine = make_engine(target, kv_limit=limit)
    for i in range(12):
        turn(engine, prompt(200 + i, i), "none")
        assert engine.kv_bytes <= limit // 4
    assert engine.prefiller.prefixes._entries
    first, last = turn(engine, prompt(200, 0), "none"), turn(engine, prompt(211, 11), "none")
    assert first.finished is not None and first.finished.reused_tokens == 0
    assert last.finished is not None and last.finished.reused_tokens == 210


def test_kept_states_make_room_for_requests() -> None:
    target = toy_target("llama")
    limit = int(target.kv_bytes_per_token * 2048)
    engine = make_engine(target, kv_limit=limit)
    turn(engine, prompt(300, 1), "none")
    assert engine.kv_bytes > 0
    engine.submit(request("big", 1900, 2, max_tokens=100, ignore_eos=True))
    engine.step()
    assert not engine.prefiller.prefixes._entries
    engine.cancel("big")
    engine.step()


# -- the store itself -------------------------------------------------------------------------


def state(tokens: list[int]) -> Prefix:
    target = toy_target("llama")
    rows = target.make_rows()
    target.forward(mx.array([tokens]), rows)
    rows.trim_to([len(tokens)])
    return Prefix(tokens, rows, "none", None)


def test_the_longest_shared_beginning_wins() -> None:
    store = PrefixCache(1 << 30)
    for tokens in ([1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 9, 9, 9, 9]):
        store.put(state(tokens))
    taken = store.take([1, 2, 3, 4, 7], None)
    assert taken is not None and taken.tokens == [1, 2, 3, 4]
    assert taken.rows.lengths == [4]
    assert store.take([8, 1], None) is None


def test_a_state_is_moved_to_its_own_conversation_and_copied_for_others() -> None:
    store = PrefixCache(1 << 30)
    long = list(range(2, 42))
    store.put(state(long))
    other = store.take([*long[:10], 90], None)
    assert other is not None and other.tokens == long[:10]
    assert [entry.tokens for entry in store._entries] == [long]
    own = store.take([*long, 91], None)
    assert own is not None and own.tokens == long and not store._entries


def test_the_oldest_goes_first() -> None:
    store = PrefixCache(1 << 30, entries=3)
    for i in range(5):
        store.put(state([i + 2, 1, 1]))
    assert [entry.tokens[0] for entry in store._entries] == [4, 5, 6]
    store.shrink(store.nbytes - 1)
    assert [entry.tokens[0] for entry in store._entries] == [5, 6]
    store.clear()
    assert store.nbytes == 0


def test_what_is_kept_needs_nothing_of_what_it_was_taken_from() -> None:
    """Drafter rows are evaluated and counted with the rest."""
    target = toy_target("llama")
    engine = make_engine(target, [dspark(target)], max_rows=3)
    run(engine, *(request(str(i), 12, i, max_tokens=6, ignore_eos=True) for i in range(3)))
    entries = engine.prefiller.prefixes._entries
    assert len(entries) == 3
    for entry in entries:
        assert entry.nbytes == entry.rows.nbytes + entry.draft.nbytes > entry.rows.nbytes
        assert entry.rows.layers[0].parts[0].shape[0] == 1


def test_an_empty_state_is_not_kept() -> None:
    store = PrefixCache(1 << 30)
    store.put(Prefix([], toy_target("llama").make_rows(), "none", None))
    assert not store._entries


def test_a_script_of_both_turns_follows_the_warm_row() -> None:
    """A proposer without taps is rebuilt from the tokens; here it checks its own place."""
    target = toy_target("gemma3")
    chat = prompt(15)
    own = list(plain_text("gemma3", tuple(chat), 10))
    longer = [*chat, *own, *prompt(4, 3)]
    script = [*longer, *plain_text("gemma3", tuple(longer), 10)]
    engine = make_engine(target, [ScriptProposer([[*chat, *own], script], 4, 0.2)])
    for tokens in (chat, longer):
        ran = run_one(engine, request(tokens=tuple(tokens), max_tokens=10, ignore_eos=True))
        assert tuple(ran.tokens) == plain_text("gemma3", tuple(tokens), 10)
        assert ran.finished is not None and ran.finished.accepted > 0
