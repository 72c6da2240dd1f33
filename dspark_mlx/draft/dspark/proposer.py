"""DSpark: the semi-autoregressive drafter as a proposer.

Keeps the drafter's context cache for the rows being decoded, draws its tokens
by each row's sampling parameters, and turns its confidence logits into
probabilities with the checkpoint's calibration.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ...model.rows import Rows
from ...model.sampling import Purpose, gumbel, log_weights
from ..proposer import Draft, DraftRow
from ..rates import HitRate
from .network import Drafter


class DSparkProposer:
    """The proposer interface over a ``Drafter``; a row's state is its context cache."""

    name = "dspark"

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        """``vocab_size``: width of the target's logits, which may differ from the drafter's."""
        self.drafter = drafter
        self.vocab_size = vocab_size
        self.block = drafter.block_size
        self.taps = tuple(drafter.config.target_layer_ids)
        self.calibrated = drafter.calibration is not None
        c = drafter.config
        numbers = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
        self.kv_bytes_per_token = float(numbers * drafter.dtype.size)
        self._rows = Rows([], 0)
        # Features of plain rounds, one position each, not yet in the context:
        # while nothing is drafted they only need to be kept, not projected.
        self._pending: list[mx.array] = []
        self._hits = HitRate()  # stands in where a checkpoint has no confidence head
        self.record: list[Draft] | None = None  # every draft is noted here, for calibration

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def new_row(self) -> Rows:
        return Rows(self.drafter.make_context(1))

    def prefill(
        self, row: Rows, tokens: Sequence[int], features: mx.array | None
    ) -> list[mx.array]:
        if features is None:
            raise ValueError("the drafter needs the target's features")
        self.drafter.extend(features, row.layers)
        row.roll_back([row.lengths[0] + len(tokens)])
        return row.arrays

    def row_length(self, row: Rows) -> int:
        return row.lengths[0]

    def roll_back_row(self, row: Rows, length: int) -> None:
        row.roll_back([length])

    def join(self, row: Rows) -> None:
        self._flush()
        if len(self._rows):
            self._rows.join(row)
        else:
            self._rows = row

    def keep(self, rows: Sequence[int]) -> None:
        self._flush()
        if rows:
            self._rows.keep(rows)
        else:
            self._rows = Rows([], 0)

    def extract(self, row: int) -> Rows:
        self._flush()
        return self._rows.extract(row)

    def foresee(self, anchors: Sequence[int]) -> list[tuple[float, ...] | None]:
        return [None] * len(anchors)

    def rates(self) -> list[float]:
        """How often each position has stood lately, given those before it: one number a slot."""
        return self._hits.rates(0, self.block)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        self._flush()
        width = max(row.width for row in rows)
        anchors = mx.array([row.anchor for row in rows], dtype=mx.int32)
        sampler = _BlockSampler(rows, self.vocab_size, self.drafter.draft_to_target)
        out = self.drafter.draft(anchors, self._rows.layers, width=width, sampler=sampler)
        peaks = peak_logits(out.logits)
        draft = Draft(
            tokens=out.tokens.astype(mx.int32),
            counts=tuple(row.width for row in rows),
            confidence=self._confidence(out.confidence_logits, peaks, rows, width),
            q=sampler.distributions(),
            peaks=peaks,
        )
        if self.record is not None:
            self.record.append(draft)
        return draft

    def absorb(self, features: mx.array | None) -> list[mx.array]:
        if features is None:
            raise ValueError("the drafter needs the target's features")
        if features.shape[1] == 1:
            self._pending.append(features)
            return [features]
        self._flush()
        self.drafter.extend(features, self._rows.layers)
        return self._rows.arrays

    def settle(
        self,
        context: Sequence[Sequence[int]],
        verified: Sequence[int],
        accepted: Sequence[int],
    ) -> None:
        lengths = [n + len(c) for n, c in zip(self._rows.lengths, context, strict=True)]
        if self._pending:
            self._rows.lengths = lengths
        else:
            self._rows.roll_back(lengths)
        for checked, stood in zip(verified, accepted, strict=True):
            if checked:
                self._hits.observe(0, stood, checked)

    def _flush(self) -> None:
        """Put what plain rounds left behind into the context."""
        if self._pending:
            features = mx.concatenate(self._pending, axis=1)
            self._pending = []
            self.drafter.extend(features, self._rows.layers)
            self._rows.roll_back(self._rows.lengths)

    def _confidence(
        self, logits: mx.array | None, peaks: mx.array, rows: Sequence[DraftRow], width: int
    ) -> mx.array:
        if logits is None:
            rates = [self._hits.rate(0, k) for k in range(width)]
            return mx.broadcast_to(mx.array(rates, dtype=mx.float32), (len(rows), width))
        logits = logits.astype(mx.float32)
        if self.drafter.calibration is not None:
            greedy = [row.params.greedy for row in rows]
            logits = self.drafter.calibration.apply(logits, greedy, peaks)
        return mx.sigmoid(logits)


def peak_logits(logits: mx.array) -> mx.array:
    """Logit of the largest probability in each slot's ``logits (B, G, Vd)``: ``(B, G)``, lazy.

    It says how decided the drafter is, whatever token is then drawn.
    """
    logits = logits.astype(mx.float32)
    top = logits.max(axis=-1)
    rest = mx.exp(mx.logsumexp(logits, axis=-1) - top) - 1  # the other tokens' sum, over the top's
    return -mx.log(mx.clip(rest, 1e-6, 1e6))


class _BlockSampler:
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
