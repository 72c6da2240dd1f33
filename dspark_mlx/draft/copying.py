"""A drafter that copies where the text repeats itself, and drafts where it does not.

Where the end of a row's text has occurred before, what followed then is often right
for a whole line, and costs nothing to propose; a small drafter that was never taught
to look further back than a few tokens gets no more of it than of any other text. So
each round each row takes whichever has been winning more tokens: the copy, by how long
its match is, or the drafter, by its running acceptance. The choice is made from the
text alone, before anything is drafted, so it cannot anticipate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

import mlx.core as mx

from ..model.rows import Rows
from .dspark.proposer import DSparkProposer
from .lookup import LookupProposer, LookupRow, on_host
from .proposer import Draft, DraftRow


@dataclass
class CopyingRow:
    """The drafter's context of a row, and its text."""

    draft: Rows
    text: LookupRow

    @property
    def nbytes(self) -> int:
        return self.draft.nbytes

    @property
    def arrays(self) -> list[mx.array]:
        return self.draft.arrays

    def extract(self, row: int) -> CopyingRow:
        """A copy; ``row`` is 0. The index, larger than the text, is made again by a roll back."""
        return CopyingRow(self.draft.extract(row), LookupRow(list(self.text.tokens)))


class CopyingProposer:
    """The proposer interface over a ``DSparkProposer`` with a ``LookupProposer`` before it.

    Copies only in a round that was foreseen (``foresee``): a draft asked for without it
    is the drafter's. Copies of ``block`` tokens at most, drafts of the drafter's block.
    """

    def __init__(self, drafter: DSparkProposer, block: int = 8) -> None:
        self.alone = drafter
        self.drafter = drafter.drafter
        self.name, self.taps, self.block = drafter.name, drafter.taps, drafter.block
        self.calibrated = drafter.calibrated
        self.kv_bytes_per_token = drafter.kv_bytes_per_token
        self._lookup = LookupProposer(block)
        self._copies: dict[int, tuple[list[int], list[float]]] = {}
        self._copied: set[int] = set()  # rows of the round under way
        self.record: list[Draft] | None = None  # every draft is noted here, for evaluation

    @property
    def nbytes(self) -> int:
        return self.alone.nbytes

    # -- a row that is being prefilled, or waits to be reused --------------------------

    def new_row(self) -> CopyingRow:
        return CopyingRow(self.alone.new_row(), self._lookup.new_row())

    def prefill(
        self, row: CopyingRow, tokens: Sequence[int], features: mx.array | None
    ) -> list[mx.array]:
        self._lookup.prefill(row.text, tokens, None)
        return self.alone.prefill(row.draft, tokens, features)

    def row_length(self, row: CopyingRow) -> int:
        return self.alone.row_length(row.draft)

    def roll_back_row(self, row: CopyingRow, length: int) -> None:
        self.alone.roll_back_row(row.draft, length)
        self._lookup.roll_back_row(row.text, length)

    # -- the rows being decoded --------------------------------------------------------

    def join(self, row: CopyingRow) -> None:
        self._forget()
        self.alone.join(row.draft)
        self._lookup.join(row.text)

    def keep(self, rows: Sequence[int]) -> None:
        self._forget()
        self.alone.keep(rows)
        self._lookup.keep(rows)

    def extract(self, row: int) -> CopyingRow:
        text = self._lookup.extract(row)
        return CopyingRow(self.alone.extract(row), LookupRow(list(text.tokens)))

    def foresee(self, anchors: Sequence[int]) -> list[tuple[float, ...] | None]:
        self._forget()
        usual = _won(self.alone.rates())
        found: list[tuple[float, ...] | None] = []
        for r, anchor in enumerate(anchors):
            tokens, chances = self._lookup.copy(r, anchor, self._lookup.block)
            if tokens and _won(chances) > usual:
                self._copies[r] = tokens, chances
            found.append(tuple(chances) if r in self._copies else None)
        return found

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        copies, self._copies = self._copies, {}
        self._copied = {r for r in copies if rows[r].width}
        asked = [
            (copies[r][0][: row.width], copies[r][1][: row.width])
            if r in self._copied
            else ([], [])
            for r, row in enumerate(rows)
        ]
        draft = on_host(asked)
        if any(row.width for r, row in enumerate(rows) if r not in self._copied):
            left = [
                replace(row, width=0 if r in self._copied else min(row.width, self.block))
                for r, row in enumerate(rows)
            ]
            drafted = self.alone.propose(left)
            draft = _merged(draft, drafted, self._copied) if self._copied else drafted
        if self.record is not None:
            self.record.append(draft)
        return draft

    def absorb(self, features: mx.array | None) -> list[mx.array]:
        return self.alone.absorb(features)

    def settle(
        self,
        context: Sequence[Sequence[int]],
        verified: Sequence[int],
        accepted: Sequence[int],
    ) -> None:
        self._lookup.settle(context, verified, accepted)
        # What the copy got right says nothing of the drafter.
        judged = [0 if r in self._copied else n for r, n in enumerate(verified)]
        self.alone.settle(context, judged, accepted)
        self._forget()

    def _forget(self) -> None:
        self._copies, self._copied = {}, set()


def _won(chances: Iterable[float]) -> float:
    """Tokens expected of a draft whose tokens stand with these chances, each behind the last."""
    return sum(accumulate(chances, mul))


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
