"""The engine's thread: commands in, events out, and nothing that happens on it ends it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from bpe import byte_tokenizer
from mlx_lm.generate import generate_step
from model_folder import toy_model, write_drafter, write_model
from toys import prompt

import dspark_mlx.loading as loading
from dspark_mlx.events import Event, Failed, Finished, Loaded, Loading, Queued, StepDone
from dspark_mlx.request import Request, SamplingParams
from dspark_mlx.worker import EngineThread

PATIENCE = 60.0  # for a machine that is busy with other things; nothing here is timed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture
def worker() -> Iterator[EngineThread]:
    thread = EngineThread()
    yield thread
    assert thread.close(PATIENCE)


def until(worker: EngineThread, done: Callable[[Event], bool]) -> list[Event]:
    """Events up to the first for which ``done`` holds."""
    seen: list[Event] = []
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        for event in worker.wait(1.0):
            seen.append(event)
        if any(done(event) for event in seen):
            return seen
    raise AssertionError(f"not in time; the last events were {seen[-3:]}")


def finished(*ids: str) -> Callable[[Event], bool]:
    left = set(ids)

    def check(event: Event) -> bool:
        if isinstance(event, Finished):
            left.discard(event.request_id)
        return not left

    return check


def load(worker: EngineThread, folder: Path, **options: Any) -> list[Event]:
    method = options.pop("method", "auto")
    schedule = options.pop("schedule", "fixed")
    worker.load(
        str(folder), method=method, schedule=schedule, options={"profile": False, **options}
    )
    return until(worker, lambda e: isinstance(e, Loaded | Failed))


def ask(id: str = "a", **options: Any) -> Request:
    options.setdefault("tokens", tuple(prompt(12)))
    options.setdefault("max_tokens", 16)
    return Request(id, ignore_eos=True, **options)


def tokens_of(events: list[Event], id: str) -> list[int]:
    return [
        token.id
        for event in events
        if isinstance(event, StepDone)
        for row in event.rows
        if row.request_id == id
        for token in row.tokens
    ]


def ending(events: list[Event], id: str) -> Finished:
    (found,) = [e for e in events if isinstance(e, Finished) and e.request_id == id]
    return found


# -- loading ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["none", "lookup", "dspark", "auto"])
def test_a_model_is_loaded_and_answers(
    worker: EngineThread, folder: Path, tmp_path: Path, method: Any
) -> None:
    own = [t for t, _ in generate_step(mx.array(prompt(12)), toy_model(), max_tokens=16)]
    options: dict[str, Any] = {"method": method}
    if method in ("dspark", "auto"):
        lesson = [*prompt(12), *own]
        options["drafter"] = str(write_drafter(tmp_path / "drafter", lessons=[lesson], block=4))
    events = load(worker, folder, **options)
    loaded = events[-1]
    assert isinstance(loaded, Loaded), loaded
    assert loaded.method == ("dspark" if method == "auto" else method)
    assert loaded.reason and loaded.weight_bytes > 0 and loaded.context_limit == 2048
    assert any(isinstance(e, Loading) for e in events)
    worker.submit(ask())
    ran = until(worker, finished("a"))
    assert isinstance(ran[0], Queued)
    assert tokens_of(ran, "a") == own
    assert ending(ran, "a").method == loaded.method
    if method in ("dspark", "auto"):
        assert ending(ran, "a").accepted > 0


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ({"model": "/no/such/folder"}, "no folder"),
        ({"model": "no-such-model-at-all"}, "no-such-model-at-all"),
        ({"schedule": "magic"}, "magic"),
        ({"method": "magic"}, "magic"),
        ({"method": "dspark"}, "needs a drafter"),
        ({"drafter": "/no/such/drafter"}, "/no/such/drafter"),
        ({"kv_bits": 7}, "7 bits"),
        ({"dtype": "int3"}, "int3"),
        ({"nonsense": 1}, "nonsense"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_a_load_that_fails_says_why_and_the_thread_lives(
    worker: EngineThread, folder: Path, what: dict[str, Any], why: str
) -> None:
    options = dict(what)
    where = Path(options.pop("model", folder))
    failed = load(worker, where, **options)[-1]
    assert isinstance(failed, Failed) and why in failed.message
    worker.submit(ask())
    assert "no model is loaded" in ending(until(worker, finished("a")), "a").message
    assert isinstance(load(worker, folder)[-1], Loaded)


def test_a_truncated_model_is_named(worker: EngineThread, tmp_path: Path) -> None:
    broken = write_model(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    failed = load(worker, broken)[-1]
    assert isinstance(failed, Failed) and "cut short or damaged" in failed.message
    (broken / "config.json").write_text("{")
    assert isinstance(load(worker, broken)[-1], Failed)


def test_a_second_load_replaces_the_first(worker: EngineThread, folder: Path) -> None:
    load(worker, folder)
    worker.submit(ask("long", max_tokens=1500))
    until(worker, lambda e: isinstance(e, StepDone))
    events = load(worker, folder, method="lookup")
    assert ending(events, "long").message == "the model was unloaded"
    assert isinstance(events[-1], Loaded) and events[-1].method == "lookup"


def test_a_load_that_is_given_up_ends_in_failed(
    worker: EngineThread, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ``cancel_load``, by another load, and by closing."""
    started, real = threading.Event(), loading.load_engine

    def slow(options: Any, report: Any, stop: threading.Event) -> Any:
        if options.model == "slow":
            started.set()
            assert stop.wait(PATIENCE), "nobody told it to stop"
            raise loading.DsparkError("the load was given up")
        return real(options, report, stop)

    monkeypatch.setattr(loading, "load_engine", slow)
    monkeypatch.setattr(loading, "ensure_on_disk", lambda *args: None)
    worker.load("slow")
    assert started.wait(PATIENCE)
    worker.cancel_load()
    until(worker, lambda e: isinstance(e, Failed) and "given up" in e.message)
    started.clear()
    worker.load("slow")
    assert started.wait(PATIENCE)
    events = load(worker, folder)
    assert [type(e) for e in events if isinstance(e, Failed | Loaded)] == [Failed]
    until(worker, lambda e: isinstance(e, Loaded))
    started.clear()
    worker.load("slow")
    assert started.wait(PATIENCE)
    # the fixture closes it now


