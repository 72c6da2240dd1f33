"""The chat's settings: one table of options, one frozen value, one TOML file.

``Settings`` declares each option once: its default, its check, its flag and the words that explain
it in ``--help`` and in the form. In the file a person's comments and unknown keys are kept, and a
wrong value is named and replaced by its default, so that a bad file never stops the chat.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark_mlx.errors import UsageError
from dspark_mlx.files import write_atomically
from dspark_mlx.request import DRAFT_SAMPLINGS, METHODS, Cuts, SamplingParams

from . import paths

SCHEDULES = ("auto", "early-stop", "lagged", "fixed", "threshold", "off")


def _max_tokens(max_tokens: int) -> None:
    if max_tokens != -1 and max_tokens <= 0:
        raise UsageError("max_tokens must be positive, or -1 for no limit")


@dataclass(frozen=True, slots=True)
class Option:
    """What is known of one setting beside its default.

    ``kind`` is the type as written in ``Settings``; ``check`` is called with ``name=value`` and
    raises UsageError for a value out of range.
    """

    name: str
    kind: str
    default: Any
    help: str
    flag: str = ""
    choices: tuple[Any, ...] = ()
    check: Callable[..., Any] | None = None

    @property
    def optional(self) -> bool:
        return self.kind.endswith("| None")


def _about(help: str, flag: str = "", **more: Any) -> dict[str, Any]:
    return {"help": help, "flag": flag, **more}


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be set. An empty text and None stand for "automatic"."""

    model: str = field(
        default="",
        metadata=_about("a name from `dspark models`, a folder or a Hub id", "--model"),
    )
    drafter: str = field(
        default="",
        metadata=_about("a folder or Hub id; empty: the model's own; none", "--drafter"),
    )
    system: str = field(default="", metadata=_about("system prompt of new chats", "--system"))
    method: str = field(
        default="auto", metadata=_about("how to draft", "--method", choices=METHODS)
    )
    schedule: str = field(
        default="auto",
        metadata=_about("how much of a draft is verified", "--schedule", choices=SCHEDULES),
    )
    temperature: float = field(
        default=0.0,
        metadata=_about("0: always the most likely token", "--temp", check=SamplingParams),
    )
    top_p: float = field(
        default=1.0, metadata=_about("nucleus sampling; 1: off", "--top-p", check=SamplingParams)
    )
    top_k: int = field(
        default=0, metadata=_about("top-k sampling; 0: off", "--top-k", check=SamplingParams)
    )
    min_p: float = field(
        default=0.0, metadata=_about("min-p sampling; 0: off", "--min-p", check=SamplingParams)
    )
    seed: int | None = field(
        default=None,
        metadata=_about(
            "repeats a sampled reply; empty: new each time", "--seed", check=SamplingParams
        ),
    )
    max_tokens: int = field(
        default=1024,
        metadata=_about("longest reply; -1: no limit", "--max-tokens", check=_max_tokens),
    )
    draft_sampling: str = field(
        default="coupled",
        metadata=_about("how drafts are drawn above temperature 0", choices=DRAFT_SAMPLINGS),
    )
    draft_length: int | None = field(
        default=None,
        metadata=_about("most draft tokens verified a round", "--draft-length", check=Cuts),
    )
    p_min: float = field(
        default=0.0, metadata=_about("cut before a lower confidence", "--p-min", check=Cuts)
    )
    p_survival_min: float = field(
        default=0.0,
        metadata=_about("cut before a lower survival", "--p-survival-min", check=Cuts),
    )
    thinking: str = field(
        default="auto",
        metadata=_about("for models that can think", "--thinking", choices=("auto", "on", "off")),
    )
    kv_bits: int = field(
        default=0, metadata=_about("quantise the KV cache; 0: off", "--kv-bits", choices=(0, 8, 4))
    )
    theme: str = field(default="", metadata=_about("colours", "--theme"))
    live_panel: bool = field(default=True, metadata=_about("right: on; charts beside the chat"))
    token_colours: bool = field(
        default=False, metadata=_about("right: on; colour tokens by origin")
    )
    keys: dict[str, str] = field(
        default_factory=dict, metadata=_about("one a line, such as: chat.new = ctrl+n")
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


_DEFAULTS = Settings()
OPTIONS = {
    f.name: Option(f.name, str(f.type), getattr(_DEFAULTS, f.name), **f.metadata)
    for f in dataclasses.fields(Settings)
}


def parse(name: str, value: Any) -> Any:
    """``value`` (from TOML, or text from a form or a flag) as the setting ``name`` has it.

    Raises UsageError with one line that names the setting and what it may be.
    """
    if name not in OPTIONS:
        raise UsageError(f"no such setting: {name}")
    option = OPTIONS[name]
    if option.optional and value in (None, "", "auto"):
        return None
    if option.kind.startswith(("int", "float")):
        value = _number(option, value)
    elif option.kind.startswith("dict"):
        if not isinstance(value, Mapping):
            raise UsageError(f"{name} must be a table of action = key")
        value = {str(action): str(key) for action, key in value.items()}
    elif option.kind == "bool" and not isinstance(value, bool):
        raise UsageError(f"{name} must be true or false")
    elif option.kind == "str" and not isinstance(value, str):
        raise UsageError(f"{name} must be text")
    if option.choices and value not in option.choices:
        raise UsageError(f"{name} must be one of {', '.join(map(str, option.choices))}")
    if option.check is not None:
        option.check(**{name: value})
    return value


def _number(option: Option, value: Any) -> float | int:
    whole = option.kind.startswith("int")
    kind, what = (int, "a whole number") if whole else (float, "a number")
    try:
        if isinstance(value, bool):
            raise TypeError
        number: float | int = kind(value.strip() if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{option.name} must be {what}, not {str(value)[:20]!r}") from None
    if isinstance(value, float) and number != value:
        raise UsageError(f"{option.name} must be {what}, not {value}")
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
