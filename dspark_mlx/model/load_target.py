"""From a folder on disk to a target and its tokenizer, through mlx-lm's own loader."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import psutil
from mlx_lm.utils import load_model, load_tokenizer

from .. import sources
from ..errors import DsparkError, ModelError, UsageError
from .target import Target, to_float

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
MOST_OF_MEMORY = 0.9  # of the machine's memory, for weights; the system needs the rest


def load_target(
    folder: Path,
    *,
    dtype: str = "auto",
    kv_bits: int | None = None,
    quantize_bits: int | None = None,
) -> tuple[Target, Any]:
    """The model in ``folder`` and its tokenizer.

    ``dtype`` "auto" keeps a model as it is on a GPU and makes it float32 on the
    CPU. ``kv_bits`` quantises its KV cache, ``quantize_bits`` its weights.
    Raises ModelError for a model that is too large, damaged or unknown, and
    UsageError for an unknown dtype. No code of the checkpoint is run.
    """
    size = sources.weight_bytes(folder)
    memory = psutil.virtual_memory().total
    if size > MOST_OF_MEMORY * memory:
        raise ModelError(
            f"the weights in {folder} are {size / 1e9:.1f} GB; "
            f"this machine has {memory / 1e9:.1f} GB of memory",
            "choose a smaller or more strongly quantised model; see `dspark models`",
        )
    _check_json(folder / "generation_config.json")
    try:
        model, config = load_model(folder)
        # Left unset, transformers asks, and runs a checkpoint's code on a yes.
        never = {"trust_remote_code": False}
        tokenizer = load_tokenizer(folder, never, eos_token_ids=config.get("eos_token_id"))
    except DsparkError:
        raise
    except Exception as error:
        raise ModelError(
            f"cannot load the model in {folder}: {_first_line(error)}",
            "check that it is a text model mlx-lm knows and that its files are whole",
        ) from error
    # The context is checked when a prompt comes; transformers would warn of it as well.
    once = getattr(tokenizer, "deprecation_warnings", {})
    once["sequence-length-is-longer-than-the-specified-maximum"] = True
    cpu = mx.default_device().type == mx.DeviceType.cpu
    if cpu and shutil.which("g++") is None:
        mx.disable_compile()  # on the CPU backend it calls a C++ compiler
    name = dtype if dtype != "auto" else ("float32" if cpu else "")
    if name:
        if name not in DTYPES:
            raise UsageError(f"no dtype named {name!r}", f"choose auto or {', '.join(DTYPES)}")
        to_float(model, DTYPES[name])
    if quantize_bits is not None:
        nn.quantize(model, bits=quantize_bits)
    mx.eval(model.parameters())
    return Target(model, config, kv_bits=kv_bits), tokenizer


def _check_json(path: Path) -> None:
    """Refuse a damaged file that mlx-lm would pass over: without it replies may never end."""
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: {error}", "download the model again") from None


def _first_line(error: BaseException) -> str:
    if isinstance(error, KeyError):  # its text is the bare key
        return f"{error} is missing in its files"
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(": ")
