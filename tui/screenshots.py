"""Pictures of the chat (SVG) from a recorded run: ``python -m tui.screenshots TRACE FOLDER``.

For the README. No terminal and no model: the recording is played in memory.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from dspark_mlx.errors import DsparkError, UsageError
from dspark_mlx.files import write_atomically

from .app import ChatApp, StartOptions
from .engine_client import EngineClient
from .replay import ReplayEngine, recording
from .session_store import SessionStore
from .settings import Preferences, SettingsFile
from .widgets.markdown import GrowingMarkdown

# Name, size, theme, keys pressed before the picture is taken, share of the recording played.
SHOTS: tuple[tuple[str, tuple[int, int], str, tuple[str, ...], float], ...] = (
    ("chat", (120, 38), "dspark-dark", (), 0.6),
    ("tokens", (120, 38), "dspark-light", ("ctrl+t",), 0.6),
    ("monitor", (170, 34), "dspark-dark", ("ctrl+g",), 0.6),
    ("small", (80, 24), "dspark-dark", ("ctrl+t",), 0.4),
)


class _Clock:
    """Time that passes only when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


async def shoot(
    trace: Path,
    prompt: str,
    size: tuple[int, int],
    theme: str,
    keys: Sequence[str],
    share: float,
) -> str:
    """One picture of the chat that answers ``prompt`` with the first recorded reply."""
    clock = _Clock()
    replay = ReplayEngine(recording(trace), 1.0, clock, play=False)
    app = ChatApp(
        EngineClient(replay),
        SessionStore(None),
        Preferences(SettingsFile(None), {"theme": theme}),
        StartOptions(prompt),
        environ={},
    )
    async with app.run_test(size=size) as pilot:
        while not app.chat.pane.conversation.active:
            await pilot.pause(0.05)
        length = replay.length_of_reply(0)
        steps = 40
        for _ in range(steps):  # in small steps, so that it is drawn as it was seen
            clock.now += share * length / steps
            await app.tick()
            await pilot.pause(0.01)
        for key in keys:
            await pilot.press(key)
        for body in app.chat.query(GrowingMarkdown):
            await body.settle()
        app.chat.redraw()
        await pilot.pause(0.2)
        return app.export_screenshot(title="dspark-chat")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tui.screenshots", description=__doc__)
    parser.add_argument("trace", type=Path, help="recorded with dspark-chat --trace")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompt", default="Explain speculative decoding with a short example.")
    args = parser.parse_args(argv)
    try:
        recording(args.trace)
        for name, *how in SHOTS:
            picture = asyncio.run(shoot(args.trace, args.prompt, *how))  # type: ignore[arg-type]
            try:
                write_atomically(args.folder / f"{name}.svg", picture)
            except OSError as error:
                raise UsageError(f"cannot write to {args.folder}: {error.strerror}") from error
            print(args.folder / f"{name}.svg")
    except DsparkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
