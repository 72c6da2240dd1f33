"""The known models: ``models.toml`` and the user's own file, as typed entries.

This module alone reads the two files. It resolves what a user writes (a name, a folder, a
Hub id) to a ModelEntry; ``sources`` gets the files. mlx is not needed.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import platformdirs

from . import sources
from .errors import ModelError, UsageError
from .sources import FolderSource, HubSource, Source

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One pair of target and drafter. Sizes are in bytes; 0 and None mean unknown.

    ``thinking`` is the mode of the replies the drafter was trained on, None for
    targets without such a mode. ``drafter`` is None where no drafter is known.
    """

    name: str
    target: str
    drafter: str | None = None
    title: str = ""
    license: str = ""
    drafter_license: str = ""
    parameters: int = 0
    target_bytes: int = 0
    drafter_bytes: int = 0
    thinking: bool | None = None
    quantization: str = ""
    context: int = 0
    notes: str = ""

    @property
    def target_source(self) -> Source:
        return sources.parse(self.target)

    @property
    def drafter_source(self) -> Source | None:
        return sources.parse(self.drafter) if self.drafter else None

    @property
    def download_bytes(self) -> int:
        return self.target_bytes + self.drafter_bytes

    def memory_bytes(self, *, float32: bool) -> int:
        """Roughly the bytes that decoding needs: weights, a tenth more for caches, and 0.5 GB.

        ``float32`` is for the CPU, where quantised weights are unpacked for speed.
        """
        target = max(self.target_bytes, 4 * self.parameters if float32 else 0)
        drafter = self.drafter_bytes * (2 if float32 else 1)
        return int((target + drafter) * 1.1) + 500_000_000


def user_file() -> Path:
    """``~/.config/dspark-mlx/models.toml``, on macOS below ``~/Library/Application Support``."""
    return Path(platformdirs.user_config_dir("dspark-mlx", appauthor=False)) / "models.toml"


class Registry(Mapping[str, ModelEntry]):
    """Model entries by name, in the order of their files."""

    def __init__(self, entries: Mapping[str, ModelEntry]) -> None:
        self._entries = dict(entries)

    @classmethod
    def load(cls, extra: Path | None = None) -> Registry:
        """The built-in entries and those of ``extra``, by default the user's file if there is one.

        Raises UsageError that names file, line and key where a file is wrong.
        """
        entries = _read(_builtin_file())
        path = user_file() if extra is None else extra
        if extra is not None or path.exists():
            entries |= _read(path)
        return cls(entries)

    def __getitem__(self, name: str) -> ModelEntry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def resolve(self, model: str) -> ModelEntry:
        """The entry that ``model`` means: a name, a folder, or a Hub id such as org/name.

        A Hub id that is the target of an entry gives that entry, with its
        drafter. Raises UsageError, with close matches, for an unknown name and
        ModelError for a folder that does not exist.
        """
        if model in self._entries:
            return self._entries[model]
        if ":" not in model and "/" not in model and not sources.is_folder(model):
            raise self._unknown(model)
        source = sources.parse(model)
        if isinstance(source, FolderSource) and not source.path.is_dir():
            raise ModelError(f"there is no folder {source.path}", "check the path to the model")
        for entry in self._entries.values():
            if isinstance(source, HubSource) and entry.target_source == source:
                return entry
        if isinstance(source, FolderSource):
            path = source.path.resolve()
            return ModelEntry(name=path.name, target=str(path))
        return ModelEntry(name=model, target=model)

    def _unknown(self, model: str) -> UsageError:
        close = difflib.get_close_matches(model, self._entries, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        return UsageError(f"no model named {model!r}", f"{hint}see `dspark models`")


def _builtin_file() -> Path:
    """Beside this module in an installed wheel, at the root of the project in a checkout."""
    packaged = Path(str(resources.files("dspark_mlx"))) / "models.toml"
    return packaged if packaged.exists() else packaged.parent.parent / "models.toml"


def _read(path: Path) -> dict[str, ModelEntry]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        tables = tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "check the file") from None
    except (ValueError, RecursionError) as error:  # TOML or UTF-8; the message has line and column
        raise UsageError(f"{path} is not valid TOML: {error}", "correct the file") from None
    return {name: _entry(path, text, name, table) for name, table in tables.items()}


def _entry(path: Path, text: str, name: str, table: Any) -> ModelEntry:
    def wrong(key: str, what: str) -> UsageError:
        return UsageError(f"{path}, line {_line(text, name, key)}: {what}", "correct the file")

    if not isinstance(table, dict):
        raise wrong("", f"{name} is not a table; write [{name}] and its keys below")
    types_ = typing.get_type_hints(ModelEntry)
    allowed = [field.name for field in dataclasses.fields(ModelEntry) if field.name != "name"]
    for key, value in table.items():
        if key not in allowed:
            close = difflib.get_close_matches(key, allowed, n=1)
            meant = f", meant {close[0]}?" if close else ""
            raise wrong(key, f"[{name}] has an unknown key {key}{meant}")
        if not _fits(value, types_[key]):
            raise wrong(key, f"[{name}] {key} must be {_TYPE_NAMES[_kinds(types_[key])[0]]}")
        if isinstance(value, int) and value < 0:
            raise wrong(key, f"[{name}] {key} must not be negative")
    if not table.get("target"):
        raise wrong("", f"[{name}] has no target")
    for key in ("target", "drafter"):
        if table.get(key):
            try:
                sources.parse(table[key])
            except UsageError as error:
                raise wrong(key, f"[{name}] {key}: {error.message}") from None
    return ModelEntry(name=name, **table)


_TYPE_NAMES = {str: "a text in quotes", int: "a whole number", bool: "true or false"}


def _kinds(type_: Any) -> tuple[type, ...]:
    kinds = typing.get_args(type_) if isinstance(type_, types.UnionType) else (type_,)
    return tuple(kind for kind in kinds if kind is not types.NoneType)


def _fits(value: Any, type_: Any) -> bool:
    return type(value) in _kinds(type_)  # exactly: true is not a number here


def _line(text: str, name: str, key: str) -> int:
    """The line of ``key`` in the table ``name``, or of the table's own head."""
    head = 1
    inside = False
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.strip()
        if words.startswith("["):
            inside = words.strip("[] \"'") == name
            head = number if inside else head
        elif inside and key and words.partition("=")[0].strip(" \"'") == key:
            return number
        elif not inside and words.partition("=")[0].strip() == name:
            head = number
    return head
