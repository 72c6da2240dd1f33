"""The row of tabs on top, with what the engine is doing at its right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from textual.events import Click
from textual.message import Message

from dspark_mlx.stats import EngineStats

from ..canvas import Canvas
from ..display_text import fit, one_line, size
from ..settings import Settings
from .chart import Chart

_STAGES = {
    "download": "fetching",
    "convert": "converting",
    "load": "loading",
    "check": "checking",
    "profile": "measuring the device",
}


@dataclass(frozen=True, slots=True)
class Tab:
    title: str
    active: bool
    busy: bool


class TabBar(Chart):
    """``show(tabs, note)``; posts ``Chosen`` when a tab is clicked."""

    class Chosen(Message):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

    def __init__(self) -> None:
        super().__init__(self._row)
        self._tabs: Sequence[Tab] = ()
        self._note = ""
        self._places: list[tuple[int, int]] = []

    def show(self, tabs: Sequence[Tab], note: str) -> None:
        if (tabs, note) != (self._tabs, self._note):
            self._tabs, self._note = tabs, note
            self.redraw()

    def _row(self, width: int, height: int) -> Canvas:
        canvas = Canvas(width, height)
        note = self._note
        room = width - 2 - min(cell_len(note) + 2, width // 2)
        each = max(8, min(28, room // max(1, len(self._tabs)) - 3))
        # Keep the active tab in sight when there are more than fit.
        fits = max(1, room // (each + 3))
        active = next((i for i, tab in enumerate(self._tabs) if tab.active), 0)
        first = max(0, min(active - fits + 1, len(self._tabs) - fits)) if active >= fits else 0
        x, self._places = 1, [(-1, -1)] * first
        for tab in self._tabs[first : first + fits]:
            start = x
            label = f" {'●' if tab.busy else ''}{fit(tab.title, each)} "
            x = canvas.text(x, 0, label, "active" if tab.active else "dim") + 1
            self._places.append((start, x))
        hidden = len(self._tabs) - fits
        if hidden > 0:
            x = canvas.text(x, 0, f"+{hidden}", "dim") + 1
        canvas.right(0, fit(note, width - x - 2), "dim", width - 1)
        return canvas

    def on_click(self, event: Click) -> None:
        for index, (start, end) in enumerate(self._places):
            if start <= event.x < end:
                self.post_message(self.Chosen(index))


def engine_note(stats: EngineStats, wanted: str, asked: Settings | None = None) -> str:
    """What the engine is doing, in a few words; ``wanted`` is the model asked for, if any.

    ``asked`` holds the settings of the next reply; None stands for those of the load.
    """
    if stats.loading is not None:
        step = stats.loading
        note = f"{_STAGES.get(step.stage, step.stage)} {step.detail}".strip()
        if step.total:
            note += f" {100 * step.done / step.total:.0f}%"
            if step.stage == "download":
                note += f" of {size(step.total)}"
        return note + " (Esc cancels)"
    if stats.failure is not None:
        return f"✗ {one_line(stats.failure.message, 80)}"
    if stats.loaded is not None:
        method, schedule = stats.loaded.method, stats.loaded.schedule
        if asked is not None:
            method = method if asked.method == "auto" else asked.method
            schedule = asked.schedule
        return f"{one_line(stats.loaded.model, 40)} · {method} · {schedule}"
    return "starting" if wanted else "no model (F5)"
