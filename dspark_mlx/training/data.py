"""Training data: jsonl lines become token sequences with their answer marked.

A line is a JSON object with the prompt as ``{"prompt": str}``, ``{"messages": [{"role",
"content"}]}`` or ``{"turns": [str]}`` (the user's messages in order), and the target's answer as
``"response"`` (and exactly as ``"response_tokens"``); or ``{"text": str}``, all of which counts as
answer. ``"temperature"`` and ``"domain"`` are optional. Lines without an answer are prompts for
``rollout``. This module never runs a model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UsageError

FORMATS = '{"prompt"}, {"messages"}, {"turns"} or {"text"}'


@dataclass(frozen=True)
class Record:
    """One line: a conversation, and the target's answer to it.

    ``messages`` is the conversation up to the answer, empty for plain text. ``later_turns`` is
    what the user says after the answer (``turns`` only).
    """

    messages: tuple[dict[str, str], ...]
    text: str | None = None
    response: str | None = None
    response_tokens: tuple[int, ...] | None = None
    temperature: float | None = None
    domain: str = "all"
    finish: str | None = None
    later_turns: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Equal for records of the same prompt: a hash of how the conversation begins."""
        opening = next((m["content"] for m in self.messages if m["role"] == "user"), "")
        shown = self.text if self.text is not None else opening
        return hashlib.sha256(shown.encode()).hexdigest()[:24]

    @property
    def identity(self) -> str:
        """Equal for records of the same conversation: a hash of all that is asked in it."""
        whole = json.dumps([self.messages, self.later_turns, self.text])
        return hashlib.sha256(whole.encode()).hexdigest()[:24]

    @property
    def answered(self) -> bool:
        return self.text is not None or self.response is not None


@dataclass(frozen=True)
class TrainingSample:
    """Token ids ``(L,)`` of a conversation; the answer is ``tokens[start:]``."""

    tokens: np.ndarray
    start: int
    key: str
    domain: str = "all"
    temperature: float | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def answer_length(self) -> int:
        return len(self.tokens) - self.start


def read_records(paths: Iterable[str | Path]) -> list[Record]:
    """Every line of every file. Raises UsageError naming file, line and what is wrong."""
    records: list[Record] = []
    for path in map(Path, paths):
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise UsageError(f"cannot read {path}: {why}", "give a jsonl file") from None
        lines = text.split("\n")
        found = [
            parse(line, f"{path}:{n}")
            for n, line in enumerate(lines, 1)
            # A file that is being written may end in half a line.
            if line.strip() and not (n == len(lines) and not _whole(line))
        ]
        if not found:
            raise UsageError(f"{path} is empty", f"each line is one of {FORMATS}")
        records += found
    return records


def _whole(line: str) -> bool:
    return line.rstrip().endswith("}") or not line.lstrip().startswith("{")


