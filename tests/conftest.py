"""Shared fixtures. Imports dspark_mlx before any test imports mlx, for the fast BLAS."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import dspark_mlx  # noqa: F401  (first, see above)
from dspark_mlx import sources
from dspark_mlx.registry import DEFAULT_MODEL, Registry


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> None:
    """A shell starts its background jobs deaf to Ctrl+C, and their children inherit it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's folder; tests that use it carry the mark ``real_model``."""
    folder = sources.on_disk(Registry.load()[DEFAULT_MODEL].target_source)
    if folder is None:
        pytest.skip(f"{DEFAULT_MODEL} is not in the cache: run `make model`")
    return folder
