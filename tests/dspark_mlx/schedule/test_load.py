"""LoadMonitor reports what is measured; the probe never fails."""

import pytest

from dspark_mlx.load_probe import probe, thermal_state
from dspark_mlx.schedule.device_load import Host, LoadMonitor


def test_the_fast_average_follows_and_the_slow_one_remembers():
    monitor = LoadMonitor()
    for _ in range(100):
        monitor.round(0.1, 0.1)
    for _ in range(10):
        monitor.round(0.1, 0.2)
    load = monitor.load(active=3, queued=1)
    assert load.slowdown_fast == pytest.approx(2.0, rel=0.1)
    assert load.slowdown_slow < 1.15
    assert (load.active, load.queued) == (3, 1)
    for _ in range(10):
        monitor.round(0.1, 0.1)
    assert monitor.load(0, 0).slowdown_fast == pytest.approx(1.0, abs=0.1)


def test_rounds_without_a_prediction_say_nothing():
    monitor = LoadMonitor()
    monitor.round(None, 5.0)
    monitor.round(0.0, 5.0)
    assert monitor.load(0, 0).slowdown_fast == 1.0


def test_the_host_is_asked_now_and_then_only():
    now, asked = [0.0], []

    def host():
        asked.append(now[0])
        return Host(load=0.5, memory=0.7, thermal="nominal")

    monitor = LoadMonitor(host, clock=lambda: now[0])
    for tick in range(100):
        now[0] = tick * 0.1
        load = monitor.load(1, 0)
    assert (load.host, load.memory_pressure, load.thermal) == (0.5, 0.7, "nominal")
    assert len(asked) == 5


def test_the_probe_answers_or_says_nothing():
    host = probe()
    for share in (host.load, host.memory):
        assert share is None or 0.0 <= share <= 1.0


def test_thermal_state_reads_pmset():
    cool = "Note: No thermal warning level has been recorded\n"
    hot = "2026-01-01 CPU Power notify\n\tCPU_Scheduler_Limit \t= 100\n\tCPU_Speed_Limit \t= 62\n"
    assert thermal_state(cool) == "nominal"
    assert thermal_state(hot) == "limited to 62 %"
    assert thermal_state(hot.replace("62", "100")) == "nominal"
    assert thermal_state("something else entirely") is None
