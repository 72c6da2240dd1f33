"""Text in and out: streaming is the tokenizer's own decoding; stop strings never leak."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from bpe import TEXTS, byte_ids, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, normalizers
from toys import ToyTokenizer
from transformers import PreTrainedTokenizerFast

from dspark_mlx.engine.text import StreamDecoder, TextStream, encode_chat, encode_text
from dspark_mlx.errors import ModelError, UsageError

PIECES = st.sampled_from(
    [p.encode() for p in ("a", " ", "é", "你", "😀", "👩🏽‍🚀", "\u200d", "\ufffd", "ﷺ")]
    + [b"\x80", b"\xf0\x9f", b"\xe2\x82", b"\xff", b"\xed\xa0\x80", b"\xf0\x9f\x98"]
)


def stream(tokenizer: Any, ids: list[int]) -> tuple[str, list[str]]:
    decoder = StreamDecoder(tokenizer)
    parts = [*(decoder.push(i) for i in ids), decoder.finish()]
    return "".join(parts), parts


@given(pieces=st.lists(PIECES, max_size=40))
@settings(max_examples=200, deadline=None)
def test_streamed_bytes_join_to_the_tokenizers_own_decoding(pieces: list[bytes]) -> None:
    tokenizer = byte_tokenizer()
    data = b"".join(pieces)
    text, _ = stream(tokenizer, byte_ids(tokenizer, data))
    assert text == data.decode(errors="replace")


@given(ids=st.lists(st.integers(1, 319), max_size=60))
@settings(max_examples=150, deadline=None)
def test_streamed_tokens_join_to_the_tokenizers_own_decoding(ids: list[int]) -> None:
    tokenizer = byte_tokenizer()
    assert stream(tokenizer, ids)[0] == tokenizer.decode(ids)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_text_comes_as_soon_as_it_is_certain(text: str) -> None:
    """One token late at most for characters that are whole, and never a half one."""
    tokenizer = byte_tokenizer()
    ids = byte_ids(tokenizer, text.encode())
    whole, parts = stream(tokenizer, ids)
    assert whole == text
    shown = ""
    for k, part in enumerate(parts[:-1], start=1):
        shown += part
        assert text.startswith(shown)
        ready = text.encode()[:k].decode(errors="ignore")
        assert shown == ready or ready.endswith("\ufffd")


@pytest.mark.parametrize("noise", [b"\x80", b"\xf0\x9f", b"\xff\xfe\xfd"])
def test_bytes_without_end_are_shown_while_they_come(noise: bytes) -> None:
    """They are not hoarded until the reply ends, and a character behind them stays whole."""
    tokenizer = byte_tokenizer()
    data = noise * 100 + "😀".encode()
    whole, parts = stream(tokenizer, byte_ids(tokenizer, data))
    assert whole == data.decode(errors="replace")
    assert len("".join(parts[: len(parts) // 2])) > 20
    assert parts[-2].endswith("😀")


def sentencepiece_like() -> Any:
    """Llama 2's kind: words begin with a mark, unknown characters are spelled in bytes."""
    words = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    words += [*"▁helowrd,.", "he", "ll", "hell", "▁w", "or", "▁wor", "ld"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("▁", "w"), ("o", "r"), ("▁w", "or")]
    vocab = {word: i for i, word in enumerate(words)}
    inner = Tokenizer(
        models.BPE(vocab=vocab, merges=[*merges, ("l", "d")], unk_token="<unk>", byte_fallback=True)
    )
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    return TokenizerWrapper(fast)


@pytest.mark.parametrize(
    "text", ["hello world", "hello, 世界 world", "😀😀 hello 👩🏽‍🚀.", " world"]
)
def test_words_that_carry_their_space_and_bytes_in_between(text: str) -> None:
    tokenizer = sentencepiece_like()
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole, parts = stream(tokenizer, ids)
    assert whole == tokenizer.decode(ids) == text
    assert not any("\ufffd" in part for part in parts)


# -- stop strings -----------------------------------------------------------------------------


def sift(text: str, cuts: list[int], stop: tuple[str, ...]) -> tuple[str, bool, list[str]]:
    """``text`` through a stream in pieces; what came, whether it stopped, piece by piece."""
    tokenizer = ToyTokenizer()
    tokenizer.decode = lambda ids: "".join(pieces[i] for i in ids)  # type: ignore[method-assign]
    edges = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    stream = TextStream(tokenizer, stop)
    out = []
    for i in range(len(pieces)):
        out.append(stream.push(i))
        if stream.stopped:
            break
    out.append(stream.finish())
    return "".join(out), stream.stopped, out


