"""A competing load: processes that multiply matrices until they are ended.

``python -m dspark_mlx.bench.competing_load cpu`` is one of these processes. It ends when it is
killed or when its standard input closes, and so also when the process that started it is gone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ..errors import DsparkError, UsageError

KINDS = ("cpu", "gpu")
SIZE = {"cpu": 512, "gpu": 4096}  # rows and columns: a multiplication takes some milliseconds
MOST_PER_CORE = 4  # processes; more would only keep the machine from answering
START_SECONDS = 60.0  # a process imports numpy or mlx first: a second or two on an idle machine
STOP_SECONDS = 5.0  # a killed process is gone long before; more would hide a fault


@dataclass(frozen=True, slots=True)
class LoadSpec:
    kind: str
    processes: int


def parse_load(text: str) -> LoadSpec:
    """``cpu``, ``cpu:2`` or ``gpu:1``: what is kept busy, and by how many processes.

    Raises UsageError.
    """
    kind, _, count = text.partition(":")
    try:
        processes = int(count or 1)
    except ValueError:
        processes = 0
    if kind not in KINDS or processes < 1:
        raise UsageError(f"no load {text!r}", "write cpu:1, cpu:2 or gpu:1")
    most = MOST_PER_CORE * (os.cpu_count() or 1)
    if processes > most:
        raise UsageError(
            f"{processes} processes are too many to load this machine with", f"at most {most}"
        )
    if kind == "gpu" and not _has_gpu():
        raise UsageError("this machine has no GPU that mlx can use", "use --load cpu:1")
    return LoadSpec(kind, processes)


class CompetingLoad:
    """A load that can be switched on and off. It starts off; leaving the ``with`` ends it."""

    def __init__(self, spec: LoadSpec) -> None:
        self.spec = spec
        self.processes: list[subprocess.Popen[str]] = []

    def on(self) -> None:
        """Start it and wait until every process is multiplying. Raises DsparkError."""
        if self.processes:
            return
        for _ in range(self.spec.processes):
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", __name__, self.spec.kind],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env={**import_environment(), "OPENBLAS_NUM_THREADS": "1"},
                )
            )
        for process in self.processes:
            watchdog = threading.Timer(START_SECONDS, process.kill)
            watchdog.start()
            assert process.stdout is not None
            ready = process.stdout.readline()
            watchdog.cancel()
            if ready.strip() != "busy":
                _, error = self._end(process)
                self.off()
                raise DsparkError(f"the competing load did not start: {error.strip()[-200:]}")

    def off(self) -> None:
        """End it and wait until it has ended."""
        while self.processes:
            self._end(self.processes.pop())

    def __enter__(self) -> CompetingLoad:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.off()

    def _end(self, process: subprocess.Popen[str]) -> tuple[str, str]:
        process.kill()
        return process.communicate(timeout=STOP_SECONDS)


def import_environment() -> dict[str, str]:
    """The environment of a process that can import this package in any working directory."""
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path}


def _has_gpu() -> bool:
    import mlx.core as mx

    return bool(mx.default_device().type == mx.DeviceType.gpu)


def _end_with_parent() -> None:
    sys.stdin.read()  # returns only when the other end is closed
    os._exit(0)


def main(kind: str) -> None:
    """Multiply until the process is ended."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    multiply = {"cpu": _cpu_matmul, "gpu": _gpu_matmul}[kind]()
    multiply()
    print("busy", flush=True)
    while True:
        multiply()


def _cpu_matmul() -> Any:
    import numpy as np

    a = np.random.default_rng(0).random((SIZE["cpu"], SIZE["cpu"]), dtype=np.float32)
    return lambda: a @ a


def _gpu_matmul() -> Any:
    import mlx.core as mx

    a = mx.random.normal((SIZE["gpu"], SIZE["gpu"]))
    mx.eval(a)
    return lambda: mx.eval(a @ a)


if __name__ == "__main__":
    main(sys.argv[1])
