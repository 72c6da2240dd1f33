from __future__ import annotations

import re
from pathlib import Path

import pytest
from make_trace import make
from scripted import LOADED, ScriptedBackend, step

from dspark_mlx.errors import DsparkError, UsageError
from dspark_mlx.events import Failed, Finished, Loaded, Notice, Queued, StepDone, to_json
from dspark_mlx.request import Request
from tui.backend import EngineBackend, TracingBackend
from tui.replay import ReplayBackend, recording


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def load(backend) -> None:
    backend.load("m", method="auto", schedule="auto", options={})


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
    replay = ReplayBackend(recorded, 1.0, clock, play=False)
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
        replay = ReplayBackend(make(1, 200), speed, clock, play=False)
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
    replay = ReplayBackend(recorded, 1.0, clock)
    load(replay)
    clock.now += 1000
    events = replay.drain()
    ends = [e.request_id for e in events if isinstance(e, Finished)]
    assert len(ends) == 3 and all(name.startswith("recorded-") for name in ends)
    for name in ends:
        assert text_of(events, name) == text_of(recorded, name.rpartition("-")[2])


def test_cancelling_a_replayed_reply_ends_it_at_once() -> None:
    clock = Clock()
    replay = ReplayBackend(make(1, 200), 1.0, clock, play=False)
    replay.submit(Request("a", prompt="x"))
    replay.drain()
    replay.cancel("a")
    events = replay.drain()
    assert [e.reason for e in events if isinstance(e, Finished)] == ["cancelled"]
    clock.now += 100
    assert replay.drain() == []


def test_what_is_traced_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    traced = TracingBackend(ScriptedBackend(["one two three four five"]), path)
    load(traced)
    traced.submit(Request("a", prompt="x"))
    seen = [event for _ in range(6) for event in traced.drain()]
    traced.close()
    assert recording(path) == seen
    replay = ReplayBackend(recording(path), float("inf"), Clock(), play=False)
    replay.submit(Request("b", prompt="x"))
    replay._clock.now += 1  # type: ignore[attr-defined]
    assert text_of(replay.drain(), "b") == "one two three four five"


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


def test_a_full_disk_ends_the_trace_and_not_the_chat(tmp_path: Path) -> None:
    inner = ScriptedBackend()
    traced = TracingBackend(inner, tmp_path / "t.jsonl")

    class Full:
        def write(self, events) -> None:
            raise OSError(28, "No space left on device")

    traced._trace = Full()  # type: ignore[assignment]
    inner.emit(step("a", ["x"]))
    events = traced.drain()
    assert isinstance(events[0], StepDone)
    assert isinstance(events[1], Notice) and "No space left" in events[1].message
    inner.emit(Queued("b", 0))
    assert traced.drain() == [Queued("b", 0)]
    traced.close()


def test_a_trace_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        TracingBackend(ScriptedBackend(), tmp_path / "none" / "t.jsonl")


def test_an_engine_that_cannot_start_is_a_failure_with_a_hint() -> None:
    def broken():
        raise ImportError("No module named 'mlx'")

    backend = EngineBackend(broken)
    load(backend)
    (failure,) = backend.drain()
    assert isinstance(failure, Failed) and "mlx" in failure.message and failure.hint
    backend.submit(Request("a", prompt="x"))
    (end,) = backend.drain()
    assert isinstance(end, Finished) and end.reason == "error" and end.hint
    backend.cancel("a")
    backend.close()


def test_what_the_engine_refuses_becomes_an_event() -> None:
    class Picky(ScriptedBackend):
        def submit(self, request: Request) -> None:
            raise DsparkError("too long", "shorten it")

        def load(self, model: str, **options) -> None:
            raise DsparkError("no such model", "see the list")

    backend = EngineBackend(Picky)
    load(backend)
    assert backend.drain() == [Failed("no such model", "see the list")]
    backend.submit(Request("a", prompt="x"))
    (end,) = backend.drain()
    assert isinstance(end, Finished) and (end.message, end.hint) == ("too long", "shorten it")
