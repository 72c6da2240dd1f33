"""A conversation as a file: Markdown for people, JSON for programs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from dspark_mlx.files import write_atomically

from . import paths
from .conversation import Conversation, stats_line
from .display_text import clean


def as_markdown(conversation: Conversation) -> str:
    parts = [f"# {conversation.name}\n"]
    if conversation.system.strip():
        parts.append(f"> System: {clean(conversation.system)}\n".replace("\n", "\n> ", 1))
    for message in conversation.messages:
        parts.append("## " + ("You" if message.role == "user" else "Assistant") + "\n")
        parts.append(clean(message.text).rstrip() + "\n")
        if message.note:
            parts.append(f"*{message.state}: {clean(message.note)}*\n")
        if line := stats_line(message.stats):
            parts.append(f"<sub>{line}</sub>\n")
    return "\n".join(parts)


def as_json(conversation: Conversation) -> str:
    return json.dumps(
        {
            "title": conversation.title,
            "system": conversation.system,
            "messages": [
                {
                    "role": message.role,
                    "content": message.text,
                    "state": message.state,
                    "note": message.note,
                    "stats": message.stats,
                }
                for message in conversation.messages
            ],
        },
        ensure_ascii=False,
        indent=2,
    )


def save(conversation: Conversation, folder: Path, kind: str) -> Path:
    """Write the conversation into ``folder`` under a free name. Raises OSError."""
    text = as_markdown(conversation) if kind == "md" else as_json(conversation)
    stem = re.sub(r"[^\w-]+", "-", conversation.name).strip("-").lower()[:48] or "chat"
    path = folder / f"{stem}.{kind}"
    number = 2
    while path.exists():
        path = folder / f"{stem}-{number}.{kind}"
        number += 1
    write_atomically(path, text, mode=0o600)
    return path


def save_and_notify(conversation: Conversation, kind: str, notify: Callable[..., None]) -> None:
    """Save into the export folder and tell the user where, or why not."""
    try:
        path = save(conversation, paths.export_dir(), kind)
    except OSError as error:
        notify(f"Not exported: {error}", severity="error", markup=False)
    else:
        notify(f"Exported to {path}", markup=False)
