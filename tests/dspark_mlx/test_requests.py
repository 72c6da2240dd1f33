"""What a request asks is done exactly, or refused before anything runs."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from decoding import (
    ScriptProposer,
    dspark,
    make_engine,
    plain_text,
    request,
    run,
    run_one,
    toy_target,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors
from toys import MODELS, VOCAB, prompt

from dspark_mlx.draft.lookup import LookupProposer
from dspark_mlx.errors import CacheError, DsparkError, UsageError
from dspark_mlx.events import StepDone
from dspark_mlx.request import Cuts, Request, SamplingParams

COUNT = 28


def proposers(kind: str, own: list[int]) -> list[list[Any]]:
    """None, a script that follows ``own``, prompt lookup, a drafter that was taught it."""
    script = [*prompt(12), *own]
    return [
        [],
        [ScriptProposer([script], 5, 0.3)],
        [LookupProposer(5)],
        [dspark(toy_target(kind), lessons=[script])],
    ]


def decode(kind: str, **options: Any) -> list[list[int]]:
    """The reply with every kind of proposer."""
    target = toy_target(kind)
    ask = request(max_tokens=COUNT, ignore_eos=True, **options)
    own = run_one(make_engine(target), ask).tokens
    return [run_one(make_engine(target, each), ask).tokens for each in proposers(kind, own)]


# -- penalties and logits processors ----------------------------------------------------------

PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.8, "penalty_context": 3},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7, "penalty_context": 50},
    {"logit_bias": {20: 3.0, 21: -math.inf, 22: 1.0}},
    {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "logit_bias": {13: -5.0},
        "penalty_context": 7,
    },
]


@pytest.mark.parametrize("given", PENALTIES, ids=lambda p: "-".join(p))
@pytest.mark.parametrize("kind", ["gemma3"])
def test_penalties_are_applied_as_plain_decoding_applies_them(
    kind: str, given: dict[str, Any]
) -> None:
    context = given.get("penalty_context", 20)
    processors = make_logits_processors(
        logit_bias=given.get("logit_bias"),
        repetition_penalty=given.get("repetition_penalty"),
        repetition_context_size=context,
        presence_penalty=given.get("presence_penalty"),
        presence_context_size=context,
        frequency_penalty=given.get("frequency_penalty"),
        frequency_context_size=context,
    )
    steps = generate_step(
        mx.array(prompt(12)),
        toy_target(kind).model,
        max_tokens=COUNT,
        logits_processors=processors,
    )
    own = [token for token, _ in steps]
    assert own != list(plain_text(kind, tuple(prompt(12)), COUNT)), "these penalties do nothing"
    for tokens in decode(kind, sampling=SamplingParams(**given)):
        assert tokens == own


@pytest.mark.parametrize("given", PENALTIES, ids=lambda p: "-".join(p))
def test_penalties_at_a_temperature_depend_on_the_seed_alone(given: dict[str, Any]) -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=5, **given)
    replies = decode("qwen3", sampling=sampling)
    assert all(tokens == replies[0] for tokens in replies)


def test_penalties_of_one_row_do_not_touch_the_others() -> None:
    target = toy_target("llama")
    asked = [
        request(str(i), 10 + i, i, max_tokens=20, ignore_eos=True, sampling=SamplingParams(**g))
        for i, g in enumerate(({}, PENALTIES[0], PENALTIES[4], {}))
    ]
    alone = {r.id: run_one(make_engine(target), r).tokens for r in asked}
    lessons = [[*prompt(10 + i, i), *alone[str(i)]] for i in range(4)]
    for each in ([], [dspark(target, lessons=lessons)], [ScriptProposer(lessons, 4, 0.2)]):
        together = run(make_engine(target, each), *asked)
        assert {id: ran.tokens for id, ran in together.items()} == alone


def checksum(tokens: mx.array, logits: mx.array) -> mx.array:
    """Depends on every token of the history and on their order."""
    weights = mx.arange(1, tokens.shape[0] + 1)
    favourite = int((tokens * weights).sum().item()) % VOCAB
    return logits.at[:, favourite].add(6.0)


@pytest.mark.parametrize("kind", MODELS)
def test_processors_see_exactly_the_history_of_their_position(kind: str) -> None:
    steps = generate_step(
        mx.array(prompt(12)),
        toy_target(kind).model,
        max_tokens=COUNT,
        logits_processors=[checksum],
    )
    own = [token for token, _ in steps]
    for tokens in decode(kind, logits_processors=(checksum,)):
        assert tokens == own


def test_processors_run_behind_the_penalties_and_in_their_order() -> None:
    seen: list[float] = []

    def first(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(logits[0, 20].item())
        return logits.at[:, 20].add(1.0)

    def second(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(logits[0, 20].item())
        return logits

    ask = request(
        max_tokens=2,
        sampling=SamplingParams(logit_bias={20: 100.0}),
        logits_processors=(first, second),
    )
    run_one(make_engine(toy_target("llama")), ask)
    assert seen[0] > 90 and seen[1] == pytest.approx(seen[0] + 1)


def test_a_processor_that_raises_ends_its_own_reply_only() -> None:
    target = toy_target("llama")

    def late(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.shape[0] == 17:
            raise RuntimeError("out of patience")
        return logits

    wrong: list[tuple[Any, str]] = [
        (late, "out of patience"),
        (lambda t, x: x[0], "shape"),
        (lambda t, x: None, "NoneType"),
        (lambda t, x: x[:, :5], "shape"),
        (lambda t, x: np.array(x), "no mlx array"),
        (lambda t, x: sys.exit("enough"), "SystemExit: enough"),
        (lambda t, x: json.loads("two\nlines"), "Expecting value"),
    ]
    own = plain_text("llama", tuple(prompt(12)), COUNT)
    for processor, why in wrong:
        for each in proposers("llama", list(own)):
            engine = make_engine(target, each)
            asked = [
                request("good", seed=0, max_tokens=COUNT, ignore_eos=True),
                request("bad", seed=0, max_tokens=COUNT, logits_processors=(processor,)),
                request("late", seed=0, max_tokens=COUNT, ignore_eos=True),
            ]
            ran = run(engine, *asked[:2], later={3: asked[2:]})
            assert tuple(ran["good"].tokens) == tuple(ran["late"].tokens) == own
            bad = ran["bad"].finished
            assert bad is not None and bad.reason == "error"
            assert "logits processor failed" in bad.message and why in bad.message
            assert "\n" not in bad.message
            assert tuple(ran["bad"].tokens) == own[: 5 if processor is late else 0]


def test_a_sampler_that_raises_ends_its_own_reply_only() -> None:
    target = toy_target("llama")
    own = plain_text("llama", tuple(prompt(12)), COUNT)
    calls = [0]

    def tired(logprobs: mx.array) -> mx.array:
        calls[0] += 1
        if calls[0] > 30:
            raise RuntimeError("out of ideas")
        return mx.argmax(logprobs, axis=-1)

    wrong: list[tuple[Any, str]] = [
        (tired, "out of ideas"),
        (lambda p: p, "shape"),
        (lambda p: 5, "no mlx array"),
        (lambda p: mx.array([float("nan")]), "no token id"),
        *[(lambda p, i=i: mx.array([i]), f"token id {i}") for i in (VOCAB, -1, 2**31 - 1)],
    ]
    for sampler, why in wrong:
        engine = make_engine(target, [ScriptProposer([[*prompt(12), *own]], 4, 0.3)])
        ran = run(
            engine,
            request("good", seed=0, max_tokens=COUNT, ignore_eos=True),
            request("bad", seed=0, max_tokens=COUNT, ignore_eos=True, sampler=sampler),
        )
        assert tuple(ran["good"].tokens) == own
        bad = ran["bad"].finished
        assert bad is not None and bad.reason == "error" and why in bad.message
        assert tuple(ran["bad"].tokens) == own[: len(ran["bad"].tokens)]


@pytest.mark.parametrize("noise", [0.0, 0.5, 1.0])
def test_texts_that_never_were_do_not_fail_a_reply(noise: float) -> None:
    """A grammar that raises on an impossible text meets drafted ones that are then rejected."""
    own = plain_text("llama", tuple(prompt(12)), COUNT)
    whole = [*prompt(12), *own]

    def grammar(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.tolist() != whole[: tokens.shape[0]]:
            raise ValueError("not in the language")
        return logits

    for each in proposers("llama", list(own)):
        if each and each[0].spec.name == "script":
            each[0].noise = noise
        ran = run_one(
            make_engine(toy_target("llama"), each),
            request(max_tokens=COUNT, ignore_eos=True, logits_processors=(grammar,)),
        )
        assert tuple(ran.tokens) == own and ran.reason == "length"


# -- edges ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_a_prompt_of_one_token(kind: str) -> None:
    """Nothing to prefill: the drafter's context is empty too."""
    own = plain_text(kind, (9,), COUNT)
    target = toy_target(kind)
    for each in ([], [dspark(target, lessons=[[9, *own]])], [ScriptProposer([[9, *own]], 5, 0.3)]):
        for policy in ("fixed", "off"):
            ask = request(tokens=(9,), max_tokens=COUNT, ignore_eos=True)
            ran = run_one(make_engine(target, each, policy=policy), ask)
            assert tuple(ran.tokens) == own
            assert [(p.done, p.total) for p in ran.prefills] == [(0, 0)]
    # beside one whose context is not empty
    engine = make_engine(target, [dspark(target, lessons=[[9, *own]])])
    other = request("b", 30, 1, max_tokens=COUNT, ignore_eos=True)
    for order in ([ask, other], [other, ask]):
        both = run(engine, *order)
        assert tuple(both["a"].tokens) == own
        assert tuple(both["b"].tokens) == plain_text(kind, tuple(prompt(30, 1)), COUNT)


