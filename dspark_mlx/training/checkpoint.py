"""Training checkpoints: one file each, whole or not at all, with everything a run needs to go on.

A file holds the drafter's trainable weights, the optimiser's state, the hot
vocabulary and, in its metadata, counters and options. Finished drafters are
``drafter.save``'s business.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from ..draft.dspark.network import Drafter
from ..errors import ModelError

_NAME = re.compile(r"step-(\d+)\.safetensors")


def save_checkpoint(
    folder: Path,
    drafter: Drafter,
    optimizer_state: Any,
    hot_ids: np.ndarray | None,
    state: dict[str, Any],
    keep: int = 2,
) -> Path:
    """Write ``step-N.safetensors`` and delete all but the ``keep`` newest.

    Raises ModelError when the disk does not take it; earlier files stay whole.
    """
    tensors = {f"model.{k}": v for k, v in tree_flatten(drafter.trainable_parameters())}
    tensors |= {f"optimizer.{k}": v for k, v in tree_flatten(optimizer_state)}
    if hot_ids is not None:
        tensors["hot_ids"] = mx.array(hot_ids)
    path = folder / f"step-{state['step']:07d}.safetensors"
    scratch = folder / f".saving-{os.getpid()}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mx.save_safetensors(str(scratch), tensors, metadata={"state": json.dumps(state)})
        _check_size(scratch, tensors)
        os.replace(scratch, path)
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"cannot save a checkpoint in {folder}: {error}",
            "make room on the disk and run the same command again: earlier checkpoints are whole",
        ) from None
    finally:
        scratch.unlink(missing_ok=True)
    for old in list_checkpoints(folder)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def _check_size(path: Path, tensors: dict[str, mx.array]) -> None:
    # A full disk need not make the writer fail.
    if path.stat().st_size <= sum(v.nbytes for v in tensors.values()):
        raise OSError("the file was cut short (no space left on the disk?)")


def list_checkpoints(folder: Path) -> list[Path]:
    """Oldest first."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name))


def load_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, mx.array], np.ndarray | None]:
    """State, tensors (``model.*``, ``optimizer.*``) and the hot vocabulary."""
    try:
        tensors, metadata = mx.load(str(path), return_metadata=True)
        mx.eval(tensors)
        state = json.loads(metadata["state"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise ModelError(
            f"checkpoint {path} is damaged: {error}", "delete it to resume from the one before"
        ) from None
    hot = tensors.pop("hot_ids", None)
    return state, tensors, None if hot is None else np.array(hot)


def part(tensors: dict[str, mx.array], prefix: str) -> Any:
    """The tree under ``prefix.``."""
    cut = len(prefix) + 1
    return tree_unflatten([(k[cut:], v) for k, v in tensors.items() if k.startswith(prefix + ".")])
