"""The engine as the app sees it: what waits, what is refused, what is loaded again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from make_trace import make
from scripted import ScriptedBackend

from dspark_mlx.errors import DsparkError
from dspark_mlx.events import Failed, Finished, Queued
from dspark_mlx.request import Request
from tui.backend import TracingBackend
from tui.engine import Engine
from tui.replay import ReplayBackend
from tui.settings import Settings
from tui.state import LiveState


def test_what_is_typed_before_the_first_load_waits_for_it_and_keeps_its_order() -> None:
    backend = ScriptedBackend()
    engine = Engine(backend, LiveState())
    engine.submit(Request("a", prompt="x"))
    engine.submit(Request("b", prompt="x"))
    assert backend.calls == []
    engine.load("smollm2-135m", Settings())
    engine.release()
    engine.submit(Request("c", prompt="x"))
    assert [call[:2] for call in backend.calls] == [
        ("load", "smollm2-135m"), ("submit", "a"), ("submit", "b"), ("submit", "c"),
    ]  # fmt: skip


def test_a_request_stopped_while_it_waits_ends_and_is_never_submitted() -> None:
    backend = ScriptedBackend()
    engine = Engine(backend, LiveState())
    engine.submit(Request("a", prompt="x"))
    engine.submit(Request("b", prompt="x"))
    engine.cancel("a")
    (end,) = engine.drain()
    assert isinstance(end, Finished) and (end.request_id, end.reason) == ("a", "cancelled")
    engine.release()
    assert backend.calls == [("submit", "b")]
    engine.cancel("b")
    assert backend.calls[-1] == ("cancel", "b"), "one submitted is the backend's to end"


def test_an_unknown_model_is_refused_and_nothing_is_wanted_then() -> None:
    backend, live = ScriptedBackend(), LiveState()
    engine = Engine(backend, live)
    with pytest.raises(DsparkError, match="smollm3"):
        engine.load("smollm3", Settings())
    assert engine.wanted == "" and backend.calls == []
    assert isinstance(live.failure, Failed)
    engine.load("smollm2-135m", Settings())
    assert engine.wanted == "smollm2-135m" and live.failure is None


def test_only_settings_that_need_another_model_load_again() -> None:
    settings = Settings(model="smollm2-135m")
    engine = Engine(ScriptedBackend(), LiveState())
    engine.load(settings.model, settings)
    assert not engine.must_load(settings)
    assert not engine.must_load(dataclasses.replace(settings, temperature=0.5, schedule="fixed"))
    assert engine.must_load(dataclasses.replace(settings, kv_bits=8))
    assert engine.must_load(dataclasses.replace(settings, model="qwen3-4b"))


def test_a_backend_that_broke_is_an_event() -> None:
    backend = ScriptedBackend()
    backend.emit(Queued("a", 0))
    backend.broken = RuntimeError("engine thread died")
    (failure,) = Engine(backend, LiveState()).drain()
    assert isinstance(failure, Failed) and "engine thread died" in failure.message and failure.hint


def test_a_recording_is_found_below_a_trace_and_asks_for_no_model(tmp_path: Path) -> None:
    replay = ReplayBackend(make(1, 20))
    traced = TracingBackend(replay, tmp_path / "t.jsonl")
    engine = Engine(traced, LiveState())
    assert engine.replay is replay and Engine(ScriptedBackend(), LiveState()).replay is None
    engine.load("", Settings())
    assert engine.wanted == "recording" and not engine.must_load(Settings(model="other"))
    traced.close()