@pytest.mark.parametrize("length", [15, 16, 17, 18, 31, 32, 33, 34])
def test_prompts_at_the_edges_of_a_chunk(length: int) -> None:
    own = plain_text("gemma3", tuple(prompt(length)), 8)
    target = toy_target("gemma3")
    for each in ([], [dspark(target, lessons=[[*prompt(length), *own]])]):
        engine = make_engine(target, each, prefill_chunk=16)
        ran = run_one(engine, request(length=length, max_tokens=8, ignore_eos=True))
        assert tuple(ran.tokens) == own
        assert len(ran.prefills) == max(1, -(-(length - 1) // 16))


@pytest.mark.parametrize("seed", [0, 2**32, 2**64 - 1])
def test_huge_seeds(seed: int) -> None:
    sampling = SamplingParams(temperature=1.0, seed=seed)
    replies = decode("llama", sampling=sampling)
    assert all(tokens == replies[0] for tokens in replies)


def test_neighbouring_seeds_give_different_texts() -> None:
    target = toy_target("llama")
    texts = set()
    for seed in (0, 1, 2, 2**32, 2**33, 2**32 + 1):
        sampling = SamplingParams(temperature=1.5, seed=seed)
        ask = request(max_tokens=12, ignore_eos=True, sampling=sampling)
        texts.add(tuple(run_one(make_engine(target), ask).tokens))
    assert len(texts) == 6


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"messages": ()},
        {"prompt": "a", "tokens": (1,)},
        {"messages": ({"role": "user", "content": "a"},), "prompt": "a"},
        {"prompt": "a", "max_tokens": 0},
        {"prompt": "a", "max_tokens": -2},
        {"prompt": "a", "max_tokens": 2.5},
        {"prompt": "a", "method": "magic"},
        {"prompt": "a", "stop": "END"},
        {"prompt": "a", "stop": ("END", "")},
        {"tokens": (1, 2.0)},
        {"tokens": (1, "2")},
        {"tokens": (True,)},
    ],
    ids=str,
)
def test_requests_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Request("a", **bad)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"top_k": -1},
        {"top_k": 2.5},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"seed": -1},
        {"seed": 2**64},
        {"seed": 1.5},
        {"seed": "7"},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.inf},
        {"presence_penalty": math.nan},
        {"frequency_penalty": math.inf},
        {"penalty_context": 0},
        {"penalty_context": 2.5},
        {"logit_bias": {"5": 1.0}},
        {"logit_bias": {5: math.nan}},
        {"logit_bias": {5: math.inf}},
        {"logit_bias": {5: "much"}},
        {"draft_sampling": "lucky"},
    ],
    ids=str,
)
def test_sampling_out_of_range_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        SamplingParams(**bad)


