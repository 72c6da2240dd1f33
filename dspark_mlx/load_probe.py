"""Asks the operating system how busy, full and hot it is, without root.

The one module here that is not pure. Any answer may be missing (None): a laptop
that does not say is no reason to fail. Heat is read where a plain user may:
``pmset -g therm`` on macOS, thermal zones nowhere (they say degrees, not
whether anything is limited).
"""

from __future__ import annotations

import platform
import re
import subprocess

import psutil

from .schedule.device_load import Host

PATIENCE = 0.5  # seconds for pmset to answer


def probe() -> Host:
    """Processor share since the last call (None at first), memory share, thermal state."""
    return Host(load=_processors(), memory=_memory(), thermal=_thermal())


_warm = False


def _processors() -> float | None:
    global _warm
    try:
        share = float(psutil.cpu_percent(interval=None)) / 100.0
    except (OSError, RuntimeError):
        return None
    first, _warm = not _warm, True
    return None if first else share  # psutil's first answer has nothing to compare with


def _memory() -> float | None:
    try:
        return float(psutil.virtual_memory().percent) / 100.0
    except (OSError, RuntimeError):
        return None


def _thermal() -> str | None:
    if platform.system() != "Darwin":
        return None
    try:
        done = subprocess.run(
            ["/usr/bin/pmset", "-g", "therm"], capture_output=True, text=True, timeout=PATIENCE
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return thermal_state(done.stdout) if done.returncode == 0 else None


def thermal_state(text: str) -> str | None:
    """What ``pmset -g therm`` says: ``nominal``, or ``limited to 70 %`` of speed."""
    limits = [int(n) for n in re.findall(r"CPU_(?:Speed_Limit|Scheduler_Limit)\s*=\s*(\d+)", text)]
    if limits and min(limits) < 100:
        return f"limited to {min(limits)} %"
    warnings = re.findall(r"thermal warning level\D*(\d+)", text, re.IGNORECASE)
    if any(int(level) > 0 for level in warnings):
        return f"warning level {max(int(level) for level in warnings)}"
    if limits or warnings or "No thermal warning level" in text:
        return "nominal"
    return None
