"""All settings as a form; what is wrong is said beside it and nothing wrong is kept."""

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
from dspark_mlx.request import DRAFT_SAMPLINGS, METHODS

from ..settings import KV_BITS, SCHEDULES, THINKING, Settings, parse

_HELP = {
    "model": "name, folder or Hub id",
    "drafter": "empty: the model's own; none: without",
    "system": "system prompt of new chats",
    "method": "how to draft",
    "schedule": "how much of a draft is verified",
    "temperature": "0: always the most likely token",
    "top_p": "1: off",
    "top_k": "0: off",
    "min_p": "0: off",
    "seed": "empty: a new one each time",
    "max_tokens": "per reply; -1: no limit",
    "draft_sampling": "how drafts are drawn above temperature 0",
    "draft_length": "at most so many; empty: the block",
    "p_min": "stop before a confidence below this",
    "p_survival_min": "stop before a survival below this",
    "thinking": "for models that can",
    "kv_bits": "0: keep the cache as it is",
    "theme": "colours",
    "live_panel": "right: on; charts beside the chat",
    "token_colours": "right: on; colour tokens by origin",
    "keys": "one a line, such as: chat.new = ctrl+n",
}


class SettingsScreen(ModalScreen[Settings | None]):
    """Ends with the changed settings, or None."""

    BINDINGS: ClassVar = [
        Binding("escape", "dismiss(None)", "Cancel"),
        Binding("ctrl+s", "save", "Save", priority=True),
    ]

    def __init__(self, settings: Settings, themes: Sequence[str], actions: Sequence[str]) -> None:
        super().__init__(classes="list")
        self._settings = settings
        self._actions = actions
        self._choices: dict[str, Sequence[Any]] = {
            "method": METHODS,
            "schedule": SCHEDULES,
            "thinking": THINKING,
            "kv_bits": KV_BITS,
            "draft_sampling": DRAFT_SAMPLINGS,
            "theme": ["", *themes],
        }

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static("Settings", classes="title", markup=False)
            with VerticalScroll():
                for name, help_text in _HELP.items():
                    with Horizontal(classes="setting tall" if name == "keys" else "setting"):
                        yield Static(name.replace("_", " "), classes="name", markup=False)
                        yield self._field(name)
                        yield Static(help_text, classes="hint", markup=False)
                yield Static("Actions: " + ", ".join(self._actions), classes="hint", markup=False)
            yield Static("", classes="wrong", markup=False)
            yield Footer(compact=True)

    def _field(self, name: str) -> Input | Select[Any] | Switch | TextArea:
        value = getattr(self._settings, name)
        if name in self._choices:
            options = [(str(c) if c != "" else "automatic", c) for c in self._choices[name]]
            if value not in self._choices[name]:
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
        for name in _HELP:
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
