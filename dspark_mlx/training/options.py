"""What a training run is told: one frozen record, saved beside its checkpoints."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

from ..draft.dspark.config import MARKOV_HEADS, DrafterConfig
from ..errors import UsageError

_COUNTS = (
    "layers",
    "block",
    "steps",
    "batch_tokens",
    "accumulate",
    "anchors",
    "validate_every",
    "validate_samples",
    "checkpoint_every",
    "tap_count",
    "max_length",
)
INITS = ("recency", "target", "random")
OPTIMIZERS = ("muon", "adamw")
SCHEDULES = ("cosine", "linear", "constant")


@dataclass(frozen=True)
class LossWeights:
    cross_entropy: float = 0.1
    total_variation: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0
    """Slots until a slot's weight has fallen to 1/e."""


@dataclass(frozen=True)
class TrainOptions:
    """Defaults suit a small target on a laptop; see docs/training for how they were chosen."""

    layers: int = 2
    taps: tuple[int, ...] | None = None
    """Tapped layers; None: ``tap_count`` of them, spread."""
    tap_count: int = 3
    block: int = 6
    head: str = "vanilla"
    rank: int = 64
    draft_vocab: int | None = 8192
    """Ids in the hot vocabulary; None: all."""
    init: str = "recency"
    start_from: str | None = None
    """Folder of a trained drafter whose weights and shape this run begins with."""
    steps: int = 2000
    batch_tokens: int = 2048
    """Padded tokens in a micro-batch: what memory grows with."""
    accumulate: int = 1
    anchor_spacing: float = 2.5
    anchors: int = 512
    """Most anchors a sequence."""
    max_length: int = 1024
    optimizer: str = "muon"
    muon_lr: float = 0.02
    """Peak learning rate of the matrices under Muon; ``lr`` is that of everything else."""
    lr: float = 2e-3
    warmup: int = 50
    schedule: str = "cosine"
    final_lr: float = 0.05
    """The last learning rate, as a share of ``lr``."""
    clip: float = 1.0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    loss: LossWeights = field(default_factory=LossWeights)
    held_out: float = 0.02
    validate_every: int = 100
    validate_samples: int = 96
    checkpoint_every: int = 50
    patience: int = 0
    """Validations without a new best until the run stops; 0: never."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("rank", "warmup", "patience", "weight_decay", "final_lr"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name} must be finite, 0 or more, got {getattr(self, name)}")
        for name in ("lr", "muon_lr", "clip", "anchor_spacing"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise UsageError(f"{name} must be positive, got {getattr(self, name)}")
        if not 1 <= self.anchor_spacing <= 1e6:
            raise UsageError(f"anchor_spacing must be 1 or more, got {self.anchor_spacing}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed must be from 0 to 2^63 - 1, got {self.seed}")
        weights = (self.loss.cross_entropy, self.loss.total_variation, self.loss.confidence)
        if not all(0 <= w < math.inf for w in weights) or not any(weights):
            raise UsageError("loss weights must be finite, 0 or more, and not all 0")
        if not 0 <= self.held_out < 1:
            raise UsageError(f"held_out must be within 0..1, got {self.held_out}")
        if self.head not in MARKOV_HEADS:
            raise UsageError(f"head must be one of {', '.join(MARKOV_HEADS)}, got {self.head!r}")
        if self.init not in INITS:
            raise UsageError(f"init must be one of {', '.join(INITS)}, got {self.init!r}")
        if self.optimizer not in OPTIMIZERS:
            raise UsageError(f"optimizer must be one of {', '.join(OPTIMIZERS)}")
        if self.schedule not in SCHEDULES:
            raise UsageError(f"schedule must be one of {', '.join(SCHEDULES)}")

    def shaped_like(self, config: DrafterConfig) -> TrainOptions:
        """These options with the shape of an existing drafter."""
        return dataclasses.replace(
            self,
            layers=config.num_hidden_layers,
            taps=config.target_layer_ids,
            block=config.block_size,
            head=config.markov_head_type or self.head,
            rank=config.markov_rank if config.markov_head_type else 0,
            draft_vocab=config.draft_vocab_size,
        )

    def schedule_share(self, step: int) -> float:
        """Of the peak learning rate, at ``step`` from 0: warm-up, then down to ``final_lr``."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        if self.schedule == "constant":
            return 1.0
        left = (1 + math.cos(math.pi * done)) / 2 if self.schedule == "cosine" else 1 - done
        return self.final_lr + (1 - self.final_lr) * left

    def to_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)


# A resumed run may change these and stays the same run.
RESUMABLE = frozenset(
    {
        "steps",
        "validate_every",
        "checkpoint_every",
        "patience",
        "accumulate",
        "lr",
        "muon_lr",
        "loss",
        "final_lr",
        "schedule",
        "anchor_spacing",
        "batch_tokens",
    }
)