@pytest.mark.parametrize(
    "bad", [{"draft_length": -1}, {"draft_length": 1.5}, {"p_min": 1.1}, {"p_survival_min": -0.1}]
)
def test_cuts_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Cuts(**bad)


def test_numpy_numbers_are_numbers() -> None:
    ask = Request(
        "a",
        tokens=tuple(np.array(prompt(12))),
        max_tokens=np.int64(6),  # type: ignore[arg-type]
        ignore_eos=True,
        sampling=SamplingParams(seed=np.uint64(7), top_k=np.int32(4), temperature=1.0),  # type: ignore[arg-type]
    )
    plain = Request(
        "a",
        tokens=tuple(prompt(12)),
        max_tokens=6,
        ignore_eos=True,
        sampling=SamplingParams(seed=7, top_k=4, temperature=1.0),
    )
    target = toy_target("llama")
    for each in ([], [LookupProposer()], [dspark(target)]):
        assert (
            run_one(make_engine(target, each), ask).tokens
            == run_one(make_engine(target, each), plain).tokens
        )


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tokens": ()}, "empty"),
        ({"prompt": ""}, "empty"),
        ({"tokens": (5, VOCAB)}, f"token id {VOCAB}"),
        ({"tokens": (5, -1)}, "token id -1"),
        ({"sampling": SamplingParams(seed=0, logit_bias={VOCAB: 1.0})}, f"token id {VOCAB}"),
        ({"sampling": SamplingParams(seed=0, logit_bias={-1: 1.0})}, "token id -1"),
        ({"method": "dspark"}, "not available"),
        ({"length": 70}, "the context is 64"),
    ],
    ids=str,
)
def test_what_can_never_be_served_is_refused_at_once(options: dict[str, Any], why: str) -> None:
    engine = make_engine(toy_target("llama"), context_limit=64)
    with pytest.raises(DsparkError, match=why):
        engine.submit(request(**options))
    assert not engine.active and engine.step() == []
    assert run_one(engine, request()).reason in ("stop", "length")


