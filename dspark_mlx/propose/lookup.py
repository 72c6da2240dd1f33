"""Prompt lookup: propose what followed the last time the same few tokens occurred.

Needs no drafter, so any target can speculate with it; pays where a reply copies
from its context (summaries, edits, code). Its confidence is its own running hit
rate, by length of the match. Method: prompt lookup decoding (A. Saxena, 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from .base import Draft, DraftRow
from .hit_rate import HitRate

NGRAMS = (5, 4, 3, 2)  # longest match first


@dataclass
class LookupRow:
    """A row's text and, per n-gram in it, where its last occurrence was continued."""

    tokens: list[int] = field(default_factory=list)
    index: dict[tuple[int, ...], int] = field(default_factory=dict)
    kind: int = 0  # length of the match the current draft came from

    def append(self, token: int) -> None:
        end = len(self.tokens)
        for n in NGRAMS:
            if end >= n:
                self.index[tuple(self.tokens[end - n : end])] = end
        self.tokens.append(token)

    def draft(self, anchor: int, width: int) -> list[int]:
        """What followed the longest earlier match of the text's end, at most ``width`` tokens."""
        text = self.tokens
        for n in NGRAMS:
            if len(text) + 1 < n:
                continue
            at = self.index.get((*text[len(text) + 1 - n :], anchor))
            if at is None:
                continue
            self.kind = n
            drafted: list[int] = []
            tail = [anchor]
            for k in range(at, at + width):
                # A match that overlaps its own continuation repeats with its period.
                known = k - len(text)
                drafted.append(text[k] if known < 0 else (tail + drafted)[known])
            return drafted
        self.kind = 0
        return []


class LookupProposer:
    """The proposer interface over one ``LookupRow`` per row; all of it on the host."""

    name = "lookup"
    taps: tuple[int, ...] = ()
    calibrated = False

    def __init__(self, block: int = 8) -> None:
        self.block = block
        self.hits = HitRate()
        self._rows: list[LookupRow] = []

    def new_row(self) -> LookupRow:
        return LookupRow()

    def prefill(
        self, row: LookupRow, tokens: Sequence[int], features: mx.array | None
    ) -> list[mx.array]:
        for token in tokens:
            row.append(token)
        return []

    def row_length(self, row: LookupRow) -> int:
        return len(row.tokens)

    def roll_back_row(self, row: LookupRow, length: int) -> None:
        kept = row.tokens[:length]
        row.tokens, row.index = [], {}
        self.prefill(row, kept, None)

    def join(self, row: LookupRow) -> None:
        self._rows.append(row)

    def keep(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[r] for r in rows]

    def extract(self, row: int) -> LookupRow:
        return self._rows[row]

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        drafts = [
            state.draft(row.anchor, min(row.width, self.block)) if row.width else []
            for state, row in zip(self._rows, rows, strict=True)
        ]
        width = max(map(len, drafts), default=0)
        confidence = [
            [self.hits.rate(state.kind, k) if k < len(draft) else 0.0 for k in range(width)]
            for state, draft in zip(self._rows, drafts, strict=True)
        ]
        padded = [draft + [0] * (width - len(draft)) for draft in drafts]
        shape = (len(drafts), width)
        return Draft(
            tokens=mx.array(padded, dtype=mx.int32).reshape(shape),
            counts=tuple(map(len, drafts)),
            confidence=mx.array(confidence, dtype=mx.float32).reshape(shape),
            q=(None,) * len(drafts),
        )

    def absorb(self, features: mx.array | None) -> list[mx.array]:
        return []

    def settle(
        self,
        context: Sequence[Sequence[int]],
        verified: Sequence[int],
        accepted: Sequence[int],
    ) -> None:
        for state, tokens, checked, stood in zip(
            self._rows, context, verified, accepted, strict=True
        ):
            for token in tokens:
                state.append(token)
            if checked:
                self.hits.observe(state.kind, stood, checked)
