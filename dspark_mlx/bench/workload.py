"""What a benchmark runs: prompts, how often, and methods crossed with schedules. Pure.

A file of prompts is JSON lines. A line has ``turns`` (a list of user messages; the first is
asked), ``messages`` (a whole chat) or ``prompt`` (raw text), and perhaps ``domain`` (or
``category``); otherwise the file's name is the domain.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..request import METHODS
from ..schedule import POLICIES

PACKAGED = "data/prompts.jsonl"


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """``messages`` for the chat template, or raw ``text``."""

    domain: str
    messages: tuple[Mapping[str, str], ...] = ()
    text: str | None = None

    @property
    def title(self) -> str:
        words = self.text if self.text is not None else self.messages[-1]["content"]
        return words.strip().splitlines()[0][:60]


@dataclass(frozen=True, slots=True)
class Workload:
    """What every system answers: all ``prompts``, ``repeats`` times, at every concurrency
    (requests in flight) and temperature, with at most ``tokens`` a reply.

    ``clock``: seconds by the "wall", or of this process's processor time ("cpu").
    """

    prompts: Sequence[BenchPrompt]
    concurrency: Sequence[int] = (1,)
    temperatures: Sequence[float] = (0.0,)
    tokens: int = 64
    repeats: int = 1
    seed: int = 0
    clock: str = "wall"


def load_prompts(files: Sequence[Path] = (), limit: int | None = None) -> list[BenchPrompt]:
    """The prompts of ``files``, or the packaged ones; at most ``limit`` of a domain.

    Raises UsageError for a file that cannot be read or a line that is not a prompt.
    """
    found: list[BenchPrompt] = []
    if not files:
        text = resources.files("dspark_mlx").joinpath(PACKAGED).read_text("utf-8")
        found = _parse(text, "prompts", PACKAGED)
    for file in files:
        try:
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the prompts in {file}: {error}") from error
        found += _parse(text, file.stem, str(file))
    counts: Counter[str] = Counter()
    kept = []
    for prompt in found:
        counts[prompt.domain] += 1
        if limit is None or counts[prompt.domain] <= limit:
            kept.append(prompt)
    if not kept:
        raise UsageError("there are no prompts to run", "give --prompts FILE with JSON lines")
    return kept


def _parse(text: str, domain: str, name: str) -> list[BenchPrompt]:
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


def _prompt(data: Mapping[str, Any], domain: str) -> BenchPrompt:
    domain = str(data.get("domain") or data.get("category") or domain)
    if "messages" in data:
        chat = [{"role": str(m["role"]), "content": str(m["content"])} for m in data["messages"]]
        if not chat:
            raise ValueError("no messages")
        return BenchPrompt(domain, tuple(chat))
    if "prompt" in data:
        return BenchPrompt(domain, text=_text(data["prompt"]))
    return BenchPrompt(domain, ({"role": "user", "content": _text(data["turns"][0])},))


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("no text")
    return value


# -- methods and schedules ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Variant:
    """One method under one schedule. ``options`` are those of ``make_policy``."""

    method: str
    schedule: str
    label: str
    options: dict[str, Any] = field(default_factory=dict, hash=False)


def variants(methods: Sequence[str], schedules: Sequence[str]) -> list[Variant]:
    """Every method under every schedule; plain decoding ("none") once.

    A schedule is the name of a policy, ``fixed:N`` (draft and verify N tokens) or
    ``threshold:P`` (cut where survival falls below P). Raises UsageError for an unknown name
    and for one that is given twice.
    """
    made: list[Variant] = []
    for method in methods:
        if method not in METHODS:
            raise UsageError(f"no method named {method!r}", f"choose from {', '.join(METHODS)}")
        if method == "none":
            made.append(Variant("none", "off", "none"))
            continue
        for spec in schedules:
            name, options = parse_schedule(spec)
            made.append(Variant(method, name, f"{method} {spec}", options))
    for label, times in Counter(variant.label for variant in made).items():
        if times > 1:
            raise UsageError(f"{label} is named twice")
    return made


def parse_schedule(spec: str) -> tuple[str, dict[str, Any]]:
    """The name of the policy, and the options of ``make_policy`` that ``spec`` gives."""
    name, _, value = spec.partition(":")
    if name not in POLICIES:
        raise UsageError(f"no schedule named {name!r}", f"choose from {', '.join(POLICIES)}")
    options: dict[str, Any] = {}
    try:
        if name == "fixed" and value:
            options["draft_length"] = int(value)
        elif name == "threshold":
            options["p_survival_min"] = float(value or 0.5)
        elif value:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"the schedule {spec!r} makes no sense", "write fixed:4, threshold:0.5 or just auto"
        ) from None
    return name, options
