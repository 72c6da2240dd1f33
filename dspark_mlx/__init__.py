"""dspark-mlx: fast, lossless text generation with DSpark speculative decoding on MLX.

The public names, each imported when it is first used, so that ``import
dspark_mlx`` costs milliseconds and does not load mlx. ``load``, ``generate``
and ``stream_generate`` have mlx-lm's shapes: a script written for mlx-lm needs
only its import changed.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .blas import prefer_fast_blas

if TYPE_CHECKING:
    from mlx_lm.sample_utils import make_logits_processors as make_logits_processors
    from mlx_lm.sample_utils import make_sampler as make_sampler

    from .engine import Engine as Engine
    from .errors import DsparkError as DsparkError
    from .generate import GenerationResponse as GenerationResponse
    from .generate import batch_generate as batch_generate
    from .generate import generate as generate
    from .generate import load as load
    from .generate import make_prompt_cache as make_prompt_cache
    from .generate import stream_generate as stream_generate
    from .registry import ModelEntry as ModelEntry
    from .registry import Registry as Registry
    from .request import Cuts as Cuts
    from .request import Request as Request
    from .request import SamplingParams as SamplingParams
    from .worker import EngineThread as EngineThread

__version__ = "0.1.0"

_HOME = {
    "load": ".generate",
    "generate": ".generate",
    "stream_generate": ".generate",
    "batch_generate": ".generate",
    "make_prompt_cache": ".generate",
    "GenerationResponse": ".generate",
    "Request": ".request",
    "SamplingParams": ".request",
    "Cuts": ".request",
    "Engine": ".engine",
    "EngineThread": ".worker",
    "ModelEntry": ".registry",
    "Registry": ".registry",
    "DsparkError": ".errors",
    "make_sampler": "mlx_lm.sample_utils",
    "make_logits_processors": "mlx_lm.sample_utils",
}

__all__ = ["__version__", *_HOME]


class _Package(ModuleType):
    """Keeps ``dspark_mlx.generate`` the function when the module of that name is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

# Here, because every module of ours that imports mlx imports this package first.
prefer_fast_blas()


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home, __name__), name)
    globals()[name] = value  # found directly from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
