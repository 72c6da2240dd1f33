from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tui import clipboard


@pytest.fixture
def pbcopy(tmp_path: Path) -> Path:
    """A pbcopy that writes what it is given to a file."""
    folder = tmp_path / "bin"
    folder.mkdir()
    tool = folder / "pbcopy"
    tool.write_text(f"#!/bin/sh\n/bin/cat > {tmp_path}/copied\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    return folder


def test_the_systems_tool_goes_first_at_home(pbcopy: Path, tmp_path: Path) -> None:
    sent: list[str] = []
    how = clipboard.copy("ünï\ncode", sent.append, {"PATH": str(pbcopy)})
    assert how == "Copied" and sent == []
    assert (tmp_path / "copied").read_text() == "ünï\ncode"


def test_over_ssh_the_terminal_is_asked(pbcopy: Path) -> None:
    sent: list[str] = []
    clipboard.copy("x", sent.append, {"PATH": str(pbcopy), "SSH_TTY": "/dev/pts/1"})
    assert sent == ["x"]


def test_without_a_tool_or_with_a_broken_one_the_terminal_is_asked(tmp_path: Path) -> None:
    sent: list[str] = []
    clipboard.copy("x", sent.append, {"PATH": str(tmp_path)})
    tool = tmp_path / "pbcopy"
    tool.write_text("#!/bin/sh\nexit 1\n")
    tool.chmod(0o755)
    clipboard.copy("y", sent.append, {"PATH": str(tmp_path)})
    assert sent == ["x", "y"]


def test_x11_and_wayland_tools_need_their_display(tmp_path: Path) -> None:
    for name in ("wl-copy", "xclip"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": str(tmp_path)}
    assert clipboard.tool(path) is None
    assert clipboard.tool(path | {"DISPLAY": ":0"}) == (
        f"{tmp_path}/xclip", "-selection", "clipboard",
    )  # fmt: skip
    assert clipboard.tool(path | {"WAYLAND_DISPLAY": "w"}) == (f"{tmp_path}/wl-copy",)
