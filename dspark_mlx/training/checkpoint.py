"""What is stored of a training run, and which run may go on from it.

A checkpoint is one file: the drafter's trainable weights, the optimiser's state, the draft
vocabulary and, as metadata, counters and options. Finished drafters are written by
``draft.dspark.save``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import DsparkError, ModelError, UsageError
from .data import TrainingSample
from .train_options import RESUMABLE, TrainOptions

_NAME = re.compile(r"step-(\d+)\.safetensors")


class TrainingError(DsparkError):
    """The run cannot go on; its checkpoints are whole."""


@dataclass
class RunState:
    """Where a run stands; saved with every checkpoint.

    ``position`` counts the micro-batches of this pass that were used. ``best`` is the best greedy
    accepted length on held-out answers, ``since_best`` the validations since then. ``data`` and
    ``target`` are fingerprints of the training set and of the target.
    """

    step: int = 0
    epoch: int = 0
    position: int = 0
    slots: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float = 0.0
    best_step: int = 0
    since_best: int = 0
    data: str = ""
    target: str = ""


def flat_arrays(tree: Any) -> dict[str, mx.array]:
    """The arrays of a tree by their dotted names."""
    leaves: Any = tree_flatten(tree)
    return dict(leaves)


def save_checkpoint(
    folder: Path,
    drafter: nn.Module,
    optimizer_state: Any,
    vocab_ids: np.ndarray | None,
    state: dict[str, Any],
    keep: int = 2,
) -> Path:
    """Write ``step-N.safetensors`` and delete all but the ``keep`` newest checkpoints.

    Raises ModelError when the disk does not take it; earlier files stay whole.
    """
    weights = flat_arrays(drafter.trainable_parameters())
    tensors = {f"model.{k}": v for k, v in weights.items()}
    tensors |= {f"optimizer.{k}": v for k, v in flat_arrays(optimizer_state).items()}
    if vocab_ids is not None:
        tensors["hot_ids"] = mx.array(vocab_ids)
    path = folder / f"step-{state['step']:07d}.safetensors"
    scratch = folder / f".saving-{os.getpid()}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mx.save_safetensors(str(scratch), tensors, metadata={"state": json.dumps(state)})
        # A full disk need not make the writer fail.
        if scratch.stat().st_size <= sum(v.nbytes for v in tensors.values()):
            raise OSError("the file was cut short (no space left on the disk?)")
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


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name))


def load_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, mx.array], np.ndarray | None]:
    """The state, the tensors (``model.*`` and ``optimizer.*``) and the draft vocabulary."""
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
        tensors, metadata = loaded
        mx.eval(tensors)
        state = json.loads(metadata["state"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise ModelError(
            f"checkpoint {path} is damaged: {error}", "delete it to resume from the one before"
        ) from None
    ids = tensors.pop("hot_ids", None)
    return state, tensors, None if ids is None else np.array(ids)


def subtree(tensors: dict[str, mx.array], prefix: str) -> Any:
    """The tree of the tensors whose names begin with ``prefix.``."""
    cut = len(prefix) + 1
    return tree_unflatten([(k[cut:], v) for k, v in tensors.items() if k.startswith(prefix + ".")])


# -- which run may go on -----------------------------------------------------------------------


def fingerprint(samples: Sequence[TrainingSample]) -> str:
    """Equal for equal training sets in the same order."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.tokens.tobytes() + sample.start.to_bytes(4, "little"))
    return digest.hexdigest()[:24]


def model_fingerprint(model: nn.Module) -> str:
    """Tells models apart by the first numbers of every weight."""
    digest = hashlib.sha256()
    weights = flat_arrays(model.parameters())
    firsts = [v.reshape(-1)[:16].astype(mx.float32) for v in weights.values()]
    mx.eval(firsts)
    for (name, value), first in zip(weights.items(), firsts, strict=True):
        digest.update(f"{name} {value.shape} ".encode() + np.array(first).tobytes())
    return digest.hexdigest()[:24]


def check_same_run(before: dict[str, Any], now: TrainOptions) -> None:
    """Raise UsageError when a run with the options ``before`` cannot go on with those of now."""
    for name, value in now.to_dict().items():
        old = before.get(name)
        old = tuple(old) if isinstance(value, tuple) and old is not None else old
        if name not in RESUMABLE and old != value:
            raise UsageError(
                f"the run in this folder has {name} {old}, not {value}",
                "use the same options, or another --out",
            )


def check_out(out: Path) -> None:
    """Raise UsageError when ``out`` holds a model that no training run has put there."""
    if (out / "config.json").exists() and not (out / "recipe.json").exists():
        raise UsageError(
            f"{out} holds a model already, which a drafter would overwrite", "give another --out"
        )