def test_a_request_that_needs_too_much_memory_is_refused_with_the_figures() -> None:
    target = toy_target("llama")
    engine = make_engine(target, kv_limit=int(target.kv_bytes_per_token * 100))
    with pytest.raises(CacheError, match="GB of KV cache; the limit is"):
        engine.submit(request(length=60, max_tokens=41))
    engine.submit(request(length=60, max_tokens=40))


@pytest.mark.parametrize("context", [0, 40, 100_000])
def test_without_a_limit_a_reply_may_fill_the_context_or_the_memory(context: int) -> None:
    target = toy_target("llama")
    engine = make_engine(
        target, kv_limit=int(target.kv_bytes_per_token * 60), context_limit=context
    )
    ran = run_one(engine, request(max_tokens=-1, ignore_eos=True))
    assert ran.reason == "length" and len(ran.tokens) == min(context or 60, 60) - 12
    with pytest.raises(DsparkError, match=r"KV cache|the context is"):
        engine.submit(request(length=61, max_tokens=-1))
    free = make_engine(target, kv_limit=1 << 62)
    free.submit(request(max_tokens=-1))
    assert free.cancel("a")


# On the CPU, MLX compiles a kernel for each new top-p and min-p, a second or two each.
@given(
    numbers=st.fixed_dictionaries(
        {
            "temperature": st.floats(0, 3),
            "top_p": st.sampled_from([0.1, 0.9, 1.0]),
            "top_k": st.integers(0, 200),
            "min_p": st.sampled_from([0.0, 0.15]),
            "seed": st.integers(0, 2**64 - 1),
        }
    ),
    length=st.integers(1, 30),
)
@settings(max_examples=6, deadline=None)
def test_any_sampling_in_range_gives_a_whole_reply(numbers: dict[str, Any], length: int) -> None:
    target = toy_target("qwen3")
    ask = request(length=length, max_tokens=10, ignore_eos=True, sampling=SamplingParams(**numbers))
    plain = run_one(make_engine(target), ask).tokens
    assert len(plain) == 10 and all(0 <= t < VOCAB for t in plain)
    drafted = run_one(make_engine(target, [LookupProposer(3)]), ask).tokens
    assert drafted == plain


