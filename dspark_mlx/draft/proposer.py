"""What a proposer is: drafts tokens for rows, and follows what was committed.

A proposer keeps whatever it needs per row (a context cache, an n-gram index) in
the order of the engine's rows. It never decides how much of a draft is
verified, and never sees the target's logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from ..request import SamplingParams


@dataclass(frozen=True, slots=True)
class DraftRow:
    """One row to draft for: its last token, where the next one will stand, how to draw it."""

    anchor: int
    position: int
    params: SamplingParams
    width: int


@dataclass(frozen=True, slots=True)
class Draft:
    """Drafted tokens of B rows; lazy.

    ``tokens (B, w)`` are target ids, of which row r has ``counts[r]``.
    ``confidence (B, w)``: chance that a token is accepted given all before it
    were. ``q[r]``: distributions ``(w, V)`` the row's tokens were drawn from,
    only for independently sampled drafts. ``peaks (B, w)``: logits of the largest
    probability of each slot, where the proposer has them.
    """

    tokens: mx.array
    counts: tuple[int, ...]
    confidence: mx.array
    q: tuple[mx.array | None, ...]
    peaks: mx.array | None = None

    def token_rows(self) -> list[list[int]]:
        """The drafted ids of each row; waits for the device."""
        rows: list[list[int]] = self.tokens.tolist()
        return [row[:n] for row, n in zip(rows, self.counts, strict=True)]

    def confidence_rows(self) -> list[list[float]]:
        """The confidences of each row's drafted tokens; waits for the device.

        What is no number (a drafter with damaged weights) is no confidence at all.
        """
        rows: list[list[float]] = self.confidence.tolist()
        return [
            [c if c == c else 0.0 for c in row[:n]]
            for row, n in zip(rows, self.counts, strict=True)
        ]

    @staticmethod
    def together(parts: Sequence[tuple[Sequence[int], Draft]], rows: int) -> Draft:
        """Drafts of groups of rows as one of all ``rows``, padded; other rows have none."""
        if len(parts) == 1 and len(parts[0][0]) == rows:
            return parts[0][1]
        width = max(draft.tokens.shape[1] for _, draft in parts)
        tokens = [mx.zeros((width,), dtype=mx.int32)] * rows
        confidence = [mx.zeros((width,), dtype=mx.float32)] * rows
        counts = [0] * rows
        q: list[mx.array | None] = [None] * rows
        for members, draft in parts:
            pad = [(0, width - draft.tokens.shape[1])]
            for i, r in enumerate(members):
                tokens[r] = mx.pad(draft.tokens[i], pad)
                confidence[r] = mx.pad(draft.confidence[i], pad)
                counts[r] = draft.counts[i]
                q[r] = draft.q[i]
        return Draft(mx.stack(tokens), tuple(counts), mx.stack(confidence), tuple(q))


class Proposer(Protocol):
    """``taps``: the target layers it reads. ``block``: most tokens it can draft.

    ``calibrated``: its confidences were calibrated on held-out rounds.
    ``kv_bytes_per_token``: what a position takes in its own context cache, 0 without one;
    ``nbytes``: what the rows being decoded hold there.
    """

    name: str
    taps: tuple[int, ...]
    block: int
    calibrated: bool
    kv_bytes_per_token: float

    @property
    def nbytes(self) -> int: ...

    # -- a row that is being prefilled, or waits to be reused --------------------------

    def new_row(self) -> Any:
        """An empty row state."""
        ...

    def prefill(self, row: Any, tokens: Sequence[int], features: mx.array | None) -> list[mx.array]:
        """Append ``tokens`` with their features ``(1, L, T*H)``; returns what to evaluate."""
        ...

    def row_length(self, row: Any) -> int:
        """Context positions the row state covers."""
        ...

    def roll_back_row(self, row: Any, length: int) -> None: ...

    # -- the rows being decoded --------------------------------------------------------

    def join(self, row: Any) -> None: ...

    def keep(self, rows: Sequence[int]) -> None: ...

    def extract(self, row: int) -> Any: ...

    def foresee(self, anchors: Sequence[int]) -> list[tuple[float, ...] | None]:
        """Per row the confidences of the draft behind its anchor, where they are known already.

        Such a draft is on the host and costs nothing; it may be empty. None: it is still
        to be made. Called before a round is planned, and not in every round.
        """
        ...

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        """Draft for all rows; at most ``rows[r].width`` tokens count for row r."""
        ...

    def absorb(self, features: mx.array | None) -> list[mx.array]:
        """Take in the features ``(B, W, T*H)`` of a verification; returns what to evaluate."""
        ...

    def settle(
        self,
        context: Sequence[Sequence[int]],
        verified: Sequence[int],
        accepted: Sequence[int],
    ) -> None:
        """The round's outcome, per row: the tokens that joined the context, oldest first.

        These are the row's old anchor and the drafted tokens that stood;
        ``accepted[r]`` of ``verified[r]`` drafted tokens were accepted.
        """
        ...
