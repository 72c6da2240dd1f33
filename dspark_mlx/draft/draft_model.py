"""An independent small model as the drafter (llama.cpp's draft-simple).

Any language model with the target's vocabulary drafts token by token on a KV
cache of its own. Per row the cache holds one *entry* per token; what the text has
and the cache has not is *owed*, and is fed together with the anchor at the next
draft. A drafted token's entry depends on tokens alone, so it stays as far as the
tokens were accepted; the rest is trimmed. A draft of w tokens is w calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..errors import PairingError
from ..model.rows import Rows
from ..model.target import Target
from .chain import MOST_OWED, right_padded
from .draw import BlockSampler, peak_logits
from .proposer import Draft, DraftRow, ProposerSpec
from .rates import PeakRate

# Most tokens of a draft. A draft costs w calls of the draft model, so longer ones seldom pay;
# speculative decoding papers use 4 to 8.
BLOCK = 8


@dataclass
class DraftModelRow:
    """One row's KV state in the draft model, and the tokens it still owes."""

    rows: Rows
    owed: list[int]

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    @property
    def arrays(self) -> list[mx.array]:
        return self.rows.arrays

    def extract(self, row: int) -> DraftModelRow:
        return DraftModelRow(self.rows.extract(row), list(self.owed))

    def can_trim_to(self, row: int, length: int) -> bool:
        return self.rows.can_trim_to(row, min(length, self.rows.lengths[row]))


