"""ends: EOS, stop strings and max_tokens at every offset of a block.

Never a token too many, never text after an end, nothing counted behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from bpe import TEXTS, byte_ids, byte_tokenizer
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
)
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import ToyTokenizer, llama_toy, prompt

from dspark_mlx.errors import UsageError
from dspark_mlx.events import StepDone
from dspark_mlx.model.target import Target
from dspark_mlx.request import Request, SamplingParams

BLOCK = 5
COUNT = 24


class Ends(ToyTokenizer):
    """The toy's tokenizer with other ids that end a text."""

    def __init__(self, *eos: int) -> None:
        self.eos_token_ids = frozenset(eos)


def own(kind: str = "llama", count: int = COUNT) -> list[int]:
    return list(plain_text(kind, tuple(prompt(12)), count))


def proposers(kind: str = "llama") -> list[Any]:
    """None; all right; partly right; a real drafter."""
    script = [*prompt(12), *own(kind, 2 * COUNT)]
    return [
        [],
        [ScriptProposer([script], BLOCK)],
        [ScriptProposer([script], BLOCK, 0.4, seed=2)],
        [dspark(toy_target(kind), block=BLOCK, lessons=[script])],
    ]


def check_end(ran: Ran, tokens: Sequence[int], reason: str) -> None:
    """The reply is exactly ``tokens`` and nothing behind them was counted."""
    assert ran.tokens == list(tokens)
    assert ran.reason == reason
    done = ran.finished
    assert done is not None
    assert done.generation_tokens == len(tokens)
    assert done.accepted == sum(part.origin == "draft" for part in ran.parts)
    last = ran.rounds[-1]
    if len(last.tokens) <= last.accepted:  # it ended inside the draft
        for k in range(len(last.tokens), last.scheduled):
            reached = sum(r.scheduled > k for r in ran.rounds[:-1])
            assert (done.reached[k] if k < len(done.reached) else 0) == reached


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_max_tokens_at_every_offset_of_a_block(kind: str) -> None:
    text = own(kind)
    for proposer in proposers(kind):
        for limit in range(1, 2 * BLOCK + 4):
            engine = make_engine(toy_target(kind), proposer)
            ran = run_one(engine, request(max_tokens=limit, ignore_eos=True))
            check_end(ran, text[:limit], "length")
            assert ran.text == ToyTokenizer().decode(text[:limit])


@pytest.mark.parametrize("kind", ["gemma3"])
def test_eos_at_every_offset_of_a_block(kind: str) -> None:
    text = own(kind)
    first = [i for i in range(2 * BLOCK + 4) if text[i] not in text[:i]]
    assert len(first) >= BLOCK
    for proposer in proposers(kind):
        for at in first:
            tokenizer = Ends(text[at], 0)
            engine = make_engine(toy_target(kind), proposer, tokenizer=tokenizer)
            ran = run_one(engine, request(max_tokens=COUNT))
            check_end(ran, text[: at + 1], "stop")
            assert ran.text == tokenizer.decode(text[:at])  # its own text is not shown
            ran = run_one(engine, request("b", max_tokens=COUNT, ignore_eos=True))
            check_end(ran, text, "length")
            assert ran.text == tokenizer.decode(text)


def test_eos_and_max_tokens_at_the_same_token_is_a_stop() -> None:
    text = own()
    at = next(i for i in range(4, 20) if text[i] not in text[:i])
    for proposer in proposers():
        engine = make_engine(toy_target(), proposer, tokenizer=Ends(text[at]))
        check_end(run_one(engine, request(max_tokens=at + 1)), text[: at + 1], "stop")


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_stop_strings_at_every_offset_of_a_block(size: int) -> None:
    text = own("qwen3")
    whole = ToyTokenizer().decode(text)
    starts = [i for i in range(2, 16) if whole.index(whole[i : i + size]) == i]
    assert starts
    for proposer in proposers("qwen3"):
        for start in starts:
            stop = whole[start : start + size]
            engine = make_engine(toy_target("qwen3"), proposer)
            seen: list[str] = []

            def watch(engine: Any, events: Any, seen: list[str] = seen) -> None:
                for event in events:
                    if isinstance(event, StepDone):
                        seen.extend(t.text for row in event.rows for t in row.tokens)

            ran = run_one(
                engine,
                request(max_tokens=COUNT, stop=("never seen", stop), ignore_eos=True),
                each=watch,
            )
            check_end(ran, text[: start + size], "stop")
            assert ran.text == whole[:start]
            shown = ""
            for piece in seen:  # at no moment was a part of the stop string shown
                shown += piece
                assert whole[:start].startswith(shown)


