"""Text as it may be shown: without control codes, with the thought apart, and with units.

Pure functions over strings. The conversation keeps what the model produced as it is; the functions
here only make the copy that reaches the terminal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

# CSI, OSC/DCS/SOS/PM/APC strings, and the two- and three-byte escapes.
_ESCAPE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\)"
    r"|\x1b[ -/]*[0-Z\\^-~]"
    r"|\x9b[0-?]*[ -/]*[@-~]",
    re.DOTALL,
)
_NEWLINES = re.compile("\r\n|[\r\x0b\x0c\x85\u2028\u2029]")
# C0 and C1 controls but tab and newline, bidirectional overrides, byte order mark.
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\u202a-\u202e\u2066-\u2069\ufeff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_PENDING = re.compile(r"\x1b(?:[\]PX^_][^\x07]*|\[[0-?]*[ -/]*|[ -/]*)$|\r$", re.DOTALL)
_LONGEST_PENDING = 256

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})[^\n]*\n(.*?)(?:^ {0,3}\1[`~]*[ \t]*$|\Z)", re.M | re.S)
_OPEN = re.compile(r"\s*<think(?:ing)?>\n?")
_CLOSE = re.compile(r"</think(?:ing)?>[ \t]*\n{0,2}")
_LINE_CLOSE = re.compile(r"(?:^|(?<=\n))</think(?:ing)?>[ \t]*\n{0,2}")


def clean(text: str) -> str:
    """``text`` without anything that could steer the terminal; tabs and newlines stay."""
    text = _NEWLINES.sub("\n", _ESCAPE.sub("", text))
    return _SURROGATE.sub("\ufffd", _CONTROL.sub("", text))


def one_line(text: str, limit: int = 60) -> str:
    """``text`` cleaned, white space folded, cut to ``limit`` characters with an ellipsis."""
    line = " ".join(clean(text[: 8 * limit]).split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def fit(text: str, cells: int) -> str:
    """``text`` cut to ``cells`` cells of the terminal, with an ellipsis if anything was cut."""
    if cell_len(text) <= cells:
        return text
    return set_cell_size(text, cells - 1).rstrip() + "…" if cells > 1 else ""


class Cleaner:
    """``clean`` for a stream: an escape sequence split over chunks is still caught."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, chunk: str) -> str:
        text = self._held + chunk
        self._held = ""
        if "\x1b" in text or text.endswith("\r"):
            match = _PENDING.search(text, max(0, len(text) - _LONGEST_PENDING))
            if match:
                self._held = text[match.start() :]
                text = text[: match.start()]
        return clean(text)

    def end(self) -> str:
        held, self._held = self._held, ""
        return clean(held)


@dataclass(frozen=True, slots=True)
class ReplyParts:
    """A reply split for display. ``thinking_open``: the thought has not ended yet."""

    thinking: str
    answer: str
    thinking_open: bool = False


def split_thinking(text: str, expected: bool = False) -> ReplyParts:
    """The thought and the answer of a reply.

    Only text at the very start is a thought, so that a ``<think>`` quoted in an answer stays in
    it. With ``expected`` (thinking was not refused, so the chat template may have opened the
    thought itself) a closing tag on a line of its own ends a thought without an opening tag.
    """
    opened = _OPEN.match(text)
    if opened:
        closed = _CLOSE.search(text, opened.end())
        if closed is None:
            return ReplyParts(text[opened.end() :], "", True)
        return ReplyParts(text[opened.end() : closed.start()].rstrip(), text[closed.end() :])
    if expected and (closed := _LINE_CLOSE.search(text)) and "<think" not in text[: closed.start()]:
        return ReplyParts(text[: closed.start()].rstrip(), text[closed.end() :])
    if "<thinking>".startswith(text.strip()) and text.strip():
        return ReplyParts("", "", True)  # the tag may still be arriving
    return ReplyParts("", text)


def code_blocks(markdown: str) -> list[str]:
    """The contents of the fenced code blocks, in order."""
    return [match.group(2).rstrip("\n") for match in _FENCE.finditer(markdown)]


def size(count: float) -> str:
    """Bytes with a decimal unit, as on disks and model cards."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit in ("B", "kB") else f"{count:.1f} {unit}"
        count /= 1000
    return ""


def count(value: float) -> str:
    """A count in few letters: 812, 1.2k, 128k."""
    if value < 1000:
        return f"{value:.0f}"
    return f"{value / 1000:.1f}k" if value < 10_000 else f"{value / 1000:.0f}k"
