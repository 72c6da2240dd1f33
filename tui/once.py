"""One question, one printed answer: for pipes, scripts and terminals without a full screen."""

from __future__ import annotations

import secrets
import sys
import time
from typing import TextIO

from dspark_mlx.events import Failed, Finished, Loaded, Loading, StepDone
from dspark_mlx.registry import DEFAULT_MODEL

from .backend import Backend
from .conversation import Conversation
from .settings import Settings
from .text import Cleaner

_BEAT = 0.02
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


def answer(
    backend: Backend,
    prompt: str,
    settings: Settings,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Print the reply to ``prompt`` as it is written; returns the exit code."""
    out, err = out or sys.stdout, err or sys.stderr
    progress = _Progress(err)
    # For a terminal control codes are taken out; a file gets the text as it is.
    cleaner = Cleaner() if out.isatty() else None
    request_id = f"once-{secrets.token_hex(4)}"
    conversation = Conversation(system=settings.system)
    conversation.ask(prompt)
    request = conversation.request(request_id, settings)
    last = ""
    try:
        backend.load(
            settings.model or DEFAULT_MODEL,
            method=settings.method,
            schedule=settings.schedule,
            options=settings.options(),
        )
        submitted = False
        while True:
            events = backend.drain()
            for event in events:
                if isinstance(event, Loading):
                    progress.show(event)
                elif isinstance(event, Failed):
                    progress.clear()
                    return _error(err, event.message, event.hint)
                elif isinstance(event, Loaded) and not submitted:
                    progress.clear()
                    submitted = True
                    backend.submit(request)
                elif isinstance(event, StepDone):
                    text = "".join(
                        token.text
                        for row in event.rows
                        if row.request_id == request_id
                        for token in row.tokens
                    )
                    last = text or last
                    out.write(cleaner.feed(text) if cleaner else text)
                    out.flush()
                elif isinstance(event, Finished) and event.request_id == request_id:
                    last = event.tail or last
                    out.write(cleaner.feed(event.tail) + cleaner.end() if cleaner else event.tail)
                    if last and not last.endswith("\n"):
                        out.write("\n")
                    out.flush()
                    if event.reason == "error":
                        return _error(err, event.message, event.hint)
                    return 0
            if not events:
                time.sleep(_BEAT)
    except BrokenPipeError:
        sys.stdout = None  # the reader has gone; nothing to flush
        return 141
    except KeyboardInterrupt:
        backend.cancel(request_id)
        return EXIT_INTERRUPTED
    finally:
        backend.close()


def _error(err: TextIO, message: str, hint: str) -> int:
    print(f"dspark-chat: error: {message}" + (f" ({hint})" if hint else ""), file=err)
    return EXIT_ERROR


class _Progress:
    """One line on a terminal's stderr while a model is fetched and loaded; silent elsewhere."""

    def __init__(self, err: TextIO) -> None:
        self._err = err if err.isatty() else None

    def show(self, event: Loading) -> None:
        if self._err:
            share = f" {100 * event.done / event.total:.0f}%" if event.total else ""
            self._err.write(f"\r\x1b[K{event.stage} {event.detail}{share}")
            self._err.flush()

    def clear(self) -> None:
        if self._err:
            self._err.write("\r\x1b[K")
            self._err.flush()
