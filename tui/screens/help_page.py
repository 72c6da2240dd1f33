"""What the keys do and how to read the live view."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Static

from ..widgets.markdown import GrowingMarkdown

_READ = """
## How to read the live view

A small **drafter** guesses a block of tokens. The **target** verifies as many of them as pay off,
in one step. It keeps (accepts) those before the first that is wrong, plus one token of its own. The
text is exactly the target's.

- **In the text** (`Ctrl+T`): a coloured background marks accepted draft tokens, the stronger the
  higher the drafter's confidence; underlined tokens are the target's own.
- **Draft strip**: the last round. `✓ kept`, `✗ wrong` (where the target disagreed), `- after`
  (verified, but after the wrong one), `· cut` (never verified). The bar `┃` is the cut, and the
  last line says why it fell there. *conf* is the chance of each token given all before it were
  kept, *surv* that it and all before it are kept.
- **tokens/s**: the dashed line is plain decoding on this machine, so `×1.7` is the gain.
- **cuts**: how often each length was verified. **kept at position**: how often the k-th token
  survived. **round**: measured against predicted time. **slowdown**: above 1 the device is
  busier than when it was measured.
- Time lines all show the same rounds, two for each character cell, the newest at the right.

## Messages

`Tab` and `Shift+Tab` move between the input box and the messages. On a message: `C` copy, `Y` copy
the next code block, `E` edit and send again, `R` write again, `T` open or close a thought.

`Enter` sends; `Up` in the first line brings back what you sent before. `Ctrl+J` makes a new line
everywhere; `Shift+Enter` and `Alt+Enter` do where the terminal sends them. Pasted lines stay one
message. `Ctrl+C` stops the reply; again asks; again quits. To select text hold Option (iTerm2), Fn
(Terminal.app) or Shift (others) while dragging.
"""


class HelpPage(ModalScreen[None]):
    BINDINGS: ClassVar = [Binding("escape,q,f1", "dismiss", "Close")]

    def __init__(self, keys: Sequence[tuple[str, str, str]]) -> None:
        super().__init__(classes="list")
        self._keys = keys

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            with VerticalScroll(can_focus=True):
                yield Static(key_table(self._keys), classes="keys", markup=False)
                yield GrowingMarkdown(_READ)
            yield Footer(compact=True)


def key_table(keys: Sequence[tuple[str, str, str]]) -> str:
    """``(keys, what they do, name in settings)`` in columns, a row for each; later keys go below.

    Not a Markdown table, which takes two lines a row and most of a small screen.
    """
    rows = [("Key", "What it does", "Name in settings")]
    for pressed, what, action in keys:
        first, *others = (key_name(key) for key in pressed.split(","))
        rows.append((first, what[:1].lower() + what[1:], action))
        rows.extend((other, "", "") for other in others)
    left, middle = (max(len(row[column]) for row in rows) + 2 for column in (0, 1))
    return "\n".join(
        f"{key:<{left}}{what:<{middle}}{action}".rstrip() for key, what, action in rows
    )


def key_name(key: str) -> str:
    """A key as people write it: ctrl+pageup is Ctrl+PageUp."""
    named = {"pageup": "PageUp", "pagedown": "PageDown", "escape": "Esc"}
    parts = key.strip().split("+")
    return "+".join(named.get(part, part.capitalize()) for part in parts)
