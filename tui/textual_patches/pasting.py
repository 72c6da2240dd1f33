"""Pastes reach the app as one text, whatever is in them.

A terminal puts marks around what is pasted. Textual's parser also looks for keys between them: an
escape code in a paste becomes keys, and a line end after it becomes Enter, which would send the
message. The driver here takes pastes out of the input before the parser sees it.
"""

from __future__ import annotations

import os
import selectors
import time
from codecs import getincrementaldecoder
from collections.abc import Iterator

from textual import events
from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver

from ..display_text import clean

_BEGIN, _END = "\x1b[200~", "\x1b[201~"
_OPEN_SECONDS = 3.0  # silence after which a paste is over though its end mark never came
_IDLE = 0.1  # seconds to wait for input
# Seconds to wait for the rest of a mark. An escape alone is most likely the key, which must be
# quick; a longer beginning is no key, and its rest may come over a slow line.
_ESCAPE, _MORE = 0.02, 1.0
_NEEDED = ("_debug", "fileno", "exit_event", "process_message")  # attributes of the driver


class Pastes:
    """Cuts a terminal's input into ``(pasted, text)`` pieces; marks may be split over reads."""

    def __init__(self) -> None:
        self.inside = False
        self.held = ""  # may be the beginning of a mark
        self._body: list[str] = []

    def feed(self, text: str) -> Iterator[tuple[bool, str]]:
        text, self.held = self.held + text, ""
        while text:
            mark = _END if self.inside else _BEGIN
            before, found, text = text.partition(mark)
            if not found:
                starts = (mark[:n] for n in range(len(mark) - 1, 0, -1))
                self.held = next((start for start in starts if before.endswith(start)), "")
                before = before.removesuffix(self.held)
            if self.inside:
                self._body.append(before)
                if found:
                    yield from self.close()
            elif before:
                yield False, before
            self.inside = self.inside or (bool(found) and mark is _BEGIN)

    def close(self) -> Iterator[tuple[bool, str]]:
        """End the paste; yields it as far as it came."""
        body, self._body, self.inside = "".join(self._body), [], False
        yield True, body

    def flush(self) -> Iterator[tuple[bool, str]]:
        """Nothing more came: what was held back is not a mark."""
        held, self.held = self.held, ""
        if held and self.inside:
            self._body.append(held)
        elif held:
            yield False, held


class PasteDriver(LinuxDriver):
    """Textual's driver for Unix, with pastes taken out before its parser."""

    def run_input_thread(self) -> None:
        """Read until the app ends; pastes and keys become messages in their order."""
        if not all(hasattr(self, name) for name in _NEEDED):
            super().run_input_thread()
            return
        parser, pastes = XTermParser(self._debug), Pastes()
        decode = getincrementaldecoder("utf-8")("replace").decode
        last = time.monotonic()

        def pass_on(pieces: Iterator[tuple[bool, str]]) -> None:
            for pasted, text in pieces:
                if pasted:
                    self.process_message(events.Paste(clean(text)))
                else:
                    for message in parser.feed(text):
                        self.process_message(message)

        with selectors.SelectSelector() as selector:
            selector.register(self.fileno, selectors.EVENT_READ)
            while not self.exit_event.is_set():
                ready = selector.select(_ESCAPE if pastes.held == "\x1b" else _IDLE)
                silence = time.monotonic() - last
                if ready:
                    data = os.read(self.fileno, 4096)
                    if not data:  # the terminal is gone
                        break
                    last = time.monotonic()
                    pass_on(pastes.feed(decode(data)))
                elif pastes.inside and silence > _OPEN_SECONDS:
                    pass_on(pastes.flush())
                    pass_on(pastes.close())
                elif not pastes.inside and (pastes.held == "\x1b" or silence > _MORE):
                    pass_on(pastes.flush())
                for message in parser.tick():
                    self.process_message(message)
