"""Copies in front of any proposer: where the text repeats itself, it is copied, not drafted.

Where the end of a row's text has occurred before, what followed then is often right
for a whole line and costs nothing to propose; a small drafter rarely finds it. Each
round each row takes what has lately won more tokens: the copy, by the length of its
match, or the proposer behind it, by its running acceptance. The choice is made from
the text alone, before anything is drafted, so it cannot anticipate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import Any

import mlx.core as mx

from .lookup import LookupProposer, LookupRow, on_host
from .proposer import Draft, DraftRow, Proposer
from .rates import AcceptanceRate


@dataclass
class CopyRow:
    """A row's state in the proposer behind the copies, and its text."""

    inner: Any
    text: LookupRow

    @property
    def nbytes(self) -> int:
        return int(self.inner.nbytes)

    @property
    def arrays(self) -> list[mx.array]:
        return list(self.inner.arrays)

    def extract(self, row: int) -> CopyRow:
        return CopyRow(self.inner.extract(row), self.text.extract(row))

    def can_trim_to(self, row: int, length: int) -> bool:
        return bool(self.inner.can_trim_to(row, length))


class CopyFirst:
    """A proposer that tries a copy of up to ``block`` tokens before it asks ``inner``.

    It copies only in rounds that were peeked at; a draft without a ``peek`` is
    ``inner``'s. Its ``spec`` is that of ``inner``.
    """

    def __init__(self, inner: Proposer, block: int = 8) -> None:
        self.inner = inner
        self.spec = inner.spec
        self._lookup = LookupProposer(block)
        self._acceptance = AcceptanceRate()  # of ``inner``, by position
        self._copies: dict[int, tuple[list[int], list[float]]] = {}
        self._copied: set[int] = set()  # rows that copy in the round under way
        self.record: list[Draft] | None = None  # where set, every draft is noted, for evaluation

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    # -- a row that is being prefilled, or waits to be reused --------------------------

    def new_row(self) -> CopyRow:
        return CopyRow(self.inner.new_row(), self._lookup.new_row())

    def prefill(
        self, row: CopyRow, tokens: Sequence[int], features: mx.array | None
    ) -> list[mx.array]:
        self._lookup.prefill(row.text, tokens, None)
        return self.inner.prefill(row.inner, tokens, features)

    def row_length(self, row: CopyRow) -> int:
        return self.inner.row_length(row.inner)

    def trim_row(self, row: CopyRow, length: int) -> None:
        self.inner.trim_row(row.inner, length)
        self._lookup.trim_row(row.text, length)

    # -- the rows being decoded --------------------------------------------------------

    def extend(self, row: CopyRow) -> None:
        self._forget()
        self.inner.extend(row.inner)
        self._lookup.extend(row.text)

    def filter(self, rows: Sequence[int]) -> None:
        self._forget()
        self.inner.filter(rows)
        self._lookup.filter(rows)

    def extract(self, row: int) -> CopyRow:
        return CopyRow(self.inner.extract(row), self._lookup.extract(row).extract(0))

    def peek(self, anchors: Sequence[int]) -> list[tuple[float, ...] | None]:
        self._forget()
        usual = _expected(self._acceptance.rates(self.spec.block))
        found = self.inner.peek(anchors)
        for r, anchor in enumerate(anchors):
            tokens, confidence = self._lookup.copy(r, anchor, self._lookup.spec.block)
            if tokens and _expected(confidence) > usual:
                self._copies[r] = tokens, confidence
                found[r] = tuple(confidence)
        return found

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        copies, self._copies = self._copies, {}
        self._copied = {r for r in copies if rows[r].width}
        draft = on_host(
            [
                (copies[r][0][: row.width], copies[r][1][: row.width])
                if r in self._copied
                else ([], [])
                for r, row in enumerate(rows)
            ]
        )
        if any(row.width for r, row in enumerate(rows) if r not in self._copied):
            left = [
                replace(row, width=0 if r in self._copied else min(row.width, self.spec.block))
                for r, row in enumerate(rows)
            ]
            drafted = self.inner.propose(left)
            draft = _merged(draft, drafted, self._copied) if self._copied else drafted
        if self.record is not None:
            self.record.append(draft)
        return draft

    def append_features(self, features: mx.array | None) -> list[mx.array]:
        return self.inner.append_features(features)

    def commit(
        self,
        context: Sequence[Sequence[int]],
        verified: Sequence[int],
        accepted: Sequence[int],
    ) -> None:
        self._lookup.commit(context, verified, accepted)
        # What a copy got right says nothing about the proposer behind it.
        judged = [0 if r in self._copied else n for r, n in enumerate(verified)]
        for n, correct in zip(judged, accepted, strict=True):
            self._acceptance.observe(correct, n)
        self.inner.commit(context, judged, accepted)
        self._forget()

    def _forget(self) -> None:
        self._copies, self._copied = {}, set()


def _expected(confidence: Iterable[float]) -> float:
    """Σ_k c_1 · … · c_k: how many tokens of a draft with these confidences are accepted."""
    return sum(accumulate(confidence, mul))


def _merged(copies: Draft, drafted: Draft, copied: set[int]) -> Draft:
    """The rows that copied from ``copies``, the others from ``drafted``, padded to the wider."""
    rows = len(copies.counts)
    width = max(copies.tokens.shape[1], drafted.tokens.shape[1])
    mine = mx.array([r in copied for r in range(rows)])[:, None]

    def both(a: mx.array, b: mx.array) -> mx.array:
        a, b = (mx.pad(x, [(0, 0), (0, width - x.shape[1])]) for x in (a, b))
        return mx.where(mine, a, b)

    return Draft(
        tokens=both(copies.tokens, drafted.tokens),
        counts=tuple(copies.counts[r] if r in copied else drafted.counts[r] for r in range(rows)),
        confidence=both(copies.confidence, drafted.confidence),
        q=tuple(None if r in copied else q for r, q in enumerate(drafted.q)),
    )
