"""A competing load works while it is on and never outlives whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from dspark_mlx.bench import competing_load, load_response
from dspark_mlx.bench.comparison import encode
from dspark_mlx.bench.competing_load import CompetingLoad, LoadSpec, import_environment, parse_load
from dspark_mlx.bench.load_response import (
    PHASES,
    SETTLE,
    LoadResponse,
    RoundPoint,
    follow_load,
    rounds_to_move,
)
from dspark_mlx.bench.systems import EngineSystem
from dspark_mlx.bench.workload import BenchPrompt, Variant
from dspark_mlx.errors import DsparkError, UsageError
from dspark_mlx.loading import Pair
from dspark_mlx.schedule import make_policy
from dspark_mlx.schedule.cost import CostModel


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize("text", ["", "disk", "cpu:0", "cpu:x", "cpu:-1", "cpu:1:2"])
def test_a_load_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no load"):
        parse_load(text)


def test_a_load_that_would_stop_the_machine_is_refused() -> None:
    with pytest.raises(UsageError, match="too many"):
        parse_load("cpu:100000")


def test_a_gpu_load_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(competing_load, "_has_gpu", lambda: False)
    with pytest.raises(UsageError, match="no GPU"):
        parse_load("gpu:1")
    assert parse_load("cpu:2") == LoadSpec("cpu", 2)


def test_off_ends_every_process_and_on_starts_anew() -> None:
    with CompetingLoad(LoadSpec("cpu", 2)) as competing:
        assert competing.processes == []
        competing.on()
        first = [p.pid for p in competing.processes]
        competing.on()
        assert [p.pid for p in competing.processes] == first and len(first) == 2
        assert not any(map(gone, first))
        competing.off()
        assert all(map(gone, first)) and competing.processes == []
        competing.on()
        second = [p.pid for p in competing.processes]
    assert all(map(gone, second))


def test_an_error_inside_ends_it_too() -> None:
    pids = []
    with pytest.raises(KeyboardInterrupt), CompetingLoad(LoadSpec("cpu", 1)) as competing:
        competing.on()
        pids = [p.pid for p in competing.processes]
        raise KeyboardInterrupt
    assert pids and all(map(gone, pids))


def test_it_ends_when_its_parent_is_killed() -> None:
    script = (
        "import sys, time\n"
        "from dspark_mlx.bench.competing_load import CompetingLoad, LoadSpec\n"
        "load = CompetingLoad(LoadSpec('cpu', 1))\n"
        "load.on()\n"
        "print(load.processes[0].pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=import_environment()
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert not gone(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert eventually(lambda: gone(pid))


def test_a_load_that_cannot_start_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    competing = CompetingLoad(LoadSpec("nonsense", 1))
    with pytest.raises(DsparkError, match="did not start"):
        competing.on()
    assert competing.processes == []


# -- the response ---------------------------------------------------------------------------


def test_a_move_is_found_when_it_happens() -> None:
    assert rounds_to_move([7.0] * 40, [7.0] * 6 + [2.0] * 34) in range(2, 8)
    assert rounds_to_move([2.0] * 40, [7.0] * 40) == 0
    assert rounds_to_move([5.0] * 40, [5.1] * 40) is None
    assert rounds_to_move([5.0] * 3, [1.0] * 40) is None
    easy_then_hard = [5.0] * 20 + [1.0] * 20  # what the text does is no move
    assert rounds_to_move(easy_then_hard, easy_then_hard) is None
    assert rounds_to_move(easy_then_hard, [n + (i > 8) for i, n in enumerate(easy_then_hard)]) in (
        range(5, 9)
    )


def lengths(*phases: list[float]) -> LoadResponse:
    points = [
        RoundPoint(p, n, 0.1, 10.0, None, None, 1.0)
        for p, phase in enumerate(phases)
        for n in phase
    ]
    return LoadResponse("auto", "cpu:1", tuple(points), True, 1)


def test_a_length_that_stays_short_after_the_load_is_told() -> None:
    stuck = lengths([6.0] * 40, [3.0] * 40, [3.0] * 40)
    assert stuck.moved[1] is None and not stuck.recovered and stuck.left == -3.0
    assert "is NOT back" in load_response.text(stuck)
    back = lengths([6.0] * 40, [3.0] * 40, [3.0] * 9 + [5.5] * 31)
    assert back.recovered and back.moved[1] is not None and back.moved[1] <= SETTLE
    assert "is back" in load_response.text(back) and back.to_json()["left"] == -0.5


class Switch:
    """Stands in for a load: knows only when it was on."""

    spec = LoadSpec("cpu", 1)

    def __init__(self) -> None:
        self.changes: list[str] = []

    def on(self) -> None:
        if self.changes[-1:] != ["on"]:
            self.changes.append("on")

    def off(self) -> None:
        if self.changes[-1:] != ["off"]:
            self.changes.append("off")

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.changes.append("end")


def test_every_phase_has_its_rounds_and_the_text_does_not_change(
    pair: Pair, prompts: list[BenchPrompt]
) -> None:
    cost = CostModel({0: {1: {1: 0.002, 6: 0.003}}}, {"dspark": {1: {5: 0.001}}})
    policy = make_policy("auto", cost=cost)
    system = EngineSystem(pair, Variant("dspark", "auto", "dspark auto"), policy, 1)
    switch = Switch()
    encoded = [encode(pair, prompt) for prompt in prompts]
    asked: list[tuple[int, tuple[int, ...]]] = []
    submit = system.engine.submit

    def note(request):
        asked.append((len(switch.changes), request.tokens))
        submit(request)

    system.engine.submit = note
    found = follow_load(system, encoded, switch, rounds=12, max_tokens=20)
    assert switch.changes == [*PHASES, "end"]
    by_phase = [[tokens for phase, tokens in asked if phase == p + 1] for p in range(3)]
    assert all(texts[0] == tuple(encoded[0]) for texts in by_phase)
    assert [len(found.phase(p)) for p in range(3)] == [12, 12, 12]
    assert found.unchanged and found.replies >= 2
    assert len(found.moved) == 2
    words = load_response.text(found)
    assert "output unchanged" in words and words.count("load o") == 3
    assert len(load_response.charts(found)) == 3
    assert found.to_json()["moved"] == found.moved
    assert not system.engine.active


class Drifting(EngineSystem):
    """Writes something else when it is run once more."""

    def run(self, *args):
        import dataclasses

        run = super().run(*args)
        return dataclasses.replace(run, tokens=tuple((2, *t) for t in run.tokens))


def test_a_text_that_changes_under_load_is_told(pair: Pair, prompts: list[BenchPrompt]) -> None:
    system = Drifting(pair, Variant("lookup", "fixed", "lookup"), make_policy("fixed"), 1)
    encoded = [encode(pair, prompts[0])]
    found = follow_load(system, encoded, Switch(), rounds=6, max_tokens=12)
    assert not found.unchanged
    assert "CHANGED" in load_response.text(found)
