"""What the engine reports: one typed, frozen event stream, to and from JSON.

The same events feed the terminal app, ``--trace run.jsonl``, the benchmark and
the replay backend, so everything that is shown can be recorded and shown again
without a model. Standard library only; every field is a plain value. Times are
seconds, sizes bytes, positions absolute (0 = first prompt token).
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Origin = Literal["draft", "target"]


@dataclass(frozen=True, slots=True)
class Loading:
    """Progress of getting a model ready. ``total`` 0: unknown."""

    stage: Literal["download", "convert", "load", "check", "profile"]
    done: int
    total: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model is ready. ``method`` is what ``auto`` chose and ``reason`` why.

    ``details`` says in one line how the drafter's checkpoint was read.
    """

    model: str
    drafter: str | None
    method: str
    reason: str
    schedule: str
    block: int
    context_limit: int
    weight_bytes: int
    plain_tps: float | None = None
    details: str = ""


@dataclass(frozen=True, slots=True)
class CostTable:
    """Measured target step seconds over rows x width, and the draft's over rows x block."""

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    step_seconds: tuple[tuple[float, ...], ...]
    draft_seconds: tuple[tuple[float, ...], ...]
    draft_widths: tuple[int, ...]
    overhead_seconds: float
    context: int = 0


@dataclass(frozen=True, slots=True)
class Queued:
    """A request was accepted; ``ahead`` requests wait before it."""

    request_id: str
    ahead: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prompt progress: ``done`` of ``total`` tokens are in the cache, ``reused`` were there."""

    request_id: str
    done: int
    total: int
    reused: int


@dataclass(frozen=True, slots=True)
class Token:
    """One committed token. ``text`` may be empty while UTF-8 or a stop string is pending."""

    id: int
    text: str
    origin: Origin
    confidence: float | None = None
    survival: float | None = None


@dataclass(frozen=True, slots=True)
class RowStep:
    """What one round did for one request.

    The proposer drafted ``drafted`` (with ``draft_texts``), the scheduler sent
    the first ``scheduled`` of them to the target, which accepted the first
    ``accepted``; ``tokens`` are those committed, the last of them the target's
    own unless the reply ended inside the draft. ``confidence`` and
    ``survival`` (their running product, calibrated) have one entry per drafted
    token, or none where they were not computed. ``reason`` says why the cut
    fell there. ``curve`` is the scheduler's expected tokens/s for each
    possible length 0..len(drafted), or empty. ``copied``: the draft was what followed
    when the same tokens occurred before, and cost nothing.
    """

    request_id: str
    position: int
    method: str
    drafted: tuple[int, ...]
    draft_texts: tuple[str, ...]
    confidence: tuple[float, ...]
    survival: tuple[float, ...]
    scheduled: int
    accepted: int
    tokens: tuple[Token, ...]
    reason: str = ""
    curve: tuple[float, ...] = ()
    calibrated: bool = False
    copied: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the device is: ``slowdown`` is measured over predicted step time."""

    active: int = 0
    queued: int = 0
    slowdown_fast: float = 1.0
    slowdown_slow: float = 1.0
    host: float | None = None
    memory_pressure: float | None = None
    thermal: str | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes held by the weights and the KV caches, and the peak of the process."""

    weights: int = 0
    kv: int = 0
    peak: int = 0


@dataclass(frozen=True, slots=True)
class StepDone:
    """One round of the engine over all its decoding rows.

    ``round_seconds`` is the whole round; ``draft_seconds`` and
    ``verify_seconds`` are the device's share where they could be told apart
    (0.0 for the draft when it ran in one graph with the verification);
    ``host_seconds`` is the rest, less the calls of the target model that build
    its graph. ``predicted_seconds`` is what the scheduler
    expected of the round. ``syncs`` counts how often the host waited. ``policy`` is
    the one that was asked for and ``rule`` which of its rules decided this round.
    """

    step: int
    time: float
    rows: tuple[RowStep, ...]
    policy: str
    round_seconds: float
    draft_seconds: float
    verify_seconds: float
    host_seconds: float
    predicted_seconds: float | None
    predicted_tps: float | None
    tps: float
    syncs: int
    load: Load
    memory: Memory
    rule: str = ""


FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class Finished:
    """A request has ended. ``reached[k]`` rounds verified position k, ``survived[k]`` accepted."""

    request_id: str
    reason: FinishReason
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generation_tokens: int = 0
    prompt_seconds: float = 0.0
    first_token_seconds: float = 0.0
    generation_seconds: float = 0.0
    rounds: int = 0
    drafted: int = 0
    scheduled: int = 0
    accepted: int = 0
    reached: tuple[int, ...] = ()
    survived: tuple[int, ...] = ()
    method: str = "none"
    seed: int | None = None
    message: str = ""
    hint: str = ""
    tail: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """Something that is no single request's fault (load, download, engine); the engine goes on."""

    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """A line worth telling once, such as why speculation is off."""

    message: str


Event: TypeAlias = (
    Loading | Loaded | CostTable | Queued | Prefill | StepDone | Finished | Failed | Notice
)
KINDS: dict[str, type] = {cls.__name__: cls for cls in typing.get_args(Event)}


def to_json(event: Event) -> str:
    """One line of JSON, ``{"event": KIND, ...}``; not-a-number floats become null."""
    return json.dumps(
        {"event": type(event).__name__, **_plain(event)}, ensure_ascii=False, allow_nan=False
    )


def from_json(line: str) -> Event:
    """The inverse of ``to_json``. Unknown fields are ignored, so old readers read new traces.

    Raises ValueError for a line that is not an event.
    """
    try:
        data = json.loads(line, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("not a dspark event: nested too deeply") from None
    kind = data.get("event") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"not a dspark event: {line[:80]!r}")
    try:
        return typing.cast(Event, _build(KINDS[kind], data))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a dspark event: {error}") from error


def _no_number(text: str) -> None:
    raise ValueError(f"not a dspark event: {text} is no number")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not (abs(value) < float("inf")):
        return None
    return value


_HINTS: dict[type, dict[str, Any]] = {}


def _build(kind: Any, value: Any) -> Any:
    """``value`` (parsed JSON) as an instance of the annotated type ``kind``."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = _HINTS.get(kind)
        if hints is None:
            hints = _HINTS[kind] = typing.get_type_hints(kind)
        return kind(
            **{name: _build(hint, value[name]) for name, hint in hints.items() if name in value}
        )
    origin = typing.get_origin(kind)
    if origin is tuple:
        return tuple(_build(typing.get_args(kind)[0], v) for v in value)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _build(next(a for a in typing.get_args(kind) if a is not type(None)), value)
    if value is None:
        return float("nan") if kind is float else value
    return float(value) if kind is float else value
