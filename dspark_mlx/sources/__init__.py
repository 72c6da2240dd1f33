"""From the name of a source to a model folder on this machine.

``parse`` reads the name, ``on_disk`` looks for the folder without any network, and ``fetch``
downloads what is missing. mlx is loaded only to convert a GGUF file.
"""

from __future__ import annotations

import threading
from importlib import resources
from pathlib import Path

from ..errors import ModelError
from . import folder as folders
from .folder import Role, weight_bytes
from .spec import FolderSource, HubSource, PackageSource, Source, WheelSource, is_folder, parse
from .store import Cancelled, Report, default_cache_dir, silent

__all__ = [
    "Cancelled",
    "FolderSource",
    "HubSource",
    "PackageSource",
    "Report",
    "Role",
    "Source",
    "WheelSource",
    "default_cache_dir",
    "fetch",
    "is_folder",
    "on_disk",
    "parse",
    "weight_bytes",
]


def on_disk(source: Source, *, role: Role = "target", cache_dir: Path | None = None) -> Path | None:
    """The whole model folder of ``source`` if it is here; never touches the network."""
    match source:
        case FolderSource(path):
            found: Path | None = path
        case PackageSource(name):
            found = _packaged(name)
        case WheelSource():
            from .wheel import model_folder

            found = model_folder(source, cache_dir or default_cache_dir())
        case HubSource():
            from .hub import snapshot

            found = snapshot(source, cache_dir)
    return found if found is not None and folders.missing(found, role) is None else None


def fetch(
    source: Source,
    *,
    role: Role = "target",
    cache_dir: Path | None = None,
    report: Report = silent,
    cancel: threading.Event | None = None,
    expected_bytes: int = 0,
    refresh: bool = False,
) -> Path:
    """The model folder of ``source``, downloaded and converted as needed.

    A whole folder on the disk is used as it is, without a network call, unless
    ``refresh`` asks whether the Hub's branch has something newer. ``report`` gets
    Loading events; setting ``cancel`` from another thread raises Cancelled soon.
    Raises ModelError or DownloadError, each one line that says what to do.
    """
    if not refresh and (found := on_disk(source, role=role, cache_dir=cache_dir)):
        return found
    match source:
        case WheelSource():
            from . import wheel

            path = wheel.fetch(
                source,
                cache_dir or default_cache_dir(),
                report=report,
                cancel=cancel,
                expected_bytes=expected_bytes,
            )
        case HubSource():
            from . import hub

            path = hub.fetch(source, role=role, cache_dir=cache_dir, report=report, cancel=cancel)
        case PackageSource(name):
            path = _packaged(name)
        case FolderSource(path):
            pass
    if fault := folders.missing(path, role):
        raise ModelError(f"{source} is not a whole {role} model: {fault}", _hint(source, path))
    return path


def _packaged(name: str) -> Path:
    return Path(str(resources.files("dspark_mlx"))) / "data" / "drafters" / name


def _hint(source: Source, path: Path) -> str:
    match source:
        case HubSource():
            return f"choose another repository, or delete {path} and fetch it again"
        case WheelSource():
            return f"delete {path} and fetch it again"
        case PackageSource():
            return "install dspark-chat again"
        case FolderSource():
            return "check the path, or give a name from `dspark models`"
