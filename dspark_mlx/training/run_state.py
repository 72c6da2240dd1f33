"""Where a training run stands, what its steps report, and whether another run can go on from it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
