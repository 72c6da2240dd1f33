"""Prompt lookup: propose what followed the last time the same few tokens occurred.

Needs no drafter, so any target can speculate with it; pays where a reply copies
from its context or repeats itself (summaries, edits, code, lists). Its confidence is
learned from every token that joins a reply: how often, behind a match of so many
tokens, what followed before follows again. Method: prompt lookup decoding
(A. Saxena, 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from .proposer import Draft, DraftRow, ProposerSpec
from .rates import MatchRate

NGRAMS = (12, 8, 5, 4, 3, 2)  # longest match first


@dataclass
class LookupRow:
    """A row's text and, per n-gram in it, where its last occurrence was continued."""

    tokens: list[int] = field(default_factory=list)
    index: dict[tuple[int, ...], int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return 0  # of device memory

    @property
    def arrays(self) -> list[mx.array]:
        return []

    def extract(self, row: int) -> LookupRow:
        """A copy of the text; the index, larger than it, is made again by ``trim_row``."""
        return LookupRow(list(self.tokens))

    def append(self, token: int) -> None:
        end = len(self.tokens)
        for n in NGRAMS:
            if end >= n:
                self.index[tuple(self.tokens[end - n : end])] = end
        self.tokens.append(token)

    def match(self, *anchor: int) -> tuple[int, int]:
        """Tokens of the longest match of the text's end, and where it went on; (0, 0) if none.

        ``anchor``: the last token, where it is not yet in the text.
        """
        end = (*self.tokens[-NGRAMS[0] :], *anchor)
        for n in NGRAMS:
            at = self.index.get(end[-n:]) if len(end) >= n else None
            if at is not None:
                return n, at
        return 0, 0

    def draft(self, anchor: int, width: int) -> tuple[int, list[int]]:
        """The length of the match behind ``anchor``, and at most ``width`` tokens after it."""
        n, at = self.match(anchor)
        if not n:
            return 0, []
        text, tail = self.tokens, [anchor]
        drafted: list[int] = []
        for k in range(at, at + width):
            # A match that overlaps its own continuation repeats with its period.
            known = k - len(text)
            drafted.append(text[k] if known < 0 else (tail + drafted)[known])
        return n, drafted


class LookupProposer:
    """The proposer interface over one ``LookupRow`` per row; all of it on the host."""

    nbytes = 0

    def __init__(self, block: int = 8) -> None:
        self.spec = ProposerSpec(name="lookup", block=block, host_only=True)
        self.match_rate = MatchRate()
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

    def trim_row(self, row: LookupRow, length: int) -> None:
        if length == len(row.tokens) and row.index:
            return
        kept = row.tokens[:length]
        row.tokens, row.index = [], {}
        self.prefill(row, kept, None)

    def extend(self, row: LookupRow) -> None:
        self._rows.append(row)

    def filter(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[r] for r in rows]

    def extract(self, row: int) -> LookupRow:
        return self._rows[row]

    def copy(self, row: int, anchor: int, width: int) -> tuple[list[int], list[float]]:
        """What may follow ``anchor`` in that row, with the chance of each token in turn.

        Behind k accepted tokens the match is k tokens longer.
        """
        n, drafted = self._rows[row].draft(anchor, width)
        return drafted, [self.match_rate.rate(n + k) for k in range(len(drafted))]

    def peek(self, anchors: Sequence[int]) -> list[tuple[float, ...] | None]:
        return [tuple(self.copy(r, anchor, self.spec.block)[1]) for r, anchor in enumerate(anchors)]

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        return on_host(
            [
                self.copy(r, row.anchor, min(row.width, self.spec.block)) if row.width else ([], [])
                for r, row in enumerate(rows)
            ]
        )

    def append_features(self, features: mx.array | None) -> list[mx.array]:
        return []

    def commit(
        self,
        context: Sequence[Sequence[int]],
        verified: Sequence[int],
        accepted: Sequence[int],
    ) -> None:
        for row, tokens in zip(self._rows, context, strict=True):
            for token in tokens:
                n, at = row.match()
                if n:
                    self.match_rate.observe(n, row.tokens[at] == token)
                row.append(token)


def on_host(drafts: Sequence[tuple[Sequence[int], Sequence[float]]]) -> Draft:
    """Tokens and confidences per row, of any lengths, as one padded draft."""
    width = max((len(tokens) for tokens, _ in drafts), default=0)
    shape = (len(drafts), width)
    ids = [[*tokens, *[0] * (width - len(tokens))] for tokens, _ in drafts]
    chances = [[*chance, *[0.0] * (width - len(chance))] for _, chance in drafts]
    return Draft(
        tokens=mx.array(ids, dtype=mx.int32).reshape(shape),
        counts=tuple(len(tokens) for tokens, _ in drafts),
        confidence=mx.array(chances, dtype=mx.float32).reshape(shape),
        q=(None,) * len(drafts),
    )
