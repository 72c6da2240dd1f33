"""What a proposer is: it drafts tokens for rows, and follows what was committed.

A proposer keeps what it needs per row (a KV cache, an index of n-grams) in the
order of the engine's rows. It never decides how much of a draft is verified and
never sees the target's logits. What the engine must know of it, it declares in
its ``ProposerSpec``; a new strategy is a new file behind this interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import mlx.core as mx

from ..request import SamplingParams


@dataclass(frozen=True, slots=True)
class ProposerSpec:
    """What a proposer declares.

    ``name``: the method it serves. ``block``: most tokens it drafts at a time.
    ``taps``: indices of the target's layers whose outputs it reads (-1: the embedding).
    ``keeps_state``: its rows hold device arrays that follow the text, which are
    worth keeping with a prefix; else a row is made again from its tokens, on the host.
    ``samples_drafts``: with ``draft_sampling`` "probabilistic" it draws tokens
    independently of the target, to be judged by rejection, so the text depends on
    what is verified. ``host_only``: it costs no device time.
    ``calibrated``: its confidences were calibrated on held-out rounds.
    ``confidence``: where they come from: a trained head, the largest probability of
    each slot, or counts of past rounds.
    ``kv_bytes_per_token``: bytes a position takes in its own caches.
    """

    name: str
    block: int
    taps: tuple[int, ...] = ()
    keeps_state: bool = False
    samples_drafts: bool = False
    host_only: bool = False
    calibrated: bool = False
    confidence: Literal["head", "peak", "counts"] = "counts"
    kv_bytes_per_token: float = 0.0


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
    ``confidence (B, w)``: the chance that a token is accepted, given that all
    before it were. ``q[r]``: the distributions ``(w, V)`` the row's tokens were
    drawn from, only for independently sampled drafts. ``peaks (B, w)``: logit of
    the largest probability of each slot, where the proposer has one.
    """

    tokens: mx.array
    counts: tuple[int, ...]
    confidence: mx.array
    q: tuple[mx.array | None, ...]
    peaks: mx.array | None = None

    def token_rows(self) -> list[list[int]]:
        """The drafted ids of each row; waits for the device."""
        rows: Any = self.tokens.tolist()
        return [row[:n] for row, n in zip(rows, self.counts, strict=True)]

    def confidence_rows(self) -> list[list[float]]:
        """The confidences of each row's drafted tokens; waits for the device.

        One that is not a number (a drafter with damaged weights) counts as 0.
        """
        rows: Any = self.confidence.tolist()
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


class RowState(Protocol):
    """What a proposer keeps of one row outside the batch: in prefill, or with a kept prefix."""

    @property
    def nbytes(self) -> int: ...

    @property
    def arrays(self) -> list[mx.array]:
        """What must be evaluated for the state to stand by itself."""
        ...

    def extract(self, row: int) -> Any:
        """A copy; ``row`` is 0."""
        ...

    def can_trim_to(self, row: int, length: int) -> bool:
        """Whether ``trim_row`` can cut it to ``length``: a window may be gone; ``row`` is 0."""
        ...


class Proposer(Protocol):
    """The interface of every strategy; the order of calls is that of a row's life."""

    @property
    def spec(self) -> ProposerSpec: ...

    @property
    def nbytes(self) -> int:
        """Bytes its rows hold in its own caches."""
        ...

    # -- a row that is being prefilled, or waits to be reused --------------------------

    def new_row(self) -> Any:
        """An empty row state (``RowState``)."""
        ...

    def prefill(self, row: Any, tokens: Sequence[int], features: mx.array | None) -> list[mx.array]:
        """Append ``tokens`` with their features ``(1, L, T*H)``; returns what to evaluate."""
        ...

    def row_length(self, row: Any) -> int:
        """Context positions the row state covers."""
        ...

    def trim_row(self, row: Any, length: int) -> None:
        """Keep the first ``length`` positions of the row state."""
        ...

    # -- the rows being decoded --------------------------------------------------------

    def extend(self, row: Any) -> None:
        """Add a row behind those being decoded."""
        ...

    def filter(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        ...

    def extract(self, row: int) -> Any:
        """A row state of one of the rows, as ``prefill`` would have left it."""
        ...

    def peek(self, anchors: Sequence[int]) -> list[tuple[float, ...] | None]:
        """Per row the confidences of the draft behind its anchor, where they are known already.

        Such a draft is on the host and costs nothing; it may be empty. None: it is
        still to be made. Called before a round is planned, and not in every round.
        """
        ...

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        """Draft for all rows; at most ``rows[r].width`` tokens count for row r."""
        ...

    def append_features(self, features: mx.array | None) -> list[mx.array]:
        """Take in the features ``(B, W, T*H)`` of a verification; returns what to evaluate."""
        ...

    def commit(
        self,
        context: Sequence[Sequence[int]],
        verified: Sequence[int],
        accepted: Sequence[int],
    ) -> None:
        """The round's outcome, per row: the tokens that joined the context, oldest first.

        These are the row's old anchor and the accepted drafted tokens;
        ``accepted[r]`` of ``verified[r]`` drafted tokens were accepted.
        """
        ...
