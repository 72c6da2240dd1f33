"""DSpark: the semi-autoregressive drafter as a proposer.

Keeps the drafter's context cache for the rows being decoded, draws its tokens
by each row's sampling parameters, and turns its confidence logits into
probabilities with the checkpoint's calibration.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ...model.rows import Rows
from ..draw import BlockSampler, peak_logits
from ..proposer import Draft, DraftRow, ProposerSpec
from ..rates import AcceptanceRate
from .network import Drafter


class DSparkProposer:
    """The proposer interface over a ``Drafter``; a row's state is its context cache."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        """``vocab_size``: width of the target's logits, which may differ from the drafter's."""
        self.drafter = drafter
        self.vocab_size = vocab_size
        c = drafter.config
        numbers = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
        self.spec = ProposerSpec(
            name="dspark",
            block=drafter.block_size,
            taps=tuple(c.target_layer_ids),
            keeps_state=True,
            samples_drafts=True,
            calibrated=drafter.calibration is not None,
            confidence="head" if c.enable_confidence_head else "counts",
            kv_bytes_per_token=float(numbers * drafter.dtype.size),
        )
        self._rows = Rows([], 0)
        # Features of plain rounds, one position each, not yet in the context:
        # while nothing is drafted they only need to be kept, not projected.
        self._pending: list[mx.array] = []
        self._acceptance = AcceptanceRate()  # the confidence of a checkpoint without a head
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
        row.trim_to([row.lengths[0] + len(tokens)])
        return row.arrays

    def row_length(self, row: Rows) -> int:
        return row.lengths[0]

    def trim_row(self, row: Rows, length: int) -> None:
        row.trim_to([length])

    def extend(self, row: Rows) -> None:
        self._flush()
        if len(self._rows):
            self._rows.extend(row)
        else:
            self._rows = row

    def filter(self, rows: Sequence[int]) -> None:
        self._flush()
        if rows:
            self._rows.filter(rows)
        else:
            self._rows = Rows([], 0)

    def extract(self, row: int) -> Rows:
        self._flush()
        return self._rows.extract(row)

    def peek(self, anchors: Sequence[int]) -> list[tuple[float, ...] | None]:
        return [None] * len(anchors)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        self._flush()
        width = max(row.width for row in rows)
        anchors = mx.array([row.anchor for row in rows], dtype=mx.int32)
        sampler = BlockSampler(rows, self.vocab_size, self.drafter.draft_to_target)
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

    def append_features(self, features: mx.array | None) -> list[mx.array]:
        if features is None:
            raise ValueError("the drafter needs the target's features")
        if features.shape[1] == 1:
            self._pending.append(features)
            return [features]
        self._flush()
        self.drafter.extend(features, self._rows.layers)
        return self._rows.arrays

    def commit(
        self,
        context: Sequence[Sequence[int]],
        verified: Sequence[int],
        accepted: Sequence[int],
    ) -> None:
        lengths = [n + len(c) for n, c in zip(self._rows.lengths, context, strict=True)]
        if self._pending:
            self._rows.lengths = lengths
        else:
            self._rows.trim_to(lengths)
        for checked, correct in zip(verified, accepted, strict=True):
            if checked:
                self._acceptance.observe(correct, checked)

    def _flush(self) -> None:
        """Put what plain rounds left behind into the context."""
        if self._pending:
            features = mx.concatenate(self._pending, axis=1)
            self._pending = []
            self.drafter.extend(features, self._rows.layers)
            self._rows.trim_to(self._rows.lengths)

    def _confidence(
        self, logits: mx.array | None, peaks: mx.array, rows: Sequence[DraftRow], width: int
    ) -> mx.array:
        if logits is None:
            rates = self._acceptance.rates(width)
            return mx.broadcast_to(mx.array(rates, dtype=mx.float32), (len(rows), width))
        logits = logits.astype(mx.float32)
        if self.drafter.calibration is not None:
            greedy = [row.params.greedy for row in rows]
            logits = self.drafter.calibration.apply(logits, greedy, peaks)
        return mx.sigmoid(logits)
