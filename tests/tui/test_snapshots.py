"""What whole screens look like, as text: ten at most, each from the same made-up recording.

python tests/tui/test_snapshots.py     writes them anew; look at them before you commit
"""

from __future__ import annotations

import asyncio
import difflib
import secrets
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "snapshots"
ROOT = Path(__file__).parents[2]

SHOTS: dict[str, tuple[tuple[int, int], tuple[str, ...]]] = {
    "chat-80x24": ((80, 24), ()),
    "chat-120x40": ((120, 40), ()),
    "tokens-100x34": ((100, 34), ("ctrl+t",)),
    "monitor-80x24": ((80, 24), ("ctrl+g",)),
    "monitor-120x40": ((120, 40), ("ctrl+g",)),
    "monitor-200x60": ((200, 60), ("ctrl+g",)),
}


async def shoot(open_chat: Any, size: tuple[int, int], keys: tuple[str, ...]) -> str:
    from make_trace import make

    from tui.replay import ReplayEngine

    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    # Request ids are drawn by chance; the picture must not be.
    secrets.token_hex = lambda n: "0" * 2 * n  # type: ignore[assignment]
    replay = ReplayEngine(make(1, 200), 1.0, Clock(), play=False)
    async with open_chat(replay, size=size) as c:
        await c.say("Explain it", wait=False)
        replay._clock.now = 3.0  # type: ignore[attr-defined]
        await c.until(lambda: c.app.stats.samples)
        await c.settled()
        await c.press(*keys)
        c.app.screen.set_focus(None)  # no blinking cursor
        c.app.screen.redraw()
        before, now = "", str(c.screen())
        while now != before:  # until nothing more is painted
            await c.pilot.pause(0.3)
            before, now = now, str(c.screen())
        return now


@pytest.mark.parametrize("name", SHOTS)
async def test_the_screen_looks_as_it_did(chat, name: str, monkeypatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", secrets.token_hex)  # put back at the end
    size, keys = SHOTS[name]
    expected = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    found = await shoot(chat, size, keys) + "\n"
    if found != expected:
        lines = difflib.unified_diff(expected.splitlines(), found.splitlines(), lineterm="")
        pytest.fail("the screen changed:\n" + "\n".join(lines))


def test_there_are_few_of_them() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(SHOTS) and len(SHOTS) <= 10


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    from conftest import open_chat

    FOLDER.mkdir(exist_ok=True)
    for name, (size, keys) in SHOTS.items():
        text = asyncio.run(shoot(open_chat, size, keys))
        (FOLDER / f"{name}.txt").write_text(text + "\n", encoding="utf-8")
        print(name)