# -- requests ---------------------------------------------------------------------------------


def test_requests_before_any_model_are_refused_one_by_one(worker: EngineThread) -> None:
    for i in range(3):
        worker.submit(ask(str(i)))
    worker.cancel("1")
    worker.set_policy("fixed")
    worker.unload()
    events = until(worker, finished("0", "1", "2"))
    for i in range(3):
        end = ending(events, str(i))
        assert (end.reason, end.message, end.hint) == (
            "error",
            "no model is loaded",
            "load one first",
        )


def test_requests_that_cannot_be_served_end_at_once(worker: EngineThread, folder: Path) -> None:
    load(worker, folder)
    bad = {
        "ids": {"tokens": (5, 999)},
        "long": {"tokens": tuple(prompt(2048))},
        "dspark": {"method": "dspark"},
        "role": {"tokens": None, "messages": ({"content": "x"},)},
    }
    for id, options in bad.items():
        worker.submit(ask(id, **options))
    worker.submit(ask("good", max_tokens=2000))
    worker.submit(ask("good"))  # the same id twice
    events = until(worker, lambda e: isinstance(e, Failed))
    for id in bad:
        assert ending(events, id).reason == "error" and ending(events, id).message
    # The second is refused in an event of its own: the first goes on under that id.
    assert "already active" in next(e for e in events if isinstance(e, Failed)).message
    worker.cancel("good")
    assert ending(until(worker, finished("good")), "good").reason == "cancelled"


def test_cancelling(worker: EngineThread, folder: Path) -> None:
    load(worker, folder)
    worker.submit(ask("long", max_tokens=2000))
    worker.submit(ask("short"))
    until(worker, lambda e: isinstance(e, StepDone) and len(e.rows) == 2)
    worker.cancel("long")
    worker.cancel("nobody")
    events = until(worker, finished("long"))
    assert ending(events, "long").reason == "cancelled"
    rest = (
        events
        if any(isinstance(e, Finished) and e.request_id == "short" for e in events)
        else (until(worker, finished("short")))
    )
    assert ending(rest, "short").reason == "length"
    time.sleep(0.05)
    assert worker.drain() == [], "the engine works on though nobody asks"