def test_a_stop_string_at_the_very_last_token_is_a_stop() -> None:
    whole = ToyTokenizer().decode(own("qwen3"))
    for last in range(6, 11):
        stop = whole[last - 3 : last]
        assert whole.index(stop) == last - 3
        for proposer in proposers("qwen3"):
            ask = request(max_tokens=last, stop=(stop,), ignore_eos=True)
            ran = run_one(make_engine(toy_target("qwen3"), proposer), ask)
            check_end(ran, own("qwen3")[:last], "stop")
            assert ran.text == whole[: last - 3]


def test_half_a_stop_string_at_the_end_is_text() -> None:
    """Held back while it might become a stop, given out when the reply ends otherwise."""
    text = own("qwen3")
    whole = ToyTokenizer().decode(text)
    for proposer in proposers("qwen3"):
        stop = whole[8:10] + "~never~"
        ask = request(max_tokens=10, stop=(stop,), ignore_eos=True)
        ran = run_one(make_engine(toy_target("qwen3"), proposer), ask)
        assert (ran.text, ran.reason) == (whole[:10], "length")
        at = next(i for i in range(10, 20) if text[i] not in text[:i])
        stop = whole[at - 2 : at] + "~never~"
        engine = make_engine(toy_target("qwen3"), proposer, tokenizer=Ends(text[at]))
        ran = run_one(engine, request(max_tokens=COUNT, stop=(stop,)))
        assert (ran.text, ran.reason) == (Ends().decode(text[:at]), "stop")


def test_cancelled_replies_keep_the_text_that_was_held_back() -> None:
    whole = ToyTokenizer().decode(own("qwen3"))
    stop = whole[6:8] + "~never~"
    engine = make_engine(toy_target("qwen3"))
    ask = request(max_tokens=COUNT, stop=(stop,), ignore_eos=True)
    ran = run(engine, ask, later={8: ["a"]})["a"]
    assert ran.reason == "cancelled"
    assert ran.finished is not None and ran.finished.tail == whole[6:8]
    assert ran.text == whole[:8]


@pytest.mark.parametrize("room", range(1, 9))
def test_the_context_limit_ends_a_reply(room: int) -> None:
    text = own()
    for proposer in proposers():
        for asked in (COUNT, -1):
            engine = make_engine(toy_target(), proposer, context_limit=12 + room)
            ran = run_one(engine, request(max_tokens=asked, ignore_eos=True))
            check_end(ran, text[:room], "length")
    with pytest.raises(UsageError, match="12 tokens; the context is 12"):
        make_engine(toy_target(), context_limit=12).submit(request())


def test_max_tokens_one_is_one_token_and_one_round() -> None:
    for proposer in proposers():
        ran = run_one(make_engine(toy_target(), proposer), request(max_tokens=1, ignore_eos=True))
        check_end(ran, own()[:1], "length")
        assert len(ran.rounds) == 1 and ran.rounds[0].scheduled == 0


@given(seed=st.integers(0, 10**6), data=st.data())
@settings(max_examples=25, deadline=None)
def test_however_it_is_decoded_a_reply_ends_the_same_way(seed: int, data: st.DataObject) -> None:
    text = own("qwen3", 2 * COUNT)
    whole = ToyTokenizer().decode(text)
    at = data.draw(st.integers(0, len(whole) - 3))
    options: dict[str, Any] = {
        "stop": data.draw(
            st.sampled_from([(), (whole[at : at + 2],), ("~", whole[at : at + 3], whole[at + 1])])
        ),
        "max_tokens": data.draw(st.integers(1, 2 * COUNT)),
    }
    eos = data.draw(st.sampled_from([0, *text]))
    ends = []
    for proposer, policy in (([], "off"), (proposers("qwen3")[2], Whims(seed))):
        engine = make_engine(toy_target("qwen3"), proposer, policy=policy, tokenizer=Ends(eos))
        ran = run_one(engine, request(**options))
        ends.append((ran.tokens, ran.text, ran.reason))
        assert not any(stop in ran.text for stop in options["stop"])
    assert ends[0] == ends[1]


# -- a real tokenizer: tokens that end inside a character -------------------------------------


class Typist:
    """Drives the target to write a given text: a processor that leaves one token possible."""

    def __init__(self, tokens: Sequence[int], begin: int) -> None:
        self.tokens, self.begin = list(tokens), begin

    def __call__(self, tokens: Any, logits: Any) -> Any:
        at = tokens.shape[0] - self.begin
        wanted = self.tokens[at] if at < len(self.tokens) else 0
        return logits.at[:, wanted].add(1e4)


