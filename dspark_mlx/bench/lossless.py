"""Whether replies are the reference's own, and how close the choice was where they are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..model.sampling import Purpose, gumbel, log_weights
from ..request import SamplingParams

# A fork is a near-tie where the two best logits differ by no more than this share of the largest.
# The order of sums, and so the rounding, differs between a step of one token and one of several;
# about 800 (float32), 10 (float16) and 5 (bfloat16) units in the last place of a logit.
TIE = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 4e-2}


def fork_at(reply: Sequence[int], reference: Sequence[int], eos: Sequence[int]) -> int | None:
    """The first position at which the two differ; None where they do not.

    One of the two may lack the end-of-text token at its end.
    """
    a, b = _without_end(reply, eos), _without_end(reference, eos)
    for k, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return k
    return None if len(a) == len(b) else min(len(a), len(b))


def margin(model: Any, tokens: Sequence[int], params: SamplingParams) -> tuple[float, float]:
    """How far the best choice after ``tokens`` is ahead of the second, and the top logit.

    Both in logits. When sampling, the choice is by logits plus the noise that the seed draws
    for this position, as in ``sampling.choose``.
    """
    logits = model(mx.array([list(tokens)], dtype=mx.int32))[0, -1].astype(mx.float32)
    scores, scale = logits, 1.0
    if not params.greedy:
        noise = gumbel(logits.shape[-1], params.seed or 0, len(tokens), Purpose.TOKEN)
        scores, scale = log_weights(logits, params) + noise, params.temperature
    best: Any = mx.sort(scores)[-2:].tolist()
    top: Any = mx.max(logits).item()
    return scale * (best[1] - best[0]), float(top)


def near_tie(gap: float, top: float, dtype: mx.Dtype, quantised: bool) -> bool:
    """Whether rounding explains a margin of ``gap`` where the largest logit is ``top``."""
    share = TIE[mx.bfloat16] if quantised else TIE.get(dtype, TIE[mx.bfloat16])
    return gap <= share * max(1.0, abs(top))


def _without_end(tokens: Sequence[int], eos: Sequence[int]) -> list[int]:
    kept = list(tokens)
    while kept and kept[-1] in eos:
        kept.pop()
    return kept