@given(
    text=st.text("ab", max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=30),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
@settings(max_examples=400, deadline=None)
def test_text_ends_before_the_first_stop_string(
    text: str, cuts: list[int], stop: list[str]
) -> None:
    out, stopped, pieces = sift(text, cuts, tuple(stop))
    found = [text.index(s) for s in stop if s in text]
    assert stopped == bool(found)
    if not found:
        assert out == text
        return
    assert text.startswith(out)
    assert not any(s in out for s in stop)
    # Letter by letter, the stop string that is complete first decides.
    single, _, _ = sift(text, list(range(30)), tuple(stop))
    first = min(text.index(s) + len(s) for s in stop if s in text)
    starts = [first - len(s) for s in stop if s in text and text.index(s) + len(s) == first]
    assert len(single) == min(starts)
    shown = ""
    for piece in pieces:
        shown += piece
        assert out.startswith(shown), "a part of a stop string was shown"


def test_overlapping_beginnings_of_stop_strings() -> None:
    for cuts in ([], [1, 2, 3, 4, 5, 6, 7, 8]):
        assert sift("aabaabaaX", cuts, ("aabaaX",))[:2] == ("aab", True)
        assert sift("ENENEND!", cuts, ("END",))[:2] == ("ENEN", True)
        assert sift("<|im_<|im_end|>", cuts, ("<|im_end|>",))[:2] == ("<|im_", True)
        assert sift("</s", cuts, ("</s>",))[:2] == ("</s", False)


def test_nothing_follows_a_stop() -> None:
    tokenizer = ToyTokenizer()
    stream = TextStream(tokenizer, ("b",))
    assert [stream.push(i) for i in tokenizer.encode("ab")] == ["a", ""]
    assert stream.stopped and stream.finish() == "" and stream.finish() == ""


# -- chats ------------------------------------------------------------------------------------

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be brief"}


def test_a_chat_goes_through_the_tokenizers_template() -> None:
    tokenizer = byte_tokenizer()
    ids = encode_chat(tokenizer, [SYSTEM, USER])
    assert tokenizer.decode(ids) == "<|system|>be brief<|end|><|user|>hi<|end|><|assistant|>"


def test_a_template_that_knows_no_system_role_gets_it_with_the_first_question() -> None:
    class Strict(ToyTokenizer):
        def apply_chat_template(self, messages: Any, **options: Any) -> list[int]:
            if any(m["role"] == "system" for m in messages):
                raise ValueError("System role not supported")
            return super().apply_chat_template(messages, **options)

    tokenizer = Strict()
    ids = encode_chat(tokenizer, [SYSTEM, USER, {"role": "assistant", "content": "yo"}, USER])
    joined = tokenizer.decode(tokenizer.encode("<user>be brief\n\nhi"))
    assert tokenizer.decode(ids) == joined + "<assistant>yo<user>hi<assistant>"
    assert SYSTEM["content"] == "be brief" and USER["content"] == "hi"
    with pytest.raises(ModelError, match="rejects the messages"):
        encode_chat(tokenizer, [SYSTEM])


def test_a_template_that_rejects_the_messages_is_named() -> None:
    class Never(ToyTokenizer):
        def apply_chat_template(self, messages: Any, **options: Any) -> list[int]:
            raise ValueError("roles must alternate")

    with pytest.raises(ModelError, match="roles must alternate"):
        encode_chat(Never(), [USER, USER])
    for bad in ({"role": "user"}, {"content": "hi"}, {}):
        with pytest.raises(UsageError, match="a role and a content"):
            encode_chat(byte_tokenizer(), [bad])
    with pytest.raises(UsageError, match="at least one message"):
        encode_chat(byte_tokenizer(), [])


def test_text_that_is_no_text_is_said_to_be_so() -> None:
    broken = b"a\xff".decode(errors="surrogateescape")  # as the command line delivers it
    with pytest.raises(UsageError, match="UTF-8"):
        encode_text(byte_tokenizer(), broken)
    for messages in ([{**USER, "content": broken}], [{**SYSTEM, "content": broken}, USER]):
        with pytest.raises(UsageError, match="UTF-8"):
            encode_chat(byte_tokenizer(), messages)


def test_a_tokenizer_without_a_template_gets_plain_text() -> None:
    class Base(ToyTokenizer):
        has_chat_template = False
        chat_template = None

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [ord(c) for c in text]

    assert encode_chat(Base(), [SYSTEM, USER]) == [ord(c) for c in "be brief\n\nhi"]


@pytest.mark.parametrize("thinking", [None, True, False])
def test_the_thinking_switch_reaches_the_template(thinking: bool | None) -> None:
    given: dict[str, Any] = {}

    class Thinks(ToyTokenizer):
        def apply_chat_template(self, messages: Any, **options: Any) -> list[int]:
            given.update(options)
            return [5]

    encode_chat(Thinks(), [USER], thinking)
    assert given.get("enable_thinking") is thinking
    assert given["add_generation_prompt"] and given["tokenize"]


def test_raw_text_gets_its_begin_mark_once() -> None:
    class Marked(ToyTokenizer):
        bos_token = "<s>"

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [1] * add_special_tokens + [ord(c) for c in text]

    assert encode_text(Marked(), "a") == [1, ord("a")]
    assert encode_text(Marked(), "<s>a")[0] == ord("<")
    assert encode_text(ToyTokenizer(), "A") == ToyTokenizer().encode("A")


def test_brackets_and_thought_marks_in_an_answer_are_only_text() -> None:
    tokenizer = byte_tokenizer()
    text = "use <think> and </think> and [bold]x[/bold] literally"
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer)
    assert "".join([*(stream.push(i) for i in ids), stream.finish()]) == text
    assert not stream.stopped
