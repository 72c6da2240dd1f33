"""The options of a training run: one frozen record, saved beside the run's checkpoints.

``dspark train`` makes its flags from the fields' metadata (see ``commands.options``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import UsageError

if TYPE_CHECKING:
    from ..draft.dspark.config import DrafterConfig

SHAPE = ("layers", "taps", "block", "head", "rank", "draft_vocab")  # what --start-from decides


def _option(
    default: Any,
    group: str,
    help: str,
    *,
    least: float | None = None,
    choices: Sequence[str] | None = None,
    resumable: bool = False,
    **flag: str,
) -> Any:
    """A field with a command line flag.

    ``least`` is the smallest value allowed. A run that was stopped may go on with another value
    of a ``resumable`` option. ``flag`` may hold ``metavar`` and ``shown_default``.
    """
    limits = {"least": least, "choices": choices, "resumable": resumable}
    return field(default=default, metadata={"group": group, "help": help, **limits, **flag})


@dataclass(frozen=True)
class LossWeights:
    """Weights of the loss terms; ``decay`` is the d of a slot's weight ``exp(-(k - 1) / d)``."""

    cross_entropy: float = 0.1
    total_variation: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0


@dataclass(frozen=True)
class TrainOptions:
    """Defaults suit a small target on a laptop; docs/training says how they were chosen.

    ``taps`` None spreads ``tap_count`` taps over the target's layers. ``draft_vocab`` None is the
    whole vocabulary. ``start_from`` is the folder of a trained drafter whose weights and shape
    the run begins with. Raises UsageError for a value out of range.
    """

    start_from: str | None = _option(
        None, "drafter", "continue from the trained drafter in this folder, with its shape",
        metavar="DRAFTER",
    )  # fmt: skip
    layers: int = _option(2, "drafter", "draft layers", least=1)
    taps: tuple[int, ...] | None = _option(
        None, "drafter", "target layers to read; -1 is the embedding, as in --taps=-1,9",
        metavar="I,J,..", shown_default="3 layers, evenly spread",
    )  # fmt: skip
    tap_count: int = field(default=3, metadata={"least": 1})
    block: int = _option(6, "drafter", "draft tokens in a block", least=1)
    head: str = _option(
        "vanilla", "drafter", "sequential head", choices=("vanilla", "gated", "rnn")
    )
    rank: int = _option(64, "drafter", "rank of the sequential head; 0 leaves it out", least=0)
    draft_vocab: int | None = _option(
        8192, "drafter", "token ids that the drafter can draft; 0 for the whole vocabulary",
    )  # fmt: skip
    init: str = _option(
        "recency", "drafter", "first weights: attention to the previous tokens, or random",
        choices=("recency", "random"),
    )  # fmt: skip
    steps: int = _option(2000, "learning", "optimiser steps", least=1, resumable=True)
    batch_tokens: int = _option(
        2048, "learning", "most tokens in a micro-batch, padding included; memory grows with it",
        least=1, resumable=True,
    )  # fmt: skip
    accumulate: int = _option(
        1, "learning", "micro-batches per step and process", least=1, resumable=True
    )
    anchor_spacing: float = _option(
        2.5, "learning", "one anchor per X answer tokens", least=1, resumable=True
    )
    anchors: int = _option(512, "learning", "most anchors per sequence", least=1)
    max_length: int = _option(
        1024, "learning", "longest sequence in tokens; the rest is cut off", least=1
    )
    optimizer: str = _option(
        "muon", "learning", "muon trains the backbone's matrices with Muon, the rest with AdamW",
        choices=("muon", "adamw"),
    )  # fmt: skip
    muon_lr: float = _option(0.02, "learning", "peak learning rate of Muon", resumable=True)
    lr: float = _option(2e-3, "learning", "peak learning rate of AdamW", resumable=True)
    warmup: int = _option(50, "learning", "steps until the learning rate is at its peak", least=0)
    schedule: str = _option(
        "cosine", "learning", "how the learning rate falls after the warm-up",
        choices=("cosine", "linear", "constant"), resumable=True,
    )  # fmt: skip
    final_lr: float = _option(
        0.05, "learning", "last learning rate as a share of the peak", least=0, resumable=True,
    )  # fmt: skip
    clip: float = _option(1.0, "learning", "largest norm of the gradient")
    weight_decay: float = _option(0.01, "learning", "weight decay of AdamW", least=0)
    betas: tuple[float, float] = (0.9, 0.95)
    loss: LossWeights = field(
        default=LossWeights(),
        metadata={
            "group": "learning",
            "help": "weights of cross-entropy, total variation and confidence",
            "flag": "--loss-weights",
            "metavar": "CE,L1,CONF",
            "shown_default": "the paper's 0.1,0.9,1",
            "resumable": True,
        },
    )
    seed: int = _option(0, "learning", "seed of everything random", least=0)
    held_out: float = _option(0.02, "run", "share of the prompts kept for validation", least=0)
    validate_every: int = _option(100, "run", "steps between validations", least=1, resumable=True)
    validate_samples: int = _option(
        96, "run", "most held-out answers used in a validation", least=1
    )
    checkpoint_every: int = _option(50, "run", "steps between checkpoints", least=1, resumable=True)
    patience: int = _option(
        0, "run", "stop after N validations in a row without a new best", least=0, resumable=True,
        shown_default="never",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            name, value = option.name.replace("_", "-"), getattr(self, option.name)
            least, choices = option.metadata.get("least"), option.metadata.get("choices")
            if least is not None and not least <= value < math.inf:
                finite = "finite" if value == math.inf else f"{least} or more"
                raise UsageError(f"{name} must be {finite}, got {value}")
            if choices and value not in choices:
                raise UsageError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        for name in ("lr", "muon_lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name.replace('_', '-')} must be a finite number above 0")
        if self.anchor_spacing > 1e6:
            raise UsageError(f"anchor-spacing must be 1e6 or less, got {self.anchor_spacing}")
        if self.seed >= 2**63:
            raise UsageError(f"seed must be below 2^63, got {self.seed}")
        if self.held_out >= 1:
            raise UsageError(f"held-out must be below 1, got {self.held_out}")
        weights = (self.loss.cross_entropy, self.loss.total_variation, self.loss.confidence)
        if not all(0 <= w < math.inf for w in weights) or not any(weights):
            raise UsageError("loss weights must be finite, 0 or more, and not all 0")

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

    def lr_share(self, step: int) -> float:
        """The learning rate at ``step`` (from 0) as a share of its peak.

        It rises linearly during the warm-up and then falls to ``final_lr`` as ``schedule`` says.
        """
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        if self.schedule == "constant":
            return 1.0
        left = (1 + math.cos(math.pi * done)) / 2 if self.schedule == "cosine" else 1 - done
        return self.final_lr + (1 - self.final_lr) * left

    def to_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)


RESUMABLE = frozenset(
    f.name for f in dataclasses.fields(TrainOptions) if f.metadata.get("resumable")
)
