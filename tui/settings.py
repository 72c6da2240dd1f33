"""The chat's settings: one frozen value, kept in a TOML file a person can edit.

Unknown keys in the file are kept, wrong values are named and replaced by their
defaults, and writing is atomic: a bad file never stops the chat.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark_mlx.errors import UsageError
from dspark_mlx.request import DRAFT_SAMPLINGS, METHODS, Cuts, SamplingParams

from .paths import write_atomic

SCHEDULES = ("auto", "early-stop", "lagged", "fixed", "threshold", "off")
THINKING = ("auto", "on", "off")
KV_BITS = (0, 8, 4)


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be set. 0 means off for top_k, min_p, kv_bits; None means automatic."""

    model: str = ""
    drafter: str = ""
    system: str = ""
    method: str = "auto"
    schedule: str = "auto"
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 1024
    draft_sampling: str = "coupled"
    draft_length: int | None = None
    p_min: float = 0.0
    p_survival_min: float = 0.0
    thinking: str = "auto"
    kv_bits: int = 0
    theme: str = ""
    live_panel: bool = True
    token_colours: bool = False
    keys: dict[str, str] = field(default_factory=dict)

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            draft_sampling=self.draft_sampling,  # type: ignore[arg-type]
        )

    def cuts(self) -> Cuts:
        return Cuts(self.draft_length, self.p_min, self.p_survival_min)

    @property
    def think(self) -> bool | None:
        return {"on": True, "off": False}.get(self.thinking)

    def options(self) -> dict[str, Any]:
        """What ``Backend.load`` needs beside model, method and schedule."""
        options: dict[str, Any] = {}
        if self.drafter:
            options["drafter"] = self.drafter
        if self.kv_bits:
            options["kv_bits"] = self.kv_bits
        return options


FIELDS = {f.name: f for f in dataclasses.fields(Settings)}
_CHOICES: dict[str, tuple[Any, ...]] = {
    "method": METHODS,
    "schedule": SCHEDULES,
    "thinking": THINKING,
    "kv_bits": KV_BITS,
    "draft_sampling": DRAFT_SAMPLINGS,
}
_OPTIONAL = {"seed", "draft_length"}
_FLOATS = {"temperature", "top_p", "min_p", "p_min", "p_survival_min"}
_INTS = {"top_k", "max_tokens", "kv_bits", *_OPTIONAL}


def parse(name: str, value: Any) -> Any:
    """``value`` (from TOML, or text from a form) as the setting ``name`` has it.

    Raises UsageError with one line that names the setting and what it may be.
    """
    if name not in FIELDS:
        raise UsageError(f"no such setting: {name}")
    default = getattr(Settings(), name)
    if name == "keys":
        if not isinstance(value, Mapping):
            raise UsageError("keys must be a table of action = key")
        return {str(action): str(key) for action, key in value.items()}
    if name in _OPTIONAL and value in (None, "", "auto"):
        return None
    if name in _FLOATS or name in _INTS:
        value = _number(name, value)
    elif isinstance(default, bool):
        if not isinstance(value, bool):
            raise UsageError(f"{name} must be true or false")
    elif not isinstance(value, str):
        raise UsageError(f"{name} must be text")
    if name in _CHOICES and value not in _CHOICES[name]:
        allowed = ", ".join(str(choice) for choice in _CHOICES[name])
        raise UsageError(f"{name} must be one of {allowed}")
    check = _CHECKS.get(name)
    if check:
        check(value)
    return value


def _number(name: str, value: Any) -> float | int:
    if isinstance(value, bool):
        raise UsageError(f"{name} must be a number")
    kind: Callable[[Any], float | int] = float if name in _FLOATS else int
    try:
        number = kind(value.strip() if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):
        what = "a number" if name in _FLOATS else "a whole number"
        raise UsageError(f"{name} must be {what}, not {str(value)[:20]!r}") from None
    if isinstance(value, float) and number != value:
        raise UsageError(f"{name} must be a whole number, not {value}")
    return number


def _max_tokens(value: int) -> None:
    if value != -1 and value <= 0:
        raise UsageError("max_tokens must be positive, or -1 for no limit")


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "temperature": lambda v: SamplingParams(temperature=v),
    "top_p": lambda v: SamplingParams(top_p=v),
    "top_k": lambda v: SamplingParams(top_k=v),
    "min_p": lambda v: SamplingParams(min_p=v),
    "seed": lambda v: SamplingParams(seed=v),
    "draft_length": lambda v: Cuts(draft_length=v),
    "p_min": lambda v: Cuts(p_min=v),
    "p_survival_min": lambda v: Cuts(p_survival_min=v),
    "max_tokens": _max_tokens,
}


class SettingsFile:
    """The TOML file behind the settings. ``problems`` holds one line for each value not used."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.problems: list[str] = []
        self._raw: dict[str, Any] = {}
        self._broken = False

    def load(self) -> Settings:
        self.problems = []
        if self.path is None or not self.path.exists():
            return Settings()
        try:
            self._raw = tomllib.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            self._broken = True
            self.problems.append(f"{self.path} is not used: {error}")
            return Settings()
        good: dict[str, Any] = {}
        for name, value in self._raw.items():
            if name not in FIELDS:
                continue
            try:
                good[name] = parse(name, value)
            except UsageError as error:
                self.problems.append(f"{self.path}: {error.message}")
        return Settings(**good)

    def save(self, settings: Settings) -> None:
        """Write what differs from the defaults; raises OSError when it cannot."""
        if self.path is None:
            return
        if self._broken:  # keep what the user wrote by hand
            self.path.replace(self.path.with_suffix(".broken.toml"))
            self._broken = False
        defaults = Settings()
        data = {name: value for name, value in self._raw.items() if name not in FIELDS}
        for name in FIELDS:
            value = getattr(settings, name)
            if value != getattr(defaults, name) and value is not None:
                data[name] = value
        write_atomic(self.path, _toml(data))
        self._raw = data


def _toml(table: Mapping[str, Any], prefix: str = "") -> str:
    """``table`` as TOML. JSON's strings, numbers and flat lists are TOML's as well."""
    tables = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    lines = [
        f"{_key(key)} = {_value(value)}\n" for key, value in table.items() if key not in tables
    ]
    for key, value in tables.items():
        name = f"{prefix}{_key(key)}"
        lines.append(f"\n[{name}]\n{_toml(value, name + '.')}")
    return "".join(lines)


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    return str(value)  # dates and times, as tomllib read them


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else _text(key)


def _text(text: str) -> str:
    # Not ASCII: JSON would escape what is beyond 16 bits as two surrogates, which TOML refuses.
    # DEL is legal in JSON but not in TOML.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
