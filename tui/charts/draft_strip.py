"""The draft strip: the draft of one round, where it was cut, what was accepted, and why.

Each drafted token has a column: its text, its confidence, its survival, and whether it was
accepted. The scheduler's cut is a bar between two columns.
"""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size

from dspark_mlx.events import RowStep
from dspark_mlx.stats import RequestStats

from ..canvas import Canvas
from ..display_text import clean, fit

_SHOWN = {" ": "·", "\n": "⏎", "\t": "⇥"}
_RAW = "uncalibrated"
_COPIED = "copied from above"
FULL, SHORT = 6, 4  # heights


def token_text(text: str, limit: int = 14) -> str:
    """A token made visible: spaces as dots, line ends as arrows, no control codes."""
    shown = "".join(_SHOWN.get(char, char) for char in clean(text)) or "∅"
    return set_cell_size(shown, limit).rstrip() if cell_len(shown) > limit else shown


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
    x = canvas.text(1, 0, "draft", "title") + 2
    row = request.last_draft if request else None
    if request is None or row is None:
        text = "each round's drafted tokens appear here while a reply is written"
        canvas.text(x, 0, fit(text, width - x), "dim")
        return canvas
    x = canvas.text(x, 0, f"round {request.last_draft_round} · {row.method}", "dim")
    if not row.drafted:
        text = "plain decoding: nothing was drafted in this round"
        canvas.text(1, 1, fit(text, width - 1), "dim")
        canvas.text(1, 2, fit(row.reason, width - 1), "text")
        return canvas
    own = row.tokens[-1] if row.tokens and row.tokens[-1].origin == "target" else None
    flow = f"{len(row.drafted)} drafted → {row.scheduled} verified → {row.accepted} kept"
    flow += " + 1" if own else ""
    if x + len(flow) + 2 < width:
        canvas.right(0, flow, "value", width - 1)
    full = height >= FULL
    last = 4 if full else 2  # the row of what became of the tokens
    if full:
        canvas.text(1, 2, "conf", "axis")
        canvas.text(1, 3, "surv", "axis")
    x, shown = _columns(canvas, row, 6 if full else 1, full)
    if row.scheduled >= len(row.drafted) == shown:
        x = _cut(canvas, x, last)
    if shown < len(row.drafted):
        canvas.text(x, 1, f"+{len(row.drafted) - shown}", "dim")
    elif own:
        text = token_text(own.text)
        wide = max(cell_len(text), 8)
        if x + wide < width:
            canvas.text(x, 1, text, "target")
            canvas.text(x, last, "target's" if full else "↑ own", "target")
        x += wide
    # In the row of the confidences, where nothing else needs the room.
    note = _COPIED if row.copied else "" if row.calibrated or not row.confidence else _RAW
    if note and x + len(note) + 1 < width:
        canvas.right(2, note, "dim", width - 1)
    why = f"why  {row.reason}" if full else row.reason
    canvas.text(1, last + 1, fit(why, width - 1), "text")
    return canvas


def _columns(canvas: Canvas, row: RowStep, x: int, full: bool) -> tuple[int, int]:
    """Draw a column for each token, as many as fit; returns the next x, and how many."""
    texts = row.draft_texts or tuple(map(str, row.drafted))
    for k, text in enumerate(texts):
        mark, word, style = fate(row, k)
        confidence, survival = (
            f"{100 * chances[k]:.0f}%" if k < len(chances) else "-"
            for chances in (row.confidence, row.survival)
        )
        below = [confidence, survival, f"{mark} {word}"] if full else [f"{mark} {survival}"]
        cells = [token_text(text), *below]
        plain = "text" if k < row.scheduled else "dim"
        first = style + ("-strike" if word == "wrong" else "")
        styles = [first, *[plain] * (len(below) - 1), style]
        wide = max(map(cell_len, cells))
        if x + wide + (k == row.scheduled) * 2 > canvas.width - 4:
            return x, k
        if k == row.scheduled:
            x = _cut(canvas, x, len(cells))
        for y, (cell, cell_style) in enumerate(zip(cells, styles, strict=True), 1):
            canvas.text(x, y, cell, cell_style)
        x += wide + 2
    return x, len(texts)


def _cut(canvas: Canvas, x: int, rows: int) -> int:
    for y in range(1, rows + 1):
        canvas.text(x, y, "┃", "predicted")
    return x + 2
