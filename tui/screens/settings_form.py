"""All settings as a form; a wrong value is named below it, and nothing wrong is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Input, Select, Static, Switch, TextArea

from dspark_mlx.errors import UsageError

from ..settings import OPTIONS, Option, Settings, parse


class SettingsForm(ModalScreen[Settings | None]):
    """Ends with the changed settings, or None."""

    BINDINGS: ClassVar = [
        Binding("escape", "dismiss(None)", "Cancel"),
        Binding("ctrl+s", "save", "Save", priority=True),
    ]

    def __init__(self, settings: Settings, themes: Sequence[str], actions: Sequence[str]) -> None:
        super().__init__(classes="list")
        self._settings = settings
        self._actions = actions
        self._themes = ["", *themes]

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static("Settings", classes="title", markup=False)
            with VerticalScroll():
                for name, option in OPTIONS.items():
                    with Horizontal(classes="setting tall" if name == "keys" else "setting"):
                        yield Static(name.replace("_", " "), classes="name", markup=False)
                        yield self._field(name, option)
                        yield Static(option.about.help, classes="hint", markup=False)
                yield Static("Actions: " + ", ".join(self._actions), classes="hint", markup=False)
            yield Static("", classes="wrong", markup=False)
            yield Footer(compact=True)

    def _field(self, name: str, option: Option) -> Input | Select[Any] | Switch | TextArea:
        value = getattr(self._settings, name)
        if choices := self._themes if name == "theme" else option.about.choices:
            options = [(str(c) if c != "" else "automatic", c) for c in choices]
            if value not in choices:
                options.append((str(value), value))
            return Select(options, value=value, allow_blank=False, compact=True, id=name)
        if isinstance(value, bool):
            return Switch(value, id=name)
        if isinstance(value, dict):
            lines = "\n".join(f"{action} = {key}" for action, key in value.items())
            return TextArea(lines, compact=True, id=name)
        return Input("" if value is None else str(value), compact=True, id=name)

    def action_save(self) -> None:
        values: dict[str, Any] = {}
        for name in OPTIONS:
            field = self.query_one(f"#{name}")
            try:
                values[name] = parse(name, self._value(name, field))
            except UsageError as error:
                self.query_one(".wrong", Static).update(error.message)
                field.focus()
                return
        self.dismiss(dataclasses.replace(self._settings, **values))

    def _value(self, name: str, field: Any) -> Any:
        if not isinstance(field, TextArea):
            return field.value
        table = {}
        for line in field.text.splitlines():
            action, equals, key = (part.strip() for part in line.partition("="))
            if not line.strip():
                continue
            if not equals or action not in self._actions or not key:
                raise UsageError(
                    f"{name}: {line.strip()!r} is not ACTION = KEY with a known action"
                )
            table[action] = key
        return table
