"""Fast, lossless text generation with DSpark speculative decoding on MLX.

The public names, each imported when it is first used, so that ``import
dspark_mlx`` costs milliseconds and does not load mlx. ``load``, ``generate``
and ``stream_generate`` have mlx-lm's shapes: a script written for mlx-lm needs
only its import changed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .blas import prefer_fast_blas

if TYPE_CHECKING:
    from mlx_lm.sample_utils import make_logits_processors as make_logits_processors
    from mlx_lm.sample_utils import make_sampler as make_sampler

    from .api.generate import GenerationResponse as GenerationResponse
    from .api.generate import batch_generate as batch_generate
    from .api.generate import generate as generate
    from .api.generate import load as load
    from .api.generate import make_prompt_cache as make_prompt_cache
    from .api.generate import stream_generate as stream_generate
    from .engine.engine import Engine as Engine
    from .errors import DsparkError as DsparkError
    from .registry import ModelEntry as ModelEntry
    from .registry import Registry as Registry
    from .request import Cuts as Cuts
    from .request import Request as Request
    from .request import SamplingParams as SamplingParams
    from .worker import EngineThread as EngineThread

__version__ = "0.1.0"

_HOME = {
    "load": ".api.generate",
    "generate": ".api.generate",
    "stream_generate": ".api.generate",
    "batch_generate": ".api.generate",
    "make_prompt_cache": ".api.generate",
    "GenerationResponse": ".api.generate",
    "Request": ".request",
    "SamplingParams": ".request",
    "Cuts": ".request",
    "Engine": ".engine.engine",
    "EngineThread": ".worker",
    "ModelEntry": ".registry",
    "Registry": ".registry",
    "DsparkError": ".errors",
    "make_sampler": "mlx_lm.sample_utils",
    "make_logits_processors": "mlx_lm.sample_utils",
}

__all__ = ["__version__", *_HOME]


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
