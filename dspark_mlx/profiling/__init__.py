"""What a round costs on this machine: measured once, stored, measured again when it may differ.

Makes a ``CostModel`` of an engine's target and proposers and stores it as JSON in the user's
cache folder, under a key that names everything it depends on.
"""

from __future__ import annotations

import threading
from pathlib import Path

from ..engine.engine import Engine
from ..errors import ModelError, UsageError
from ..events import Notice
from ..schedule.cost import CostKey, CostModel
from .profile_store import (
    cost_key,
    covers,
    device_name,
    mlx_version,
    on_cpu,
    profile_path,
    read_profile,
    write_profile,
)
from .profiler import Profiler, Report

# Seconds a profile takes. On two CPU cores a step of smollm2-135m takes 0.13 s, and 32 s pay for
# 7 to 9 samples of every width of one row. No GPU has measured the other: at 10 ms a step, 6 s
# pay for as many samples of five times the kinds.
BUDGET_CPU, BUDGET_GPU = 32.0, 6.0

__all__ = [
    "cost_key",
    "default_budget",
    "device_name",
    "load_or_profile",
    "mlx_version",
    "profile_engine",
    "profile_path",
]


def profile_engine(
    engine: Engine,
    budget_seconds: float | None = None,
    report: Report = lambda event: None,
    *,
    key: CostKey | None = None,
    cancel: threading.Event | None = None,
) -> CostModel:
    """Measure the engine's target and proposers in about ``budget_seconds`` (None: by device).

    Raises ModelError for a model that cannot speculate, UsageError for an engine that is
    decoding, and Cancelled.
    """
    if engine.target.rollback == "none":
        raise ModelError(
            f"{engine.target.no_rollback_reason}, so nothing is drafted",
            "there is nothing to measure; it decodes plainly",
        )
    if engine.active:
        raise UsageError("an engine can be profiled only while it is idle")
    return Profiler(engine, budget_seconds or default_budget(), report, cancel).run(key)


def default_budget() -> float:
    """Seconds a profile takes on this device."""
    return BUDGET_CPU if on_cpu() else BUDGET_GPU


def load_or_profile(
    engine: Engine,
    model: str,
    drafter: str | None = None,
    *,
    budget_seconds: float | None = None,
    report: Report = lambda event: None,
    cancel: threading.Event | None = None,
    cache_dir: Path | None = None,
    again: bool = False,
) -> CostModel:
    """The stored measurement of this model, drafter, device and mlx version, or a new one.

    A model that cannot speculate gets an empty cost model. ``again`` measures in any case. A
    measurement that cannot be stored is used nevertheless, and a Notice says so.
    """
    if engine.target.rollback == "none":
        return CostModel()
    key = cost_key(engine, model, drafter)
    path = profile_path(key, cache_dir)
    stored = None if again else read_profile(path, key)
    if stored is not None and covers(stored, engine):
        return stored
    cost = profile_engine(engine, budget_seconds, report, key=key, cancel=cancel)
    try:
        write_profile(path, cost)
    except OSError as error:
        report(Notice(f"the measured cost could not be stored in {path}: {error.strerror}"))
    return cost
