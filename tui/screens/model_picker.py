"""The model picker: the registered models, their sizes, what fits and what is on disk."""

from __future__ import annotations

import sys
from typing import ClassVar

import psutil
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Footer, Input, OptionList, Static
from textual.widgets.option_list import Option

from dspark_mlx import sources
from dspark_mlx.errors import DsparkError
from dspark_mlx.registry import DEFAULT_MODEL, ModelEntry, Registry

from ..display_text import size

ON_CPU = sys.platform != "darwin"


def on_disk(entry: ModelEntry, *, drafter: bool = True) -> bool:
    """Whether an entry is complete on disk, with or without its ``drafter``."""
    if sources.on_disk(entry.target_source) is None:
        return False
    source = entry.drafter_source if drafter else None
    # What comes inside the package is never downloaded.
    return (
        source is None
        or isinstance(source, sources.PackageSource)
        or sources.on_disk(source, role="drafter") is not None
    )


class ModelPicker(ModalScreen[str | None]):
    """Ends with the model to load, or None. ``first``: nothing was set up yet."""

    BINDINGS: ClassVar = [Binding("escape", "dismiss(None)", "Close")]

    def __init__(self, current: str, first: bool = False) -> None:
        super().__init__(classes="list")
        self._current, self._first = current, first
        self._entries: list[ModelEntry] = []

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static("Models", classes="title", markup=False)
            if self._first:
                yield Static(
                    "Nothing is set up yet. Enter fetches the default model, the smallest; "
                    "it runs on any machine.",
                    classes="hint",
                    markup=False,
                )
            yield OptionList(markup=False)
            yield Input(placeholder="or a folder, or a Hub id such as org/name")
            yield Static("", classes="hint", markup=False)
            yield Footer(compact=True)

    def on_mount(self) -> None:
        options = self.query_one(OptionList)
        try:
            self._entries = list(Registry.load().values())
        except DsparkError as error:
            self.notify(str(error), severity="error", markup=False)
        total = psutil.virtual_memory().total
        options.add_options(
            [Option(_line(e, total, e.name == self._current)) for e in self._entries]
        )
        names = [entry.name for entry in self._entries]
        wanted = self._current if self._current in names else DEFAULT_MODEL
        if wanted in names:
            options.highlighted = names.index(wanted)
        options.focus()

    @on(OptionList.OptionHighlighted)
    def describe(self, event: OptionList.OptionHighlighted) -> None:
        entry = self._entries[event.option_index]
        text = entry.notes or entry.title
        self.query(".hint").last(Static).update(
            f"{text} Licence: {entry.license or 'see its page'}."
        )

    @on(OptionList.OptionSelected)
    def choose(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._entries[event.option_index].name)

    @on(Input.Submitted)
    def other(self, event: Input.Submitted) -> None:
        if event.value.strip():
            self.dismiss(event.value.strip())


def _line(entry: ModelEntry, memory: int, current: bool) -> Content:
    need = entry.memory_bytes(float32=ON_CPU)
    fits = need <= memory
    here = on_disk(entry)
    return Content.assemble(
        ("● " if current else "  "),
        f"{entry.name:<18}",
        (f"{size(entry.download_bytes):>9}  ", "dim"),
        ("fits        " if fits else "too big     ", "$success" if fits else "$error"),
        (f"{'on disk' if here else 'to download':<12}", "$success" if here else "dim"),
        (" drafter" if entry.drafter else " lookup only", "dim"),
    )
