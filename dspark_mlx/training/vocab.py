"""The hot vocabulary: draft logits over the ids the target actually says.

A drafter that cannot propose a rare id loses one accepted token there and stays
lossless; its logits, in training and in drafting, cost a fraction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..errors import UsageError
from .data import Sample


def count_ids(samples: Sequence[Sample], vocab_size: int) -> np.ndarray:
    """How often each id is an answer token: ``(V,)``."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sample in samples:
        counts += np.bincount(sample.tokens[sample.start :], minlength=vocab_size)
    return counts


def hot_vocabulary(
    counts: np.ndarray, size: int, always: Iterable[int] = ()
) -> tuple[np.ndarray, float]:
    """The ``size`` most frequent ids, rising, with ``always`` among them; and their coverage.

    Coverage is the share of all counted tokens. Ties go to the lower id.
    """
    if not 0 < size <= len(counts):
        raise UsageError(f"a draft vocabulary of {size} is outside 1..{len(counts)}")
    ranked = counts.astype(np.float64)
    ranked[list(always)] = np.inf
    ids = np.sort(np.argsort(-ranked, kind="stable")[:size]).astype(np.int32)
    return ids, float(counts[ids].sum() / max(1, counts.sum()))
