"""The optimiser of a run: AdamW for everything, or Muon for the matrices of the backbone.

Muon orthogonalises each matrix's step, which learns faster from few steps; tables,
norms and the two heads' vectors stay with AdamW, as its authors advise.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.optimizers as optim

from .options import TrainOptions


class RunOptimizer:
    """One or two MLX optimisers under one schedule."""

    def __init__(self, options: TrainOptions) -> None:
        self.options = options
        adam = optim.AdamW(
            learning_rate=options.lr,
            betas=list(options.betas),
            weight_decay=options.weight_decay,
            bias_correction=True,
        )
        self.parts: list[optim.Optimizer] = [adam]
        self.peaks = [options.lr]
        self.inner: optim.Optimizer = adam
        if options.optimizer == "muon":
            muon = optim.Muon(learning_rate=options.muon_lr, weight_decay=0.0)
            self.parts, self.peaks = [muon, adam], [options.muon_lr, options.lr]
            self.inner = optim.MultiOptimizer(self.parts, [is_matrix])

    @property
    def state(self) -> Any:
        return self.inner.state

    @state.setter
    def state(self, value: Any) -> None:
        self.inner.state = value

    def init(self, parameters: Any) -> None:
        self.inner.init(parameters)

    def update(self, model: Any, gradient: Any, step: int) -> float:
        """Apply ``gradient`` at ``step`` (from 0); returns the learning rate of AdamW."""
        share = self.options.schedule_share(step)
        for part, peak in zip(self.parts, self.peaks, strict=True):
            part.learning_rate = peak * share
        self.inner.update(model, gradient)
        return self.options.lr * share


def is_matrix(name: str, value: mx.array) -> bool:
    """Whether Muon takes it: the projections of the layers and ``fc``."""
    return value.ndim == 2 and name.split(".")[0] in ("layers", "fc")
