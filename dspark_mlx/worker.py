"""The thread that owns MLX: commands go in, events come out, only plain values cross.

MLX streams belong to threads, so everything is loaded and run on this one. Its
callers never wait for it: ``load``, ``submit`` and ``cancel`` return at once,
and what comes of them arrives as events.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .errors import DsparkError
from .events import Event, Failed, Finished
from .request import Method, Request

# How long one idle wait lasts; commands end it at once, so it costs nothing.
_IDLE_SECONDS = 3600.0


class EngineThread:
    """Runs an engine. All methods may be called from any thread.

    ``on_event`` (optional) is called on the engine's thread for each event, and
    must return quickly; without it, or once it has raised, events wait for ``drain``.
    """

    def __init__(self, on_event: Callable[[Event], None] | None = None) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._on_event = on_event
        self._stop_loading = threading.Event()
        self._engine: Any = None
        self._thread = threading.Thread(target=self._run, name="dspark-engine", daemon=True)
        self._thread.start()
        atexit.register(_close, weakref.ref(self))

    # -- commands -------------------------------------------------------------------------

    def load(
        self,
        model: str,
        *,
        method: Method = "auto",
        schedule: str = "auto",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Load a model in place of the present one; ends in ``Loaded`` or ``Failed``.

        The present one is kept where the other is not known or cannot be fetched.

        ``options`` are further fields of ``loading.LoadOptions``.
        """
        self._stop_loading.set()  # an earlier load that still runs is given up
        stop = self._stop_loading = threading.Event()
        fields = {**(options or {}), "model": model, "method": method, "schedule": schedule}
        self._commands.put(lambda: self._load(fields, stop))

    def cancel_load(self) -> None:
        """Give up the load or download that runs; it ends in ``Failed``."""
        self._stop_loading.set()

    def unload(self) -> None:
        """Drop the model and give its memory back; running requests end with an error."""
        self._commands.put(self._unload)

    def submit(self, request: Request) -> None:
        """Queue a request; its events end in ``Finished``, also when it is refused.

        Only an id that is already active is answered by ``Failed``: the ``Finished`` to come is
        that of the reply which has it.
        """
        self._commands.put(lambda: self._submit(request))

    def cancel(self, request_id: str) -> None:
        """Have a request end at the next round."""
        self._commands.put(lambda: self._cancel(request_id))

    def set_policy(self, schedule: str, **options: Any) -> None:
        """Use another schedule from the next round on."""
        self._commands.put(lambda: self._set_policy(schedule, options))

    def close(self, timeout: float = 10.0) -> bool:
        """Stop after the current round; True when the thread has ended in time."""
        self._stop_loading.set()
        self._commands.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        _wait_until_gone(self._thread.native_id)
        return True

    # -- events ---------------------------------------------------------------------------

    def drain(self) -> list[Event]:
        """The events since the last call, oldest first; never waits."""
        events = []
        while True:
            try:
                events.append(self._events.get_nowait())
            except queue.Empty:
                return events

    def wait(self, timeout: float | None = None) -> list[Event]:
        """Like ``drain``, but waits for the first event, at most ``timeout`` seconds."""
        try:
            first = self._events.get(timeout=timeout)
        except queue.Empty:
            return []
        return [first, *self.drain()]

    # -- on the engine's thread -----------------------------------------------------------

    def _emit(self, event: Event) -> None:
        if self._on_event is not None:
            try:
                self._on_event(event)
                return
            except Exception as error:
                # The caller's fault must not end the thread: events wait for ``drain`` from now on.
                self._on_event = None
                self._events.put(Failed(f"on_event failed: {_describe(error)}"))
        self._events.put(event)

    def _run(self) -> None:
        while True:
            busy = self._engine is not None and self._engine.active
            try:
                command = self._commands.get(block=not busy, timeout=_IDLE_SECONDS)
            except queue.Empty:
                if busy:
                    self._step()
                continue
            if command is None:
                break
            try:
                command()
            except BaseException as error:  # also an exit that a caller's code asks for
                self._emit(Failed(_describe(error), "see the log, or load the model again"))
        self._unload()

    def _step(self) -> None:
        try:
            events = self._engine.step()
        except BaseException as error:  # as above: on this thread it would end all requests
            message, hint = _explain(error)
            events = self._engine.abandon(message, hint)
        for event in events:
            self._emit(event)

    def _load(self, fields: dict[str, Any], stop: threading.Event) -> None:
        try:
            from .loading import LoadOptions, ensure_on_disk, load_engine

            options = LoadOptions(**fields)
            ensure_on_disk(options, self._emit, stop)
            self._unload()  # both at once might not fit
            engine, loaded = load_engine(options, self._emit, stop)
        except DsparkError as error:
            self._emit(Failed(error.message, error.hint))
        except Exception as error:
            self._emit(Failed(*_explain(error)))
        else:
            self._engine = engine
            self._emit(loaded)

    def _unload(self) -> None:
        if self._engine is None:
            return
        for event in self._engine.abandon("the model was unloaded"):
            self._emit(event)
        self._engine = None
        import mlx.core as mx

        mx.clear_cache()

    def _submit(self, request: Request) -> None:
        try:
            if self._engine is None:
                raise DsparkError("no model is loaded", "load one first")
            if self._engine.knows(request.id):
                # Not a Finished: that would read as the end of the reply that is running.
                self._emit(Failed(f"a request with the id {request.id!r} is already active"))
                return
            self._engine.submit(request)
        except Exception as error:
            message, hint = _explain(error)
            self._emit(_refused(request, message, hint))

    def _cancel(self, request_id: str) -> None:
        if self._engine is not None:
            self._engine.cancel(request_id)

    def _set_policy(self, schedule: str, options: Mapping[str, Any]) -> None:
        if self._engine is None:
            return
        from .schedule import make_policy

        try:
            self._engine.policy = make_policy(schedule, cost=self._engine.cost, **options)
        except DsparkError as error:
            self._emit(Failed(error.message, error.hint))


def _close(thread: weakref.ref[EngineThread]) -> None:
    """At exit: a thread that calls MLX while the interpreter shuts down aborts the process."""
    if (one := thread()) is not None:
        one.close()


def _wait_until_gone(native_id: int | None) -> None:
    """Until the system's thread has ended too.

    Joining waits only for its Python side. What MLX keeps for the thread is
    destroyed after that and needs the interpreter once more, which must not be
    shutting down by then.
    """
    task = Path(f"/proc/self/task/{native_id}")
    if not task.parent.exists():  # not Linux: no way to ask
        time.sleep(0.05)
        return
    deadline = time.monotonic() + 5.0
    while task.exists() and time.monotonic() < deadline:
        time.sleep(0.002)


def _refused(request: Request, message: str, hint: str) -> Finished:
    return Finished(
        request_id=request.id,
        reason="error",
        method=request.method,
        seed=request.sampling.seed,
        message=message,
        hint=hint,
    )


def _describe(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _explain(error: BaseException) -> tuple[str, str]:
    """One line what went wrong, and one what to do."""
    if isinstance(error, DsparkError):
        return error.message, error.hint
    if isinstance(error, MemoryError) or "memory" in str(error).lower():
        return "out of memory", "close other programs, shorten the chat, or use --kv-bits 8"
    return f"the engine failed: {_describe(error)}", "try again; if it recurs, report it"