def parse(line: str, where: str) -> Record:
    """One jsonl line. ``where`` is named in errors."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{where} is not JSON: {error}", f"each line is one of {FORMATS}"
        ) from None
    if not isinstance(data, dict):
        raise UsageError(f"{where} is not a JSON object", f"each line is one of {FORMATS}")
    if "\\u" in line and not _is_text(data):
        raise UsageError(f"{where} has half of a surrogate pair in it, which is no text")
    ids = data.get("response_tokens")
    if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
        raise UsageError(f"{where}: response_tokens must be a list of token ids")
    for key in ("text", "response"):
        if data.get(key) is not None and not isinstance(data[key], str):
            raise UsageError(f"{where}: {key} must be a string")
    temperature = data.get("temperature")
    if temperature is not None and not isinstance(temperature, int | float):
        raise UsageError(f"{where}: temperature must be a number")
    return Record(
        messages=() if data.get("text") is not None else tuple(_messages(data, where)),
        text=data.get("text"),
        response=data.get("response"),
        response_tokens=None if ids is None else tuple(ids),
        temperature=temperature,
        domain=str(data.get("domain") or data.get("source") or "all"),
        finish=data.get("finish"),
        later_turns=tuple(data["turns"][1:]) if isinstance(data.get("turns"), list) else (),
    )


def _messages(data: dict[str, Any], where: str) -> list[dict[str, str]]:
    if isinstance(data.get("prompt"), str):
        return [{"role": "user", "content": data["prompt"]}]
    turns = data.get("turns")
    if isinstance(turns, list) and turns and all(isinstance(t, str) for t in turns):
        return [{"role": "user", "content": turns[0]}]
    said = data.get("messages")
    if isinstance(said, list) and said and all(_is_message(m) for m in said):
        return [{"role": m["role"], "content": m["content"]} for m in said]
    raise UsageError(f"{where} has no usable prompt", f"each line is one of {FORMATS}")


def _is_text(data: Any) -> bool:
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("role", "content")
    )


def answer_in_messages(record: Record) -> Record:
    """The record with its answer, if the assistant speaks last, taken out of the messages."""
    if record.response is None and len(record.messages) > 1:
        *before, last = record.messages
        if last["role"] == "assistant":
            return Record(tuple(before), response=last["content"], domain=record.domain)
    return record


def prompt_tokens(record: Record, tokenizer: Any) -> list[int]:
    """The conversation in the model's own chat template, up to where the answer begins."""
    if getattr(tokenizer, "chat_template", None) is None:
        return list(tokenizer.encode("\n\n".join(m["content"] for m in record.messages)))
    # Thinking off is how DeepSpec's drafters were trained; templates without it ignore it.
    return list(
        tokenizer.apply_chat_template(
            list(record.messages), add_generation_prompt=True, enable_thinking=False
        )
    )


def encode(
    record: Record, tokenizer: Any, max_length: int, vocab_size: int
) -> TrainingSample | None:
    """The sample of an answered record, cut to ``max_length`` tokens.

    None if fewer than two answer tokens are left. Raises UsageError for ids of another tokenizer.
    """
    if record.text is not None:
        tokens, start = list(tokenizer.encode(record.text)), 1
    else:
        tokens = prompt_tokens(record, tokenizer)
        start = len(tokens)
        if record.response_tokens is not None:
            tokens += record.response_tokens
        else:
            tokens += tokenizer.encode(record.response, add_special_tokens=False)
            if record.finish == "stop" and tokenizer.eos_token_id is not None:
                tokens.append(tokenizer.eos_token_id)
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        wrong = max(tokens) if min(tokens) >= 0 else min(tokens)
        raise UsageError(
            f"token id {wrong} is outside the target's vocabulary of {vocab_size}",
            "these answers were made with another model; make them again with this one",
        )
    tokens = tokens[:max_length]
    if len(tokens) - start < 2:
        return None
    ids = np.asarray(tokens, dtype=np.int32)
    return TrainingSample(ids, start, record.key, record.domain, record.temperature)


def encode_all(
    records: Sequence[Record], tokenizer: Any, max_length: int, vocab_size: int
) -> list[TrainingSample]:
    """All usable samples. Raises UsageError when there is none, saying why."""
    answered = [r for r in map(answer_in_messages, records) if r.answered]
    if not answered:
        raise UsageError(
            "the data holds prompts but no answers",
            "give the prompts to `dspark train`, which has the target answer them first",
        )
    samples = [encode(r, tokenizer, max_length, vocab_size) for r in answered]
    kept = [s for s in samples if s is not None]
    if not kept:
        raise UsageError(
            f"no usable anchors: in none of {len(answered)} records does the answer leave two "
            f"tokens within {max_length}",
            "raise --max-length, or use shorter prompts",
        )
    return kept


def is_held_out(key: str, share: float) -> bool:
    """Whether the prompt with this key is held out of training; the same in every run."""
    digest = hashlib.sha256(f"held-out {key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def split(
    samples: Sequence[TrainingSample], share: float, never: frozenset[str] = frozenset()
) -> tuple[list[TrainingSample], list[TrainingSample]]:
    """Training and validation samples; no prompt is in both. Keys in ``never`` are in neither."""
    samples = [s for s in samples if s.key not in never]
    train = [s for s in samples if not is_held_out(s.key, share)]
    held = [s for s in samples if is_held_out(s.key, share)]
    if not train:
        raise UsageError("no sample is left for training", "give more data")
    return train, held
