"""Where the chat keeps its files; nothing is created before it is needed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import platformdirs

_APP = "dspark-mlx"


def config_dir() -> Path:
    return Path(platformdirs.user_config_dir(_APP, appauthor=False))


def data_dir() -> Path:
    return Path(platformdirs.user_data_dir(_APP, appauthor=False))


def settings_file() -> Path:
    return config_dir() / "chat.toml"


def sessions_file() -> Path:
    return data_dir() / "chat.sqlite3"


def log_file() -> Path:
    return data_dir() / "chat.log"


def export_dir() -> Path:
    return Path.cwd()


def private(folder: Path) -> None:
    """Make ``folder``, for its owner only: chats are nobody else's business."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def write_atomic(path: Path, text: str) -> None:
    """``path`` holds either its old content or all of ``text``, never a part."""
    private(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
