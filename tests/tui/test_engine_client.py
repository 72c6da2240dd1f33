"""The chat's engine: what waits, what is refused, what is loaded again, and the trace."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from make_trace import make
from scripted import ScriptedEngine, step

from dspark_mlx.errors import DsparkError, UsageError
from dspark_mlx.events import Failed, Finished, Notice, Queued, StepDone
from dspark_mlx.request import Request
from tui.engine_client import EngineClient
from tui.replay import ReplayEngine, recording
from tui.settings import Settings

SETTINGS = Settings(model="smollm2-135m")


def loaded(engine, **more) -> EngineClient:
    client = EngineClient(engine, **more)
    client.load("smollm2-135m", SETTINGS)
    client.release()
    return client


def test_what_is_typed_before_the_first_load_waits_for_it_and_keeps_its_order() -> None:
    engine = ScriptedEngine()
    client = EngineClient(engine)
    client.submit(Request("a", prompt="x"))
    client.submit(Request("b", prompt="x"))
    assert engine.calls == []
    client.load("smollm2-135m", Settings())
    client.release()
    client.submit(Request("c", prompt="x"))
    assert [call[:2] for call in engine.calls] == [
        ("load", "smollm2-135m"), ("submit", "a"), ("submit", "b"), ("submit", "c"),
    ]  # fmt: skip


def test_a_request_stopped_while_it_waits_ends_and_is_never_submitted() -> None:
    engine = ScriptedEngine()
    client = EngineClient(engine)
    client.submit(Request("a", prompt="x"))
    client.submit(Request("b", prompt="x"))
    client.cancel("a")
    (end,) = client.drain()
    assert isinstance(end, Finished) and (end.request_id, end.reason) == ("a", "cancelled")
    client.release()
    assert engine.calls == [("submit", "b")]
    client.cancel("b")
    assert engine.calls[-1] == ("cancel", "b"), "one submitted is the engine's to end"


def test_an_unknown_model_is_refused_and_nothing_is_wanted_then() -> None:
    engine = ScriptedEngine()
    client = EngineClient(engine)
    with pytest.raises(DsparkError, match="smollm3"):
        client.load("smollm3", Settings())
    assert client.wanted == "" and engine.calls == []
    client.load("smollm2-135m", Settings())
    assert client.wanted == "smollm2-135m"


def test_only_settings_that_need_another_model_load_again() -> None:
    client = loaded(ScriptedEngine())
    assert not client.needs_load(SETTINGS)
    assert not client.needs_load(dataclasses.replace(SETTINGS, temperature=0.5, schedule="fixed"))
    assert client.needs_load(dataclasses.replace(SETTINGS, kv_bits=8))
    assert client.needs_load(dataclasses.replace(SETTINGS, model="qwen3-4b"))


def test_an_engine_that_broke_is_an_event() -> None:
    engine = ScriptedEngine()
    engine.broken = RuntimeError("engine thread died")
    (failure,) = EngineClient(engine).drain()
    assert isinstance(failure, Failed) and "engine thread died" in failure.message and failure.hint


def test_an_engine_that_cannot_start_is_a_failure_with_a_hint() -> None:
    def broken():
        raise ImportError("No module named 'mlx'")

    client = loaded(None, make=broken)
    (failure,) = client.drain()
    assert isinstance(failure, Failed) and "mlx" in failure.message and failure.hint
    client.submit(Request("a", prompt="x"))
    (end,) = client.drain()
    assert isinstance(end, Finished) and end.reason == "error" and end.hint
    client.cancel("a")
    client.cancel_load()
    client.set_policy("fixed")
    client.close()


def test_what_the_engine_refuses_becomes_an_event() -> None:
    class Picky(ScriptedEngine):
        def submit(self, request: Request) -> None:
            raise DsparkError("too long", "shorten it")

        def load(self, model: str, **options) -> None:
            raise DsparkError("no such model", "see the list")

    client = loaded(None, make=Picky)
    assert client.drain() == [Failed("no such model", "see the list")]
    client.submit(Request("a", prompt="x"))
    (end,) = client.drain()
    assert isinstance(end, Finished) and (end.message, end.hint) == ("too long", "shorten it")


def test_a_recording_asks_for_no_model() -> None:
    replay = ReplayEngine(make(1, 20))
    client = EngineClient(replay)
    assert client.replay is replay and EngineClient(ScriptedEngine()).replay is None
    client.load("", Settings())
    assert client.wanted == "recording" and not client.needs_load(Settings(model="other"))


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_what_is_traced_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    client = loaded(ScriptedEngine(["one two three four five"]), trace=path)
    client.submit(Request("a", prompt="x"))
    seen = [event for _ in range(6) for event in client.drain()]
    client.close()
    assert recording(path) == seen
    clock = Clock()
    replay = ReplayEngine(recording(path), float("inf"), clock, play=False)
    replay.submit(Request("b", prompt="x"))
    clock.now += 1
    rows = [row for e in replay.drain() if isinstance(e, StepDone) for row in e.rows]
    assert {row.request_id for row in rows} == {"b"}
    assert "".join(t.text for row in rows for t in row.tokens) == "one two three four five"


def test_a_full_disk_ends_the_trace_and_not_the_chat(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    client = EngineClient(engine, trace=tmp_path / "t.jsonl")

    class Full:
        def write(self, events) -> None:
            raise OSError(28, "No space left on device")

    client._trace = Full()  # type: ignore[assignment]
    engine.emit(step("a", ["x"]))
    events = client.drain()
    assert isinstance(events[0], StepDone)
    assert isinstance(events[1], Notice) and "No space left" in events[1].message
    engine.emit(Queued("b", 0))
    assert client.drain() == [Queued("b", 0)]
    client.close()


def test_a_trace_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        EngineClient(ScriptedEngine(), trace=tmp_path / "none" / "t.jsonl")
