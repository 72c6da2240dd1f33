from __future__ import annotations

import re
from pathlib import Path

import pytest
from make_trace import make
from scripted import LOADED

from dspark_mlx.errors import UsageError
from dspark_mlx.events import Finished, Loaded, StepDone, to_json
from dspark_mlx.request import Request
from tui.replay import ReplayEngine, recording


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def load(engine) -> None:
    engine.load("m", method="auto", schedule="auto", options={})


def text_of(events: list, request_id: str) -> str:
    return "".join(
        token.text
        for event in events
        if isinstance(event, StepDone)
        for row in event.rows
        if row.request_id == request_id
        for token in row.tokens
    )


def test_a_reply_is_replayed_under_the_new_id_at_its_own_pace() -> None:
    clock = Clock()
    recorded = list(make(2, 60))
    replay = ReplayEngine(recorded, 1.0, clock, play=False)
    load(replay)
    assert any(isinstance(e, Loaded) for e in replay.drain())
    replay.submit(Request("mine", prompt="x"))
    first = replay.drain()
    assert not any(isinstance(e, Finished) for e in first)
    clock.now += 60
    rest = replay.drain()
    assert [e.request_id for e in rest if isinstance(e, Finished)] == ["mine"]
    assert text_of(first + rest, "mine") == text_of(recorded, "r1")
    replay.submit(Request("next", prompt="x"))
    clock.now += 60
    assert text_of(replay.drain(), "next") == text_of(recorded, "r2")


def test_speed_scales_the_pace_and_pause_stops_it() -> None:
    def rounds_after(speed: float, seconds: float) -> int:
        clock = Clock()
        replay = ReplayEngine(make(1, 200), speed, clock, play=False)
        replay.submit(Request("a", prompt="x"))
        replay.drain()
        clock.now += seconds
        count = sum(isinstance(e, StepDone) for e in replay.drain())
        replay.paused = True
        clock.now += 1000
        assert replay.drain() == []
        return count

    assert rounds_after(4.0, 0.5) == pytest.approx(rounds_after(1.0, 2.0), abs=1)
    assert rounds_after(float("inf"), 0.001) > 50


def test_a_whole_recording_is_played_with_all_its_requests() -> None:
    clock = Clock()
    recorded = list(make(3, 80))
    replay = ReplayEngine(recorded, 1.0, clock)
    load(replay)
    clock.now += 1000
    events = replay.drain()
    ends = [e.request_id for e in events if isinstance(e, Finished)]
    assert len(ends) == 3 and all(name.startswith("recorded-") for name in ends)
    for name in ends:
        assert text_of(events, name) == text_of(recorded, name.rpartition("-")[2])


def test_cancelling_a_replayed_reply_ends_it_at_once() -> None:
    clock = Clock()
    replay = ReplayEngine(make(1, 200), 1.0, clock, play=False)
    replay.submit(Request("a", prompt="x"))
    replay.drain()
    replay.cancel("a")
    events = replay.drain()
    assert [e.reason for e in events if isinstance(e, Finished)] == ["cancelled"]
    clock.now += 100
    assert replay.drain() == []


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "there is no trace"),
        (b"\xff\xfe\x00", "no rounds"),
        (b"\xff\xfe\x00\n", "line 1"),
        (b"hello\n", "line 1: .*not a trace"),
        (b'{"event": "Nope"}\n', "line 1"),
        (b"", "no rounds"),
        ((to_json(LOADED) + "\n").encode(), "no rounds"),
    ],
)
def test_a_bad_trace_is_one_clear_line(tmp_path: Path, content: bytes | None, word: str) -> None:
    path = tmp_path / "t.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=word):
        recording(path)


def test_a_trace_cut_off_in_its_last_line_is_still_good(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = [to_json(event) for event in make(1, 30)]
    path.write_text("\n".join(lines)[:-20])
    *events, end = recording(path)
    assert [to_json(event) for event in events] == lines[:-1]
    assert isinstance(end, Finished) and end.message == "the recording ends here"


@pytest.mark.parametrize("field", ["scheduled", "accepted", "position"])
def test_a_trace_of_what_cannot_have_been_is_refused(tmp_path: Path, field: str) -> None:
    path = tmp_path / "t.jsonl"
    lines = [to_json(event) for event in make(1, 30)]
    at = next(i for i, line in enumerate(lines) if f'"{field}"' in line)
    lines[at] = re.sub(f'"{field}": *\\d+', f'"{field}": -3', lines[at])
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(UsageError, match=f"line {at + 1}: "):
        recording(path)
