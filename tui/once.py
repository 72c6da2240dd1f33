"""``dspark-chat --once``: one question, one printed answer, for pipes and scripts."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TextIO

from dspark_mlx.commands.generate import print_reply
from dspark_mlx.commands.progress import ProgressLine
from dspark_mlx.errors import DsparkError
from dspark_mlx.events import Event, Failed, Loaded, Loading
from dspark_mlx.registry import DEFAULT_MODEL

from .conversation import Conversation
from .display_text import Cleaner
from .engine_client import EngineClient
from .settings import Settings

_WAIT_SECONDS = 0.02  # between two looks for events
_EXIT_BROKEN_PIPE = 141


def answer(client: EngineClient, prompt: str, settings: Settings, out: TextIO | None = None) -> int:
    """Print the reply to ``prompt`` as it is written; returns the exit code.

    Raises DsparkError where the model or the reply fails.
    """
    out = out or sys.stdout
    # A terminal gets no control codes from a model; a file gets the text as it is.
    cleaner = Cleaner() if out.isatty() else None
    conversation = Conversation(system=settings.system)
    conversation.ask(prompt)
    request = conversation.request("once", settings)
    last = "\n"  # what was written last

    def write(text: str) -> None:
        nonlocal last
        last = text or last
        out.write(cleaner.feed(text) if cleaner else text)
        out.flush()

    client.release()
    events = _events(client)
    try:
        client.load(settings.model or DEFAULT_MODEL, settings)
        with ProgressLine() as line:
            for event in events:
                if isinstance(event, Loading):
                    line(event)
                elif isinstance(event, Loaded):
                    break
        client.submit(request)
        try:
            print_reply(events, write)
        finally:
            out.write(cleaner.end() if cleaner else "")
            out.write("" if last.endswith("\n") else "\n")
            out.flush()
        return 0
    except BrokenPipeError:
        sys.stdout = None  # the reader has gone; flush nothing
        return _EXIT_BROKEN_PIPE
    finally:
        client.close()


def _events(client: EngineClient) -> Iterator[Event]:
    """The events as they come. Raises DsparkError for a Failed."""
    while True:
        events = client.drain()
        for event in events:
            if isinstance(event, Failed):
                raise DsparkError(event.message, event.hint)
            yield event
        if not events:
            time.sleep(_WAIT_SECONDS)
