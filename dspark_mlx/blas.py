"""The fast BLAS for MLX's CPU backend on Linux; elsewhere nothing.

The Linux wheels of mlx link a reference BLAS. An OpenBLAS whose symbols are
global before mlx is loaded takes its place and makes float32 matmuls 5 to 15
times faster. Called once when ``dspark_mlx`` is imported, before any module of
ours can import mlx. Must not import mlx or numpy.
"""

from __future__ import annotations

import ctypes
import sys

_NAMES = ("libopenblas.so.0", "libopenblas.so")  # the loader knows where they are

_loaded: str | None = None


def prefer_fast_blas(threads: int = 1) -> str | None:
    """Load an installed OpenBLAS for mlx and return its name, or None.

    None means that there is none, that this is not Linux, or that mlx was
    imported already and has bound the BLAS it brought. ``threads`` is set in
    the library: one is steadier than two on a busy machine. Safe to repeat.
    """
    global _loaded
    if _loaded is not None or not sys.platform.startswith("linux") or "mlx.core" in sys.modules:
        return _loaded
    for name in _NAMES:
        try:
            library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        if hasattr(library, "openblas_set_num_threads"):
            library.openblas_set_num_threads(threads)
        _loaded = name
        break
    return _loaded