@pytest.fixture(scope="module")
def big_target() -> Any:
    """A toy with as many ids as the byte-level tokenizer."""
    model = llama_toy()
    vocab = 320
    model.args.vocab_size = vocab
    model.model.embed_tokens.weight = mx.random.normal((vocab, 32), key=mx.random.key(1)) * 0.3
    if not model.args.tie_word_embeddings:
        model.lm_head.weight = mx.random.normal((vocab, 32), key=mx.random.key(2)) * 0.3
    target = Target(model)
    target.check()
    return target


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_text_is_exact_while_streaming_whatever_bytes_tokens_end_in(
    text: str, big_target: Any
) -> None:
    tokenizer = byte_tokenizer()
    for ids in (tokenizer.encode(text), byte_ids(tokenizer, text.encode())):
        for noise in (0.0, 0.5):
            script = [5, *ids]
            engine = make_engine(
                big_target, [ScriptProposer([script], BLOCK, noise)], tokenizer=tokenizer
            )
            ask = request(
                tokens=(5,),
                max_tokens=len(ids),
                ignore_eos=True,
                logits_processors=(Typist(ids, 1),),
            )
            ran = run_one(engine, ask)
            assert ran.tokens == ids
            assert ran.text == text == tokenizer.decode(ids)
            for part in ran.parts:
                assert "\ufffd" not in part.text or "\ufffd" in text


def test_bytes_that_form_no_character(big_target: Any) -> None:
    tokenizer = byte_tokenizer()
    for data in (
        b"\xff\xfe ok",
        b"\x80" * 15 + "😀 end".encode(),
        b"\xf0\x9f" * 12 + "é".encode(),
        b"cut short \xe2\x82",
    ):
        ids = byte_ids(tokenizer, data)
        engine = make_engine(
            big_target, [ScriptProposer([[5, *ids]], BLOCK, 0.3)], tokenizer=tokenizer
        )
        ask = request(
            tokens=(5,), max_tokens=len(ids), ignore_eos=True, logits_processors=(Typist(ids, 1),)
        )
        assert run_one(engine, ask).text == data.decode(errors="replace")


@pytest.mark.parametrize("stop", ["👩", "界🙂", "\n\n", "<think>", "ß"])
def test_stop_strings_of_several_bytes(stop: str, big_target: Any) -> None:
    tokenizer = byte_tokenizer()
    before, after = "前の文 ", " 後の文"
    for ids in (
        tokenizer.encode(before + stop + after),
        byte_ids(tokenizer, (before + stop + after).encode()),
    ):
        engine = make_engine(big_target, [ScriptProposer([[5, *ids]], BLOCK)], tokenizer=tokenizer)
        ask = request(
            tokens=(5,),
            max_tokens=len(ids),
            stop=(stop,),
            ignore_eos=True,
            logits_processors=(Typist(ids, 1),),
        )
        ran = run_one(engine, ask)
        assert (ran.text, ran.reason) == (before, "stop")
        assert len(ran.tokens) < len(ids)
        assert stop in tokenizer.decode(ran.tokens)
        assert stop not in tokenizer.decode(ran.tokens[:-1])


def test_a_chat_ends_at_the_tokenizers_own_end_mark(big_target: Any) -> None:
    tokenizer = byte_tokenizer()
    (eos,) = tokenizer.eos_token_ids
    answer = tokenizer.encode("Sì, 好的 👍🏽.")
    ask = Request(
        "a",
        messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "OK?"}),
        max_tokens=50,
        sampling=SamplingParams(),
        logits_processors=(Typist([*answer, eos, 77, 78], 0),),
    )
    engine = make_engine(big_target, [ScriptProposer([], BLOCK)], tokenizer=tokenizer)
    engine.submit(ask)
    ids = list(engine.prefiller.queue[0].tokens)
    ask.logits_processors[0].begin = len(ids)
    script = [*ids, *answer, eos, 77, 78]
    engine.batch.proposers["script"].scripts = [script]
    shown = "".join(
        token.text
        for _ in range(30)
        for event in (engine.step() if engine.active else [])
        if isinstance(event, StepDone)
        for row in event.rows
        for token in row.tokens
    )
    assert tokenizer.decode(ids) == ("<|system|>Be brief.<|end|><|user|>OK?<|end|><|assistant|>")
    assert shown == "Sì, 好的 👍🏽."
