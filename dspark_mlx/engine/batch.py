"""The replies being decoded: one row each, in the same order in every cache.

Moves the target's rows and the proposers' rows together, so that nothing else
has to know which row of which cache belongs to whom.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..draft import Draft, DraftRow, Proposer
from ..errors import CacheError
from ..model.rows import Rows
from ..model.taps import Begin
from ..model.target import Target
from ..request import Status
from .prefix_cache import Prefix
from .sequence import Reply


class Batch:
    """Row r belongs to ``replies[r]``; ``proposers`` are known by name."""

    def __init__(self, target: Target, proposers: Sequence[Proposer]) -> None:
        kinds = ", ".join(target.factory.unsupported)
        if kinds and proposers:
            raise CacheError(
                f"this model's cache ({kinds}) cannot be rolled back, so nothing can be drafted",
                "use it without a proposer (method none)",
            )
        self.proposers = {p.name: p for p in proposers}
        self.replies: list[Reply] = []
        self.rows: Rows | None = None
        self.taps = tuple(dict.fromkeys(t for p in proposers for t in p.taps))
        self._target = target

    def __len__(self) -> int:
        return len(self.replies)

    @property
    def nbytes(self) -> int:
        held = self.rows.nbytes if self.rows is not None else 0
        return held + sum(proposer.nbytes for proposer in self.proposers.values())

    def members(self, proposer: Proposer) -> list[int]:
        """The rows that ``proposer`` drafts for, in its own order."""
        return [r for r, reply in enumerate(self.replies) if reply.method == proposer.name]

    # -- coming and going -----------------------------------------------------------------

    def join(self, reply: Reply, state: Prefix) -> None:
        """Begin to decode a reply whose prompt is in ``state``."""
        if self.rows is None:
            self.rows = state.rows
        else:
            self.rows.join(state.rows)
        if reply.method in self.proposers:
            self.proposers[reply.method].join(state.draft)
        self.replies.append(reply)
        reply.status = Status.DECODING

    def state_of(self, r: int) -> Prefix:
        """Row r's caches, as what a later request may build on."""
        assert self.rows is not None
        reply = self.replies[r]
        proposer = self.proposers.get(reply.method)
        draft = None
        if proposer is not None and proposer.taps:
            draft = proposer.extract(self.members(proposer).index(r))
        rows = self.rows if len(self.replies) == 1 else self.rows.extract(r)
        if not self._target.factory.unsupported:  # a round begun ahead may have gone further
            rows.roll_back([reply.context])
        return Prefix(reply.tokens[: reply.context], rows, reply.method, draft)

    def drop(self, gone: Sequence[int]) -> None:
        """Let these rows leave every cache."""
        for proposer in self.proposers.values():
            mine = self.members(proposer)
            if any(r in gone for r in mine):
                proposer.keep([i for i, r in enumerate(mine) if r not in gone])
        stay = [r for r in range(len(self.replies)) if r not in gone]
        if stay and self.rows is not None:
            self.rows.keep(stay)
        else:
            self.rows = None
        self.replies = [self.replies[r] for r in stay]

    def clear(self) -> None:
        """Forget everything, whatever state a failure left it in."""
        self.replies, self.rows = [], None
        for proposer in self.proposers.values():
            proposer.keep([])

    # -- one round ------------------------------------------------------------------------

    def foresee(self) -> list[tuple[float, ...] | None]:
        """Per row the confidences of its next draft, where they are known before it is made."""
        found: list[tuple[float, ...] | None] = [None] * len(self.replies)
        for proposer in self.proposers.values():
            mine = self.members(proposer)
            if mine:
                known = proposer.foresee([self.replies[r].anchor for r in mine])
                for r, chances in zip(mine, known, strict=True):
                    found[r] = chances
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
                reply = self.replies[r]
                params = reply.request.sampling
                rows.append(DraftRow(reply.anchor, len(reply.tokens), params, widths[r]))
            parts.append((mine, proposer.propose(rows)))
        return Draft.together(parts, len(self.replies)) if parts else None

    def forward(
        self, draft: Draft | None, width: int, begin: Begin | None = None
    ) -> tuple[mx.array, mx.array | None]:
        """The target on ``[anchor, x_1..x_width]`` of every row: logits and features, lazy.

        ``begin`` as in ``Target.forward``.
        """
        tokens = mx.array([[reply.anchor] for reply in self.replies], dtype=mx.int32)
        if width and draft is not None:
            tokens = mx.concatenate([tokens, draft.tokens[:, :width]], axis=1)
        return self.forward_tokens(tokens, begin)

    def forward_tokens(
        self, tokens: mx.array, begin: Begin | None = None
    ) -> tuple[mx.array, mx.array | None]:
        """The target on ``tokens (B, W)``, behind what the rows hold."""
        assert self.rows is not None
        return self._target.forward(tokens, self.rows, self.taps, begin)

    @property
    def arrays(self) -> list[mx.array]:
        """The target's caches, for evaluation."""
        return self.rows.arrays if self.rows is not None else []

    def absorb(self, features: mx.array | None) -> list[mx.array]:
        """Give the proposers what the target saw; returns what must be evaluated for them."""
        waiting = []
        for proposer in self.proposers.values():
            mine = self.members(proposer)
            if mine:
                waiting += proposer.absorb(self._share(proposer, mine, features))
        return waiting

    def settle(
        self,
        context: Sequence[Sequence[int]],
        verified: Sequence[int],
        accepted: Sequence[int],
        ahead: int = 0,
    ) -> None:
        """Roll every cache back to what was committed (see ``Proposer.settle``).

        ``ahead`` positions behind it belong to a round already begun and stay.
        """
        self.roll_back(ahead)
        for proposer in self.proposers.values():
            mine = self.members(proposer)
            if mine:
                proposer.settle(
                    [context[r] for r in mine],
                    [verified[r] for r in mine],
                    [accepted[r] for r in mine],
                )

    def roll_back(self, ahead: int = 0) -> None:
        """Have the target's rows hold their replies' contexts, and ``ahead`` positions more."""
        if self.rows is not None:
            self.rows.roll_back([reply.context + ahead for reply in self.replies])

    def _share(
        self, proposer: Proposer, mine: Sequence[int], features: mx.array | None
    ) -> mx.array | None:
        """The rows and taps of ``features`` that are this proposer's."""
        if features is None or not proposer.taps:
            return None
        if len(mine) < len(self.replies):
            features = features[mx.array(mine)]
        if proposer.taps != self.taps:
            size = self._target.hidden_size
            starts = [self.taps.index(t) * size for t in proposer.taps]
            features = mx.concatenate([features[..., a : a + size] for a in starts], axis=-1)
        return features