def test_a_chat_streams_its_text(worker: EngineThread, folder: Path) -> None:
    load(worker, folder)
    chat: list[dict[str, str]] = []
    for turn in range(3):
        chat.append({"role": "user", "content": f"Question {turn}?"})
        worker.submit(ask(str(turn), tokens=None, messages=tuple(chat)))
        events = until(worker, finished(str(turn)))
        text = (
            "".join(
                token.text
                for event in events
                if isinstance(event, StepDone)
                for row in event.rows
                for token in row.tokens
            )
            + ending(events, str(turn)).tail
        )
        assert text == byte_tokenizer().decode(tokens_of(events, str(turn)))
        chat.append({"role": "assistant", "content": text})
        # an answer of random bytes may not tokenize to itself, but the question before it does
        assert (ending(events, str(turn)).reused_tokens > 0) == (turn > 0)


def test_a_failure_inside_a_round_ends_the_replies_and_not_the_engine(
    worker: EngineThread, folder: Path
) -> None:
    load(worker, folder, method="lookup")
    engine = worker._engine
    forward, calls = engine.batch.forward_tokens, [0]

    def failing(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise RuntimeError("[metal::malloc] Attempting to allocate beyond memory")
        return forward(*given)

    engine.batch.forward_tokens = failing
    worker.submit(ask("a", max_tokens=40))
    worker.submit(ask("b", max_tokens=40, tokens=tuple(prompt(5, 1))))
    events = until(worker, finished("a", "b"))
    for id in "ab":
        end = ending(events, id)
        assert (end.reason, end.message) == ("error", "out of memory") and end.hint
    worker.submit(ask("again"))
    events = until(worker, finished("again"))
    own = [t for t, _ in generate_step(mx.array(prompt(12)), toy_model(), max_tokens=16)]
    assert tokens_of(events, "again") == own


def test_a_failing_processor_is_its_own_requests_affair(worker: EngineThread, folder: Path) -> None:
    load(worker, folder)

    def fails(tokens: Any, logits: Any) -> Any:
        raise KeyError("what?")

    worker.submit(ask("good"))
    worker.submit(ask("bad", logits_processors=(fails,)))
    events = until(worker, finished("good", "bad"))
    assert ending(events, "bad").reason == "error" and "what?" in ending(events, "bad").message
    assert ending(events, "good").reason == "length"


def test_the_policy_may_change_at_any_time(worker: EngineThread, folder: Path) -> None:
    load(worker, folder, method="lookup", schedule="off")
    worker.submit(ask("a", max_tokens=1200))
    until(worker, lambda e: isinstance(e, StepDone))
    worker.set_policy("fixed", draft_length=2)
    events = until(worker, lambda e: isinstance(e, StepDone) and e.policy == "fixed")
    worker.set_policy("magic")
    worker.set_policy("fixed", p_min=0.5)
    worker.set_policy("fixed", nonsense=1)
    failures = 0
    while failures < 3:
        events = until(worker, lambda e: isinstance(e, Failed | Finished))
        failures += sum(isinstance(e, Failed) for e in events)
        assert not any(isinstance(e, Finished) for e in events)
    worker.cancel("a")
    until(worker, finished("a"))


# -- leaving ----------------------------------------------------------------------------------


def test_unloading_ends_what_runs_and_gives_the_memory_back(
    worker: EngineThread, folder: Path
) -> None:
    load(worker, folder)
    worker.submit(ask("a", max_tokens=2000))
    until(worker, lambda e: isinstance(e, StepDone))
    worker.unload()
    end = ending(until(worker, finished("a")), "a")
    assert end.reason in ("cancelled", "error") and end.message == "the model was unloaded"
    worker.submit(ask("b"))
    assert "no model" in ending(until(worker, finished("b")), "b").message
    assert worker._engine is None


@pytest.mark.parametrize("busy", [False, True])
def test_closing_is_prompt_even_while_decoding(folder: Path, busy: bool) -> None:
    worker = EngineThread()
    load(worker, folder)
    if busy:
        for i in range(3):
            worker.submit(ask(str(i), max_tokens=2000))
        until(worker, lambda e: isinstance(e, StepDone))
    assert worker.close(PATIENCE)
    assert not worker._thread.is_alive()
    ends = [e for e in worker.drain() if isinstance(e, Finished)]
    assert len(ends) == (3 if busy else 0)
    assert worker.close(PATIENCE), "closing twice is harmless"


def test_threads_do_not_pile_up(folder: Path) -> None:
    before = threading.active_count()
    for _ in range(3):
        worker = EngineThread()
        load(worker, folder)
        assert worker.close(PATIENCE)
    assert threading.active_count() == before


def test_a_listener_hears_everything_in_order_and_may_fail(folder: Path) -> None:
    heard: list[Event] = []
    done = threading.Event()

    def listen(event: Event) -> None:
        assert threading.current_thread().name == "dspark-engine"
        heard.append(event)
        if isinstance(event, Finished):
            done.set()
            raise RuntimeError("the listener is tired")

    worker = EngineThread(listen)
    worker.load(str(folder), schedule="fixed", options={"profile": False})
    worker.submit(ask("a"))
    assert done.wait(PATIENCE)
    assert [type(e).__name__ for e in heard if not isinstance(e, Loading | StepDone)] == [
        "Loaded",
        "Queued",
        "Prefill",
        "Finished",
    ]
    worker.submit(ask("b"))
    events = until(worker, finished("b"))
    assert any(isinstance(e, Failed) and "listener is tired" in e.message for e in events)
    assert worker.close(PATIENCE)


def test_a_thousand_short_requests_leave_nothing_behind(folder: Path) -> None:
    worker = EngineThread()
    load(worker, folder, method="lookup")
    count = 1000
    for i in range(count):
        sampling = SamplingParams(temperature=0.5 * (i % 2), seed=i)
        worker.submit(ask(str(i), tokens=tuple(prompt(3, i % 5)), max_tokens=1, sampling=sampling))
    ended, last = 0, 0
    end = time.monotonic() + 3 * PATIENCE
    while ended < count and time.monotonic() < end:
        for event in worker.wait(1.0):
            if isinstance(event, Finished):
                assert event.reason == "length"
                ended += 1
            if isinstance(event, StepDone):
                last = event.memory.kv
    assert ended == count
    engine = worker._engine
    assert not engine.active and not engine.batch.sequences and engine.batch.rows is None
    assert not engine.prefiller.queue and not engine.prefiller.joining and not engine._events
    assert len(engine.prefiller.prefixes._entries) <= 8
    assert len(engine.batch.proposers["lookup"]._rows) == 0
    assert len(engine._logits) <= 8
    assert last <= engine.prefiller.kv_limit and engine.kv_bytes < 8 * 300 * 1024
    assert worker.close(PATIENCE)


UNCLOSED = """
import sys
from dspark_mlx.events import Failed, Loaded
from dspark_mlx.worker import EngineThread
worker = EngineThread()
worker.load(sys.argv[1], options={"cache_dir": sys.argv[2]})
seen = []
while not any(isinstance(e, Failed | Loaded) for e in seen):
    seen += worker.wait(60)
assert isinstance(seen[-1], Loaded), seen[-1]
"""


def test_a_process_that_never_closes_its_engine_ends_cleanly(folder: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNCLOSED, str(folder), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("what", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_nothing_a_request_raises_ends_the_thread(
    worker: EngineThread, folder: Path, what: type[BaseException]
) -> None:
    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        raise what("stop")

    load(worker, folder)
    worker.submit(ask("bad", logits_processors=(processor,)))
    assert ending(until(worker, finished("bad")), "bad").reason == "error"
    worker.submit(ask("next"))
    assert ending(until(worker, finished("next")), "next").reason == "length"
