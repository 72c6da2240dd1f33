"""Without a patch, or where a private name has changed, the chat works in Textual's own way."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted import ScriptedEngine
from textual._compositor import Compositor
from textual.drivers.linux_driver import LinuxDriver
from textual.geometry import Region
from textual.screen import Screen

from tui import textual_patches
from tui.textual_patches.compositor import SparingCompositor
from tui.textual_patches.pasting import PasteDriver

TEXT = "A **word**.\n\n```python\nx = 1\n```\n\n1. one\n2. two\n"


@pytest.fixture
def no_patches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(textual_patches, "enabled", False)
    yield


async def said(chat) -> tuple[str, type]:
    """The screen after a reply, and the compositor that painted it."""
    async with chat(ScriptedEngine([TEXT * 3])) as c:
        await c.say("One")
        c.app.screen.set_focus(None)  # no cursor
        await c.until(lambda: "5 tokens" in c.screen(), "the figures")
        c.app.chat.redraw()
        await c.pilot.pause(0.2)
        return c.screen(), type(c.app.chat._compositor)


async def test_without_patches_the_chat_looks_the_same(
    chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched, compositor = await said(chat)
    assert compositor is SparingCompositor
    monkeypatch.setattr(textual_patches, "enabled", False)
    plain, compositor = await said(chat)
    assert compositor is Compositor
    assert plain == patched


async def test_without_patches_quitting_saves_what_was_typed(chat, no_patches: None) -> None:
    async with chat() as c:
        store = c.store
        close, store.close = store.close, lambda: None
        c.pane.prompt.put("half a thought")
        await c.until(lambda: c.conversation.draft)
        await c.press("ctrl+q")
    unsent = store.unsent()
    assert unsent is not None and store.load(unsent).draft == "half a thought"
    close()


def test_without_patches_the_driver_is_textuals(no_patches: None) -> None:
    assert textual_patches.driver_class(LinuxDriver) is LinuxDriver


@pytest.mark.parametrize("name", ["compositor", "pasting"])
def test_a_private_module_that_is_gone_leaves_textuals_own_way(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delattr(textual_patches, name)
    monkeypatch.setitem(sys.modules, f"tui.textual_patches.{name}", None)
    screen: Screen[None] = Screen()
    textual_patches.use_sparing_compositor(screen)
    used = {
        "compositor": type(screen._compositor) is Compositor,
        "pasting": textual_patches.driver_class(LinuxDriver) is LinuxDriver,
    }
    assert used[name] and sum(used.values()) == 1, "and the other patch works"


def test_a_private_method_of_another_form_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compositor, "_get_renders", lambda self, crop, more: [])
    screen: Screen[None] = Screen()
    textual_patches.use_sparing_compositor(screen)
    assert type(screen._compositor) is Compositor


async def test_a_compositor_that_no_longer_fits_paints_as_textual_does(
    chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(self: object, crop: object) -> None:
        raise AttributeError("visible_widgets")

    monkeypatch.setattr(SparingCompositor, "_sparing_renders", changed)
    async with chat() as c:
        await c.say("One")
        compositor = c.app.chat._compositor
        crop = Region(0, 0, 40, 10)
        assert list(compositor._get_renders(crop)) == list(
            Compositor._get_renders(compositor, crop)
        )


def test_a_driver_without_the_attributes_reads_as_textual_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[object] = []
    monkeypatch.setattr(LinuxDriver, "run_input_thread", lambda self: called.append(self))
    driver = PasteDriver.__new__(PasteDriver)
    driver.run_input_thread()
    assert called == [driver]


def test_private_names_of_textual_are_used_in_one_folder_only() -> None:
    root = Path(textual_patches.__file__).parents[1]
    for path in root.rglob("*.py"):
        if path.parent.name == "textual_patches":
            continue
        text = path.read_text()
        assert not re.search(r"(from|import) textual[\w.]*\._", text), path
        assert not re.search(r"\b(?!self\b|os\b|segment\b)\w+\._[a-z]\w*\(", text), path
