"""Copies text: with the system's own tool, or over SSH with the terminal's escape sequence."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping

_TOOLS: tuple[tuple[str, ...], ...] = (
    ("pbcopy",),
    ("wl-copy",),
    ("xclip", "-selection", "clipboard"),
    ("xsel", "--clipboard", "--input"),
)


def remote(environ: Mapping[str, str]) -> bool:
    return bool(environ.get("SSH_CONNECTION") or environ.get("SSH_TTY"))


def tool(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The command that fills the clipboard the user sees; None if the terminal must do it.

    Over SSH a tool would fill the clipboard of the wrong machine. On the user's own machine the
    tool goes first, as Terminal.app ignores the escape sequence.
    """
    if remote(environ):
        return None
    for command in _TOOLS:
        if command[0] == "wl-copy" and not environ.get("WAYLAND_DISPLAY"):
            continue
        if command[0] in ("xclip", "xsel") and not environ.get("DISPLAY"):
            continue
        if found := shutil.which(command[0], path=environ.get("PATH")):
            return (found, *command[1:])
    return None


def copy(text: str, osc52: Callable[[str], None], environ: Mapping[str, str] | None = None) -> str:
    """Copy ``text``; returns how, in words fit for a notice."""
    environ = os.environ if environ is None else environ
    command = tool(environ)
    if command:
        try:
            subprocess.run(
                command,
                input=text.encode("utf-8", "replace"),
                check=True,
                timeout=3,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            return "Copied"
        except (OSError, subprocess.SubprocessError):
            pass
    osc52(text)
    return "Sent to the terminal"