class DraftModelProposer:
    """The proposer interface over ``model``, which drafts for a target of ``vocab_size`` ids."""

    def __init__(self, model: Target, vocab_size: int, block: int = BLOCK) -> None:
        self.model = model
        self.spec = ProposerSpec(
            name="draft",
            block=block,
            keeps_state=True,
            samples_drafts=True,
            confidence="peak",
            kv_bytes_per_token=model.kv_bytes_per_token,
        )
        self._vocab_size = vocab_size
        self._rows = Rows([], 0)
        self._owed: list[list[int]] = []
        # Per row (entries up to the anchor's, drafted entries behind it); None: nothing drafted.
        self._drafted: list[tuple[int, int]] | None = None
        self._peaks = PeakRate()

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    # -- a row that is being prefilled, or waits to be reused --------------------------

    def new_row(self) -> DraftModelRow:
        return DraftModelRow(self.model.make_rows(), [])

    def prefill(
        self, row: DraftModelRow, tokens: Sequence[int], features: mx.array | None
    ) -> list[mx.array]:
        fed, row.owed = [*row.owed, *tokens], []
        self._feed(row.rows, [fed])
        return row.arrays

    def row_length(self, row: DraftModelRow) -> int:
        return row.rows.lengths[0] + len(row.owed)

    def trim_row(self, row: DraftModelRow, length: int) -> None:
        entries = row.rows.lengths[0]
        row.owed = row.owed[: max(0, length - entries)]
        if length < entries:
            row.rows.trim_to([length])

    # -- the rows being decoded --------------------------------------------------------

    def extend(self, row: DraftModelRow) -> None:
        if len(self._rows):
            self._rows.extend(row.rows)
        else:
            self._rows = row.rows
        self._owed.append(row.owed)

    def filter(self, rows: Sequence[int]) -> None:
        if rows:
            self._rows.filter(rows)
        else:
            self._rows = Rows([], 0)
        self._owed = [self._owed[r] for r in rows]
        self._drafted = None
        self._peaks.forget()

    def extract(self, row: int) -> DraftModelRow:
        return DraftModelRow(self._rows.extract(row), list(self._owed[row]))

    def peek(self, anchors: Sequence[int]) -> list[tuple[float, ...] | None]:
        return [None] * len(anchors)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        width = max(row.width for row in rows)
        sampler = BlockSampler(rows, self._vocab_size, None)
        fed = [[*owed, row.anchor] for owed, row in zip(self._owed, rows, strict=True)]
        self._owed = [[] for _ in rows]
        slot = self._feed(self._rows, fed)
        entries = list(self._rows.lengths)
        tokens, slots = [], []
        for k in range(width):
            slots.append(slot)
            drawn = sampler(slot, k).astype(mx.int32)
            tokens.append(drawn)
            if k < width - 1:
                slot = self._append(self._rows, drawn[:, None])[:, -1]
        # The last drafted token has no entry, and one beyond a row's own width is not its draft.
        self._drafted = [
            (n, min(row.width, width - 1)) for n, row in zip(entries, rows, strict=True)
        ]
        peaks = peak_logits(mx.stack(slots, axis=1))
        return Draft(
            tokens=mx.stack(tokens, axis=1),
            counts=tuple(row.width for row in rows),
            confidence=self._peaks.of_draft(peaks, [row.params.greedy for row in rows]),
            q=sampler.distributions(),
            peaks=peaks,
        )

    def append_features(self, features: mx.array | None) -> list[mx.array]:
        if self._drafted is None and max(map(len, self._owed), default=0) >= MOST_OWED:
            owed, self._owed = self._owed, [[] for _ in self._owed]
            self._feed(self._rows, owed)
        return [*self._rows.arrays, *self._peaks.arrays]

    def commit(
        self,
        context: Sequence[Sequence[int]],
        verified: Sequence[int],
        accepted: Sequence[int],
    ) -> None:
        self._peaks.commit(verified, accepted)
        drafted, self._drafted = self._drafted, None
        if drafted is None:
            for owed, tokens in zip(self._owed, context, strict=True):
                owed += tokens
            return
        keep = []
        for r, ((entries, behind), tokens) in enumerate(zip(drafted, context, strict=True)):
            kept = min(len(tokens) - 1, behind)  # ``tokens`` begins with the anchor
            keep.append(entries + kept)
            self._owed[r] = list(tokens[1 + kept :])
        self._rows.trim_to(keep)

    # -- inside ------------------------------------------------------------------------

    def _append(self, rows: Rows, tokens: mx.array) -> mx.array:
        """The draft model on ``tokens (B, L)``: logits ``(B, L, V)``; every row grows by L."""
        last = self.model.vocab_size - 1  # a target's added token may lie beyond the draft's table
        before = rows.lengths
        logits, _ = self.model.forward(mx.minimum(tokens, last), rows)
        rows.trim_to([n + tokens.shape[1] for n in before])
        return logits[..., : self._vocab_size]

    def _feed(self, rows: Rows, tokens: Sequence[Sequence[int]]) -> mx.array:
        """Each row's ``tokens``, padded on the right: logits ``(B, V)`` behind each row's last."""
        if not any(tokens):
            return mx.zeros((len(tokens), 0))
        before = list(rows.lengths)
        padded, ends = right_padded(tokens)
        logits = self._append(rows, padded)
        rows.trim_to([n + len(row) for n, row in zip(before, tokens, strict=True)])
        return mx.take_along_axis(logits, ends, axis=1)[:, 0]


def check_vocabulary(ours: Any, theirs: Any, sizes: tuple[int, int]) -> None:
    """Raise PairingError, naming the first id that differs, unless both tokenizers agree.

    ``ours`` is the target's tokenizer and ``theirs`` the draft model's; ``sizes`` are
    the widths of their logits. Tables of different sizes are fine: the surplus is padding.
    """
    limit = min(sizes)
    mine = {id: text for text, id in ours.get_vocab().items() if id < limit}
    other = {id: text for text, id in theirs.get_vocab().items() if id < limit}
    for id in sorted(mine.keys() | other.keys()):
        if mine.get(id) != other.get(id):
            raise PairingError(
                f"the draft model has another vocabulary: id {id} is {other.get(id)!r} there "
                f"and {mine.get(id)!r} in the target",
                "choose a draft model of the target's own family",
            )
