"""The chat's settings: one table of options, one frozen value, one TOML file.

``Settings`` declares each option once: its default, its check, its flag and the words that explain
it in ``--help`` and in the form. In the file a person's comments and unknown keys are kept, and a
wrong value is named and replaced by its default, so that a bad file never stops the chat.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from dspark_mlx.errors import UsageError
from dspark_mlx.files import write_atomically
from dspark_mlx.request import DRAFT_SAMPLINGS, METHODS, Cuts, SamplingParams

from . import paths

SCHEDULES = ("auto", "early-stop", "lagged", "fixed", "threshold", "off")


@dataclass(frozen=True, slots=True)
class About:
    """What is known of a setting beside its type and default: ``flag`` is on the command line."""

    help: str
    flag: str = ""
    choices: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be set. An empty text and None stand for "automatic"."""

    model: Annotated[str, About("a name, folder or Hub id", "--model")] = ""
    drafter: Annotated[str, About("empty: the model's own; none: without", "--drafter")] = ""
    system: Annotated[str, About("system prompt of new chats", "--system")] = ""
    method: Annotated[str, About("how to draft", "--method", METHODS)] = "auto"
    schedule: Annotated[str, About("how much of a draft is verified", "--schedule", SCHEDULES)] = (
        "auto"
    )
    temperature: Annotated[float, About("0: always the most likely token", "--temp")] = 0.0
    top_p: Annotated[float, About("nucleus (1: off)", "--top-p")] = 1.0
    top_k: Annotated[int, About("top k (0: off)", "--top-k")] = 0
    min_p: Annotated[float, About("min-p (0: off)", "--min-p")] = 0.0
    seed: Annotated[int | None, About("repeats a sampled reply", "--seed")] = None
    max_tokens: Annotated[int, About("per reply; -1: no limit", "--max-tokens")] = 1024
    draft_sampling: Annotated[
        str, About("how drafts are drawn above temperature 0", choices=DRAFT_SAMPLINGS)
    ] = "coupled"
    draft_length: Annotated[int | None, About("most draft tokens a round", "--draft-length")] = None
    p_min: Annotated[float, About("cut before a lower confidence", "--p-min")] = 0.0
    p_survival_min: Annotated[float, About("cut before a lower survival", "--p-survival-min")] = 0.0
    thinking: Annotated[str, About("for models that can", "--thinking", ("auto", "on", "off"))] = (
        "auto"
    )
    kv_bits: Annotated[int, About("KV cache; 0: not quantised", "--kv-bits", (0, 8, 4))] = 0
    theme: Annotated[str, About("colours", "--theme")] = ""
    live_panel: Annotated[bool, About("right: on; charts beside the chat")] = True
    token_colours: Annotated[bool, About("right: on; colour tokens by origin")] = False
    keys: Annotated[dict[str, str], About("one a line, such as: chat.new = ctrl+n")] = field(
        default_factory=dict
    )

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

    def load_options(self) -> dict[str, Any]:
        """The fields of ``dspark_mlx.loading.LoadOptions`` beside model, method and schedule."""
        options = {"drafter": self.drafter, "kv_bits": self.kv_bits}
        return {name: value for name, value in options.items() if value}


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table that ``Settings`` declares."""

    kind: Any  # its type
    default: Any
    about: About


def _options() -> dict[str, Option]:
    hints = get_type_hints(Settings, include_extras=True)
    parts = {name: get_args(hint) for name, hint in hints.items()}
    return {n: Option(kind, getattr(Settings(), n), about) for n, (kind, about) in parts.items()}


OPTIONS = _options()


def parse(name: str, value: Any) -> Any:
    """``value`` (from TOML, or text from a form or a flag) as the setting ``name`` has it.

    Raises UsageError with one line that names the setting and what it may be.
    """
    if name not in OPTIONS:
        raise UsageError(f"no such setting: {name}")
    kind, choices = OPTIONS[name].kind, OPTIONS[name].about.choices
    if kind == int | None:
        if value in (None, "", "auto"):
            return None
        kind = int
    if kind is int or kind is float:
        value = _number(name, kind, value)
    elif kind is bool or kind is str:
        if not isinstance(value, kind):
            raise UsageError(f"{name} must be {'text' if kind is str else 'true or false'}")
    elif isinstance(value, Mapping):
        value = {str(action): str(key) for action, key in value.items()}
    else:
        raise UsageError(f"{name} must be a table of action = key")
    if choices and value not in choices:
        raise UsageError(f"{name} must be one of {', '.join(map(str, choices))}")
    if name == "max_tokens" and value != -1 and value <= 0:
        raise UsageError("max_tokens must be positive, or -1 for no limit")
    for checked_by in (SamplingParams, Cuts):
        if name in checked_by.__dataclass_fields__:
            checked_by(**{name: value})
    return value


def _number(name: str, kind: type[int] | type[float], value: Any) -> float | int:
    what = "a whole number" if kind is int else "a number"
    try:
        if isinstance(value, bool):
            raise TypeError
        number: float | int = kind(value.strip() if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{name} must be {what}, not {str(value)[:20]!r}") from None
    if isinstance(value, float) and number != value:
        raise UsageError(f"{name} must be {what}, not {value}")
    return number


class SettingsFile:
    """The TOML file behind the settings. ``problems`` has a line for each value not used."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.problems: list[str] = []
        self._text = ""
        self._broken = False

    def load(self) -> Settings:
        self.problems = []
        if self.path is None or not self.path.exists():
            return Settings()
        try:
            self._text = self.path.read_text(encoding="utf-8")
            table = tomllib.loads(self._text)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            self._text, self._broken = "", True
            self.problems.append(f"{self.path} is not used: {error}")
            return Settings()
        good: dict[str, Any] = {}
        for name in table:
            if name not in OPTIONS:
                continue
            try:
                good[name] = parse(name, table[name])
            except UsageError as error:
                self.problems.append(f"{self.path}: {error.message}")
        return Settings(**good)

    def save(self, settings: Settings) -> None:
        """Write what differs from the defaults; comments and other keys stay. Raises OSError."""
        if self.path is None:
            return
        import tomlkit  # here, as the first paint does not need it

        if self._broken:  # keep what the user wrote by hand
            self.path.replace(self.path.with_suffix(".broken.toml"))
            self._broken = False
        document = tomlkit.parse(self._text)
        for name, option in OPTIONS.items():
            value = getattr(settings, name)
            if value == option.default:
                document.pop(name, None)
            elif name not in document or document[name] != value:
                document[name] = value
        paths.make_private(self.path.parent)
        self._text = tomlkit.dumps(document)
        write_atomically(self.path, self._text, mode=0o600)


class Preferences:
    """The settings in use: those of the file, and for this run those of the command line."""

    def __init__(self, file: SettingsFile, pinned: Mapping[str, Any] | None = None) -> None:
        self.file = file
        self._kept = file.load()
        self.now = dataclasses.replace(self._kept, **(pinned or {}))

    def change(self, **values: Any) -> None:
        """Change settings for now and for the next start. Raises OSError if the file cannot be
        written; the change holds for now even then."""
        self.now = dataclasses.replace(self.now, **values)
        self._kept = dataclasses.replace(self._kept, **values)
        self.file.save(self._kept)
