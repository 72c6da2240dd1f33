"""How drafted tokens are drawn: greedy, coupled with the target's noise, or independently.

One sampler for every network that drafts. It also keeps what rejection sampling
needs (q), and how peaked each slot's distribution was.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..model.sampling import Purpose, gumbel, log_weights
from .proposer import DraftRow


def peak_logits(logits: mx.array) -> mx.array:
    """Logit of the largest probability in each slot's ``logits (B, G, Vd)``: ``(B, G)``, lazy.

    It says how sure the drafter is, whatever token is then drawn.
    """
    logits = logits.astype(mx.float32)
    top = logits.max(axis=-1)
    rest = mx.exp(mx.logsumexp(logits, axis=-1) - top) - 1  # the other tokens' sum, over the top's
    return -mx.log(mx.clip(rest, 1e-6, 1e6))


class BlockSampler:
    """Draws slot k of every row's block: ``(logits (B, Vd), k) -> draft ids (B,)``.

    ``vocab`` is the width V of the target's logits. A drafter's own vocabulary
    may be a reduced one (``to_target (Vd,)`` holds its target ids) or padded
    differently; ids the target does not have are never drawn.
    """

    def __init__(self, rows: Sequence[DraftRow], vocab: int, to_target: mx.array | None) -> None:
        self._rows = rows
        self._vocab = vocab
        self._map = to_target
        self._q: list[list[mx.array]] = [[] for _ in rows]
        self._greedy = all(r.params.greedy or r.params.draft_sampling == "greedy" for r in rows)

    def __call__(self, logits: mx.array, k: int) -> mx.array:
        if self._map is None:
            logits = logits[:, : self._vocab]
        if self._greedy:
            return mx.argmax(logits, axis=-1)
        return mx.stack([self._draw(logits[r], k, r) for r in range(len(self._rows))])

    def distributions(self) -> tuple[mx.array | None, ...]:
        """Per row q ``(w, V)`` over the target's vocabulary, or None."""
        return tuple(self._spread(mx.stack(q)) if q else None for q in self._q)

    def _draw(self, logits: mx.array, k: int, r: int) -> mx.array:
        row = self._rows[r]
        params = row.params
        if params.greedy or params.draft_sampling == "greedy":
            return mx.argmax(logits)
        weights = log_weights(logits, params)
        seed, position = params.seed or 0, row.position + k
        if params.draft_sampling == "coupled":
            # The noise the target will use here, so that like weights choose alike.
            noise = gumbel(self._vocab, seed, position, Purpose.TOKEN)
            noise = noise[: weights.shape[0]] if self._map is None else noise[self._map]
        else:
            self._q[r].append(mx.softmax(weights, axis=-1, precise=True))
            noise = gumbel(weights.shape[0], seed, row.position, Purpose.DRAFT, k)
        return mx.argmax(weights + noise)

    def _spread(self, q: mx.array) -> mx.array:
        full = mx.zeros((q.shape[0], self._vocab), dtype=q.dtype)
        if self._map is None:
            full[:, : q.shape[1]] = q
            return full
        return mx.put_along_axis(full, mx.broadcast_to(self._map[None], q.shape), q, axis=1)