# -- one device wait a round ------------------------------------------------------------------


@pytest.mark.parametrize("method", ["none", "lookup", "dspark", "script"])
@pytest.mark.parametrize(
    ("policy", "cuts", "looks"),
    [
        ("off", Cuts(), False),
        ("fixed", Cuts(), False),
        ("fixed", Cuts(draft_length=2), False),
        ("threshold", Cuts(p_min=0.3), True),
    ],
)
def test_a_round_waits_for_the_device_once_unless_the_policy_looks(
    method: str, policy: str, cuts: Cuts, looks: bool
) -> None:
    target = toy_target("llama")
    own = plain_text("llama", tuple(prompt(12)), COUNT)
    script = [*prompt(12), *own]
    each: Any = {
        "none": [],
        "lookup": [LookupProposer(4)],
        "dspark": [dspark(target, lessons=[script])],
        "script": [ScriptProposer([script], 4, 0.3)],
    }[method]
    waits = set()

    def watch(engine: Any, events: Any) -> None:
        for event in events:
            if isinstance(event, StepDone):
                looked = looks and any(row.drafted for row in event.rows)
                waits.add((event.syncs, looked))
                assert event.round_seconds > 0 and event.tps > 0

    sampling = SamplingParams(temperature=0.5, seed=1)
    for one in (SamplingParams(), sampling):
        run(
            make_engine(target, each, policy=policy, max_rows=2),
            request("a", cuts=cuts, sampling=one, ignore_eos=True),
            request("b", seed=1, cuts=cuts, sampling=one, ignore_eos=True),
            each=watch,
        )
    for syncs, looked in waits:
        assert syncs == 1 or (looked and syncs == 2) or (looks and method == "lookup")


@pytest.mark.parametrize(
    "wrong",
    [
        {"cuts": None},
        {"sampling": None},
        {"tokens": None, "prompt": 5},
        {"tokens": None, "messages": ({"role": "user", "content": None},)},
        {"tokens": None, "messages": ("hello",)},
        {"max_tokens": 3.5},
    ],
    ids=str,
)
def test_a_request_of_the_wrong_kinds_is_refused_when_it_is_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Request("a", **{"tokens": (5, 6), **wrong})
    assert Request("a", tokens=(5, 6), max_tokens=np.int64(3)).max_tokens == 3


@pytest.mark.parametrize("method", ["none", "dspark"])
def test_rows_hold_no_more_than_the_limit(method: str) -> None:
    """Buffers grow in whole steps, and a drafter keeps a cache of its own."""
    target = toy_target("llama")
    limit = int(target.kv_bytes_per_token * 1600)
    for count, length in ((12, 100), (30, 10), (6, 250)):
        engine = make_engine(target, [dspark(target)], kv_limit=limit, max_rows=count)
        held: list[int] = []
        asked = [
            request(f"r{i}", length + i, i, max_tokens=12, ignore_eos=True, method=method)
            for i in range(count)
        ]
        ran = run(engine, *asked, each=lambda e, events, held=held: held.append(e.kv_bytes))
        assert all(reply.reason == "length" for reply in ran.values())
        assert max(held) <= limit
