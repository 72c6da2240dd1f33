"""The draft strip: the draft of one round, where it was cut, what was accepted, and why.

Each drafted token has a column: its text, its confidence, its survival, and whether it was
accepted. The scheduler's cut is a bar between two columns.
"""

from __future__ import annotations

from rich.cells import cell_len

from dspark_mlx.events import RowStep
from dspark_mlx.stats import RequestStats

from ..canvas import Canvas
from ..display_text import clean

_SHOWN = {" ": "·", "\n": "⏎", "\t": "⇥"}
_RAW = "uncalibrated"
_COPIED = "copied from above"
FULL, SHORT = 6, 4  # heights


def token_text(text: str, limit: int = 14) -> str:
    """A token made visible: spaces as dots, line ends as arrows, no control codes."""
    shown = "".join(_SHOWN.get(char, char) for char in clean(text)) or "∅"
    while cell_len(shown) > limit:
        shown = shown[:-1]
    return shown


def fate(row: RowStep, k: int) -> tuple[str, str, str]:
    """Mark, word and style for drafted token k."""
    if k < row.accepted:
        return "✓", "kept", "draft"
    if k >= row.scheduled:
        return "·", "cut", "dim"
    if k == row.accepted:
        return "✗", "wrong", "reject"
    return "-", "after", "dim"


def draw(request: RequestStats | None, width: int, height: int) -> Canvas:
    canvas = Canvas(width, height)
    row = request.last_draft if request else None
    if row is None or request is None:
        canvas.text(1, 0, "draft", "title")
        _line(
            canvas, 8, 0, "each round's drafted tokens appear here while a reply is written", "dim"
        )
        return canvas
    _heading(canvas, request, row)
    if not row.drafted:
        _line(canvas, 1, 1, "plain decoding: nothing was drafted in this round", "dim")
        if row.reason:
            _line(canvas, 1, 2, row.reason, "text")
        return canvas
    full = height >= FULL
    labels = ["", "conf", "surv", ""] if full else ["", ""]
    for y, label in enumerate(labels, 1):
        canvas.text(1, y, label, "axis")
    x = 6 if full else 1
    shown = 0
    for k, text in enumerate(row.draft_texts or tuple(str(i) for i in row.drafted)):
        mark, word, style = fate(row, k)
        cells = [token_text(text)]
        sure = f"{100 * row.confidence[k]:.0f}%" if k < len(row.confidence) else "-"
        lives = f"{100 * row.survival[k]:.0f}%" if k < len(row.survival) else "-"
        if full:
            cells += [sure, lives, f"{mark} {word}"]
        else:
            cells.append(f"{mark} {lives}")
        wide = max(cell_len(cell) for cell in cells)
        if x + wide + (k == row.scheduled) * 2 > width - 4:
            break
        if k == row.scheduled:
            x = _cut(canvas, x, len(cells))
        emphasis = style + ("-strike" if word == "wrong" else "")
        canvas.text(x, 1, cells[0], emphasis)
        for y, cell in enumerate(cells[1:], 2):
            last = y == len(cells)
            canvas.text(x, y, cell, style if last else ("text" if k < row.scheduled else "dim"))
        x += wide + 2
        shown += 1
    if row.scheduled >= len(row.drafted) and shown == len(row.drafted):
        x = _cut(canvas, x, len(labels))
    if shown < len(row.drafted):
        canvas.text(x, 1, f"+{len(row.drafted) - shown}", "dim")
    elif _own(row):
        own = token_text(row.tokens[-1].text)
        wide = max(cell_len(own), 8)
        if x + wide < width:
            canvas.text(x, 1, own, "target")
            canvas.text(x, len(labels), "target's" if full else "↑ own", "target")
        x += wide
    # In the row of the confidences (or what stands for them), where nothing else needs the room.
    note = _COPIED if row.copied else "" if row.calibrated or not row.confidence else _RAW
    if note and x + len(note) + 1 < width:
        canvas.right(2, note, "dim", width - 1)
    _line(canvas, 1, len(labels) + 1, f"why  {row.reason}" if full else row.reason, "text")
    return canvas


def _own(row: RowStep) -> bool:
    """Whether the round ended in a token of the target's own; a draft may end the reply instead."""
    return bool(row.tokens) and row.tokens[-1].origin == "target"


def _line(canvas: Canvas, x: int, y: int, text: str, style: str) -> None:
    """Write a sentence in one row, with an ellipsis if it does not fit."""
    room = canvas.width - x
    if cell_len(text) > room:
        while text and cell_len(text) > room - 1:
            text = text[:-1]
        text = text.rstrip() + "…"
    canvas.text(x, y, text, style)


def _cut(canvas: Canvas, x: int, rows: int) -> int:
    for y in range(1, rows + 1):
        canvas.text(x, y, "┃", "predicted")
    return x + 2


def _heading(canvas: Canvas, request: RequestStats, row: RowStep) -> None:
    x = canvas.text(1, 0, "draft", "title")
    x = canvas.text(x + 2, 0, f"round {request.last_draft_round} · {row.method}", "dim")
    flow = f"{len(row.drafted)} drafted → {row.scheduled} verified → {row.accepted} kept"
    if _own(row):
        flow += " + 1"
    if not row.drafted:
        flow = ""
    if x + len(flow) + 2 < canvas.width:
        canvas.right(0, flow, "value", canvas.width - 1)
