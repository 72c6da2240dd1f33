"""Text on the way in and out: chat templates, streaming UTF-8, stop strings.

Streaming is exact: the pieces joined are the tokenizer's own decoding of the
tokens, up to a stop string, whatever bytes a token ends in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ModelError, UsageError

_INCOMPLETE = "\ufffd"
# A character is at most 4 bytes, so this many tokens without a complete one are
# not the beginning of a character but bytes that form none.
_LONGEST_WAIT = 16
# What a coming token may still complete began in one of the last this many tokens.
_UNDECIDED = 3


class StreamDecoder:
    """Tokens in, text out as soon as it is certain.

    Decodes only a short tail each time: the text of the tokens since the last
    safe point, less what of it was already given out.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._decode = tokenizer.decode
        # From the safe point on; the text of the first ``_given`` of them was given out.
        self._tokens: list[int] = []
        self._given = 0

    def push(self, token: int) -> str:
        """The text that ``token`` makes certain; may be empty."""
        self._tokens.append(token)
        text = self._text(0, len(self._tokens))
        if not text.endswith(_INCOMPLETE):
            return self._advance(text, len(self._tokens))
        if len(self._tokens) - self._given < _LONGEST_WAIT:
            return ""
        for cut in range(len(self._tokens) - _UNDECIDED, self._given, -1):
            head = self._text(0, cut)
            if text == head + self._text(cut, len(self._tokens)):  # no character spans the cut
                return self._advance(head, cut)
        return ""

    def finish(self) -> str:
        """What was held back, as it stands."""
        end = len(self._tokens)
        return self._advance(self._text(0, end), end)

    def _text(self, begin: int, end: int) -> str:
        return str(self._decode(self._tokens[begin:end]))

    def _advance(self, text: str, end: int) -> str:
        """Give out the rest of ``text``, that of the first ``end`` tokens."""
        new = text[len(self._text(0, self._given)) :]
        self._tokens = self._tokens[self._given :]
        self._given = end - self._given
        return new


class TextStream:
    """A reply's text as it grows, ending before the first stop string.

    Text that may be the beginning of a stop string is held back until that is
    decided, so no part of one ever leaks.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Text to show now; sets ``stopped`` when a stop string was completed."""
        return self._sift(self._decoder.push(token))

    def finish(self) -> str:
        """The rest, once no token will follow."""
        if self.stopped:
            return ""
        out = self._sift(self._decoder.finish())
        if not self.stopped:
            out, self._held = out + self._held, ""
        return out

    def _sift(self, new: str) -> str:
        if not self._stop:
            return new
        text = self._held + new
        found = [at for at in (text.find(s) for s in self._stop) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = max((_overlap(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


def encode_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], thinking: bool | None = None
) -> list[int]:
    """Ids of a chat, up to where the assistant begins to answer.

    Templates that know no system role get it in front of the first user
    message. A tokenizer without a template gets the contents as plain text.
    Raises ModelError when the template rejects the messages.
    """
    turns = [dict(m) for m in messages]
    if not turns:
        raise UsageError("a chat needs at least one message")
    if not all("role" in turn and "content" in turn for turn in turns):
        raise UsageError("each message needs a role and a content")
    for turn in turns:
        _check_text(turn["content"])
    if not getattr(tokenizer, "has_chat_template", tokenizer.chat_template is not None):
        return list(tokenizer.encode("\n\n".join(t["content"] for t in turns)))
    options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": True}
    if thinking is not None:
        options["enable_thinking"] = thinking
    try:
        return list(tokenizer.apply_chat_template(turns, **options))
    except Exception as error:
        if turns[0].get("role") == "system" and len(turns) > 1:
            return encode_chat(tokenizer, _without_system(turns), thinking)
        raise ModelError(f"this model's chat template rejects the messages: {error}") from error


def _check_text(text: str) -> None:
    """Bytes that are no UTF-8 arrive as lone surrogates, which tokenizers cannot take."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError("the prompt is not valid UTF-8 text") from None


def _without_system(turns: list[dict[str, str]]) -> list[dict[str, str]]:
    first = {**turns[1], "content": f"{turns[0]['content']}\n\n{turns[1]['content']}"}
    return [first, *turns[2:]]


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of raw text; the begin-of-text token is added once, unless the text has it."""
    _check_text(text)
    bos = tokenizer.bos_token
    return list(tokenizer.encode(text, add_special_tokens=bos is None or not text.startswith(bos)))
