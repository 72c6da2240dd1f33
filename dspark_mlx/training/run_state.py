"""Where a training run stands, what its steps report, and which run may go on in its folder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..errors import DsparkError, UsageError
from .data import Sample
from .options import RESUMABLE, TrainOptions


class TrainingError(DsparkError):
    """The run cannot go on; its checkpoints are whole."""


@dataclass
class RunState:
    """Where a run stands; saved with every checkpoint."""

    step: int = 0
    epoch: int = 0
    position: int = 0
    """Micro-batches of this pass that were used."""
    slots: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float = 0.0
    best_step: int = 0
    since_best: int = 0
    data: str = ""
    target: str = ""
    """``model_fingerprint`` of the model whose drafter this is."""


@dataclass(frozen=True)
class StepReport:
    """What one step did, for the log and the progress line."""

    step: int
    loss: float
    cross_entropy: float
    total_variation: float
    confidence: float
    accepted: float
    """Expected accepted length at temperature 1 on the training blocks."""
    by_slot: list[float]
    lr: float
    gradient_norm: float
    tokens: int
    slots: int
    seconds: float
    epoch: int


def fingerprint(samples: Sequence[Sample]) -> str:
    """What makes two training sets the same, order included."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.tokens.tobytes() + sample.start.to_bytes(4, "little"))
    return digest.hexdigest()[:24]


def check_same_run(before: dict[str, Any], now: TrainOptions) -> None:
    """Raise UsageError when ``out`` holds a run that this one cannot continue."""
    current = now.to_dict()
    for name, value in current.items():
        old = before.get(name)
        old = tuple(old) if isinstance(value, tuple) and old is not None else old
        if name not in RESUMABLE and old != value:
            raise UsageError(
                f"the run in this folder has {name} {old}, not {value}",
                "use the same options, or another --out",
            )


def check_out(out: Path) -> None:
    """Raise UsageError when ``out`` holds a model that no run of ours has put there."""
    if (out / "config.json").exists() and not (out / "recipe.json").exists():
        raise UsageError(
            f"{out} holds a model already, which a drafter would overwrite", "give another --out"
        )


def model_fingerprint(model: nn.Module) -> str:
    """Tells models apart by the first numbers of every weight."""
    digest = hashlib.sha256()
    names, values = zip(*tree_flatten(model.parameters()), strict=True)
    firsts = [v.reshape(-1)[:16].astype(mx.float32) for v in values]
    mx.eval(firsts)
    for name, value, first in zip(names, values, firsts, strict=True):
        digest.update(f"{name} {value.shape} ".encode() + np.array(first).tobytes())
    return digest.hexdigest()[:24]
