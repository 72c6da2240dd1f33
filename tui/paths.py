"""Where the chat keeps its files; nothing is made before it is needed."""

from __future__ import annotations

import time
from pathlib import Path

import platformdirs

_APP = "dspark-mlx"


def settings_file() -> Path:
    return Path(platformdirs.user_config_dir(_APP, appauthor=False)) / "chat.toml"


def sessions_file() -> Path:
    return Path(platformdirs.user_data_dir(_APP, appauthor=False)) / "chat.sqlite3"


def log_file() -> Path:
    return sessions_file().with_name("chat.log")


def export_dir() -> Path:
    return Path.cwd()


def make_private(folder: Path) -> None:
    """Make ``folder``, readable by its owner only: chats are nobody else's business."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def log_crash(traceback: str) -> str:
    """Add ``traceback`` to the log; returns the line to print once the terminal is restored."""
    try:
        path = log_file()
        make_private(path.parent)
        with path.open("a", encoding="utf-8") as log:
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}\n{traceback}\n")
    except OSError:
        return f"dspark-chat: error: the chat crashed: {traceback.strip().splitlines()[-1]}"
    return f"dspark-chat: error: the chat crashed; the details are in {path}"
