"""The calibration stored with a checkpoint, and how it is applied to confidences.

``calibration.json`` holds ``{"greedy": {"temperatures": [...], "offsets": [...],
"peaks": [...]}, "sampled": {...}}``, one number per slot. Greedy and sampled replies accept by
different rules, so a draft token survives with different probability in them. A file that has
``temperatures`` at its top applies to both. ``dspark calibrate`` writes the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import ModelError

FILE = "calibration.json"


@dataclass(frozen=True)
class Scale:
    """Confidence logits of slot k become ``logit / temperatures[k] + offsets[k]``.

    With ``peaks``, ``peaks[k]`` times the logit of the drafter's largest probability at slot k is
    added; that probability is known before x_k is drawn.
    """

    temperatures: tuple[float, ...]
    offsets: tuple[float, ...]
    peaks: tuple[float, ...] = ()


@dataclass(frozen=True)
class DraftCalibration:
    """A scale for greedy replies and one for sampled replies."""

    greedy: Scale
    sampled: Scale

    def apply(
        self, logits: mx.array, greedy: Sequence[bool], peaks: mx.array | None = None
    ) -> mx.array:
        """Calibrate confidence logits ``(B, G)``; ``greedy (B,)`` says which rows are greedy.

        ``peaks (B, G)`` are the logits of the slots' largest probabilities.
        """
        width = logits.shape[-1]
        scales = [self.greedy if row else self.sampled for row in greedy]
        if len(set(scales)) == 1:
            scales = scales[:1]
        temperatures = mx.array([s.temperatures[:width] for s in scales], dtype=mx.float32)
        offsets = mx.array([s.offsets[:width] for s in scales], dtype=mx.float32)
        logits = logits / temperatures + offsets
        if peaks is not None and any(any(s.peaks) for s in scales):
            none = (0.0,) * width
            weights = mx.array([(s.peaks or none)[:width] for s in scales], dtype=mx.float32)
            logits = logits + weights * peaks
        return logits


def read_calibration(folder: Path, block_size: int) -> DraftCalibration | None:
    """The calibration in ``folder``; None when there is no ``calibration.json``.

    Raises ModelError for a file that does not fit a block of ``block_size``.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if "temperatures" in data:
            data = {"greedy": data}
        parts = {name: data[name] for name in ("greedy", "sampled") if name in data}
        first = next(iter(parts.values()))
    except (OSError, ValueError, TypeError, StopIteration) as error:
        raise _bad(f"cannot read {path}: {error!r}") from None
    return DraftCalibration(
        _scale(path, parts.get("greedy", first), block_size),
        _scale(path, parts.get("sampled", first), block_size),
    )


def _scale(path: Path, data: Any, block: int) -> Scale:
    try:
        temperatures = tuple(float(value) for value in data["temperatures"])
        offsets = tuple(float(value) for value in data.get("offsets") or [0.0] * block)
        peaks = tuple(float(value) for value in data.get("peaks") or [])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _bad(f"cannot read {path}: {error!r}") from None
    named = [(temperatures, "temperatures"), (offsets, "offsets")]
    for values, name in [*named, (peaks, "peaks")] if peaks else named:
        if len(values) != block:
            raise _bad(f"{path} holds {len(values)} {name} for a block of {block}")
    if not all(math.isfinite(t) and t > 0 for t in temperatures):
        raise _bad(f"{path} holds a temperature that is not a positive number")
    if not all(map(math.isfinite, offsets)):
        raise _bad(f"{path} holds an offset that is not finite")
    if not all(math.isfinite(p) and p >= 0 for p in peaks):
        raise _bad(f"{path} holds a weight of peaks that is negative or not finite")
    return Scale(temperatures, offsets, peaks)


def _bad(problem: str) -> ModelError:
    return ModelError(problem, "calibrate again, or delete the file")
