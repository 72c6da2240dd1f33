"""The sequences being decoded: one row each, in the same order in every cache.

Moves the target's rows and the proposers' rows together, so that nothing else
has to know which row of which cache belongs to whom.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..draft import Draft, DraftRow, Proposer
from ..errors import CacheError
from ..model.rows import Rows
from ..model.taps import EagerDispatch
from ..model.target import Target
from ..request import Status
from .prefix_cache import Prefix
from .sequence import SequenceState


class Batch:
    """Row r belongs to ``sequences[r]``; ``proposers`` are known by name."""

    def __init__(self, target: Target, proposers: Sequence[Proposer]) -> None:
        if target.rollback == "none" and proposers:
            raise CacheError(
                f"{target.no_rollback_reason}, so nothing can be drafted",
                "use it without a proposer (method none)",
            )
        self.proposers = {p.spec.name: p for p in proposers}
        self.sequences: list[SequenceState] = []
        self.rows: Rows | None = None
        self.taps = tuple(dict.fromkeys(t for p in proposers for t in p.spec.taps))
        self._target = target

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def nbytes(self) -> int:
        held = self.rows.nbytes if self.rows is not None else 0
        return held + sum(proposer.nbytes for proposer in self.proposers.values())

    def members(self, proposer: Proposer) -> list[int]:
        """The rows that ``proposer`` drafts for, in its own order."""
        return [r for r, seq in enumerate(self.sequences) if seq.method == proposer.spec.name]

    # -- coming and going -----------------------------------------------------------------

    def extend(self, seq: SequenceState, state: Prefix) -> None:
        """Add a sequence whose prompt is in ``state``."""
        if self.rows is None:
            self.rows = state.rows
        else:
            self.rows.extend(state.rows)
        if seq.method in self.proposers:
            self.proposers[seq.method].extend(state.draft)
        self.sequences.append(seq)
        seq.status = Status.DECODING

    def state_of(self, r: int) -> Prefix:
        """Row r's caches, as what a later request may build on."""
        assert self.rows is not None
        seq = self.sequences[r]
        proposer = self.proposers.get(seq.method)
        draft = None
        if proposer is not None and proposer.spec.keeps_state:
            draft = proposer.extract(self.members(proposer).index(r))
        rows = self.rows if len(self.sequences) == 1 else self.rows.extract(r)
        if self._target.rollback != "none":  # a pipelined round may have gone further
            rows.trim_to([seq.context])
        return Prefix(seq.tokens[: seq.context], rows, seq.method, draft)

    def filter(self, stay: Sequence[int]) -> None:
        """Keep these rows, in this order; the others leave every cache."""
        for proposer in self.proposers.values():
            mine = self.members(proposer)
            kept = [mine.index(r) for r in stay if r in mine]
            if len(kept) < len(mine):
                proposer.filter(kept)
        if stay and self.rows is not None:
            self.rows.filter(stay)
        else:
            self.rows = None
        self.sequences = [self.sequences[r] for r in stay]

    def clear(self) -> None:
        """Forget everything, whatever state a failure left it in."""
        self.sequences, self.rows = [], None
        for proposer in self.proposers.values():
            proposer.filter([])

    # -- one round ------------------------------------------------------------------------

    def peek(self) -> list[tuple[float, ...] | None]:
        """Per row the confidences of its next draft, where they are known before it is made."""
        found: list[tuple[float, ...] | None] = [None] * len(self.sequences)
        for proposer in self.proposers.values():
            mine = self.members(proposer)
            if mine:
                known = proposer.peek([self.sequences[r].anchor for r in mine])
                for r, confidence in zip(mine, known, strict=True):
                    found[r] = confidence
        return found

    def draft(self, widths: Sequence[int]) -> Draft | None:
        """Every proposer's draft for its own rows, as one draft of all; None if none is wanted."""
        parts: list[tuple[list[int], Draft]] = []
        for proposer in self.proposers.values():
            mine = self.members(proposer)
            if not any(widths[r] for r in mine):
                continue
            rows = []
            for r in mine:
                seq = self.sequences[r]
                params = seq.request.sampling
                rows.append(DraftRow(seq.anchor, len(seq.tokens), params, widths[r]))
            parts.append((mine, proposer.propose(rows)))
        return Draft.together(parts, len(self.sequences)) if parts else None

    def forward(
        self, draft: Draft | None, width: int, eager: EagerDispatch | None = None
    ) -> tuple[mx.array, mx.array | None]:
        """The target on ``[anchor, x_1..x_width]`` of every row: logits and features, lazy.

        ``eager`` as in ``Target.forward``.
        """
        tokens = mx.array([[seq.anchor] for seq in self.sequences], dtype=mx.int32)
        if width and draft is not None:
            tokens = mx.concatenate([tokens, draft.tokens[:, :width]], axis=1)
        return self.forward_tokens(tokens, eager)

    def forward_tokens(
        self, tokens: mx.array, eager: EagerDispatch | None = None
    ) -> tuple[mx.array, mx.array | None]:
        """The target on ``tokens (B, W)``, behind what the rows hold."""
        assert self.rows is not None
        return self._target.forward(tokens, self.rows, self.taps, eager)

    @property
    def arrays(self) -> list[mx.array]:
        """The target's caches, for evaluation."""
        return self.rows.arrays if self.rows is not None else []

    def append_features(self, features: mx.array | None) -> list[mx.array]:
        """Give the proposers what the target computed; returns what must be evaluated for them."""
        waiting = []
        for proposer in self.proposers.values():
            mine = self.members(proposer)
            if mine:
                waiting += proposer.append_features(self._share(proposer, mine, features))
        return waiting

    def commit(
        self,
        context: Sequence[Sequence[int]],
        verified: Sequence[int],
        accepted: Sequence[int],
        pipelined: int = 0,
    ) -> None:
        """Trim every cache to what was committed (see ``Proposer.commit``).

        ``pipelined`` positions behind it belong to a round already dispatched, and stay.
        """
        if self.rows is not None:
            self.rows.trim_to([seq.context + pipelined for seq in self.sequences])
        for proposer in self.proposers.values():
            mine = self.members(proposer)
            if mine:
                proposer.commit(
                    [context[r] for r in mine],
                    [verified[r] for r in mine],
                    [accepted[r] for r in mine],
                )

    def _share(
        self, proposer: Proposer, mine: Sequence[int], features: mx.array | None
    ) -> mx.array | None:
        """The rows and taps of ``features`` that are this proposer's."""
        taps = proposer.spec.taps
        if features is None or not taps:
            return None
        if len(mine) < len(self.sequences):
            features = features[mx.array(list(mine))]
        if taps != self.taps:
            size = self._target.hidden_size
            starts = [self.taps.index(t) * size for t in taps]
            features = mx.concatenate([features[..., a : a + size] for a in starts], axis=-1)
        return features
