"""What the benchmark asks: our own prompts, or files of the same form.

A file is JSON lines. A line has ``turns`` (a list of user messages, of which
the first is asked), ``messages`` (a whole chat) or ``prompt`` (raw text), and
perhaps ``domain`` (or ``category``); the file's name is the domain otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import UsageError

PACKAGED = "data/prompts.jsonl"


@dataclass(frozen=True, slots=True)
class Prompt:
    """``messages`` for the chat template, or ``text`` as it is."""

    domain: str
    messages: tuple[Mapping[str, str], ...] = ()
    text: str | None = None

    @property
    def title(self) -> str:
        words = self.text if self.text is not None else self.messages[-1]["content"]
        return words.strip().splitlines()[0][:60]


def load_prompts(files: Sequence[Path] = (), limit: int | None = None) -> list[Prompt]:
    """The prompts of ``files`` (none: the packaged ones), at most ``limit`` of a domain."""
    found: list[Prompt] = []
    if not files:
        text = resources.files("dspark_mlx").joinpath(PACKAGED).read_text("utf-8")
        found = _parse(text, "prompts", PACKAGED)
    for file in files:
        try:
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the prompts in {file}: {error}") from error
        found += _parse(text, file.stem, str(file))
    counts: dict[str, int] = {}
    kept = []
    for prompt in found:
        counts[prompt.domain] = counts.get(prompt.domain, 0) + 1
        if limit is None or counts[prompt.domain] <= limit:
            kept.append(prompt)
    if not kept:
        raise UsageError("there are no prompts to run", "give --prompts FILE with JSON lines")
    return kept


def _parse(text: str, domain: str, name: str) -> list[Prompt]:
    prompts = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_prompt(json.loads(line), domain))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            raise UsageError(
                f"{name}, line {number}: not a prompt",
                'a line is like {"domain": "chat", "turns": ["Hello"]}',
            ) from None
    return prompts


def _prompt(data: Mapping[str, Any], domain: str) -> Prompt:
    domain = str(data.get("domain") or data.get("category") or domain)
    if "messages" in data:
        chat = [{"role": str(m["role"]), "content": str(m["content"])} for m in data["messages"]]
        if not chat:
            raise ValueError("no messages")
        return Prompt(domain, tuple(chat))
    if "prompt" in data:
        return Prompt(domain, text=_text(data["prompt"]))
    turns = data["turns"]
    return Prompt(domain, ({"role": "user", "content": _text(turns[0])},))


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("no text")
    return value
