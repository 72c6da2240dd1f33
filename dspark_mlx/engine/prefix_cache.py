"""Prompt prefixes worth keeping: the KV state of finished replies, found by their tokens.

The next turn of a chat repeats everything before it, so its prefill can start
where the last reply ended. A state is handed over whole where possible, and
copied where another conversation shares only its beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..draft import Proposer, RowState
from ..model.rows import Rows

# A state is cut rather than copied when that loses less than 1/8 of what is shared: a copy
# takes memory for the whole prefix, a cut costs the prefill of the lost part at most.
LOSS_SHARE = 8


@dataclass
class Prefix:
    """One row's state: ``tokens`` are those its caches hold, ``draft`` the proposer's part.

    ``draft`` is None for a proposer that keeps no state: it starts from the tokens again.
    """

    tokens: list[int]
    rows: Rows
    method: str
    draft: RowState | None

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + (self.draft.nbytes if self.draft is not None else 0)

    @property
    def arrays(self) -> list[mx.array]:
        """What must be evaluated for the state to outlive the rows it was taken from."""
        return self.rows.arrays + (self.draft.arrays if self.draft is not None else [])


class PrefixCache:
    """The last few prefixes, at most ``limit_bytes`` of KV; the least recently used goes first."""

    def __init__(self, limit_bytes: int, entries: int = 8) -> None:
        self._limit = limit_bytes
        self._most = entries
        self._entries: list[Prefix] = []

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self._entries)

    def clear(self) -> None:
        self._entries.clear()

    def put(self, prefix: Prefix) -> None:
        if not prefix.tokens or prefix.nbytes > self._limit:
            return
        mx.eval(prefix.arrays)
        self._entries.append(prefix)
        self.shrink(self._limit)

    def shrink(self, limit_bytes: int) -> None:
        """Drop the oldest until at most ``limit_bytes`` are held."""
        while self._entries and (len(self._entries) > self._most or self.nbytes > limit_bytes):
            self._entries.pop(0)

    def take(self, tokens: Sequence[int], proposer: Proposer | None) -> Prefix | None:
        """The state that covers most of ``tokens``, cut to what they share; None if none does.

        With a proposer that keeps state, only positions that this state covers
        count: a prefix that the target alone has seen would leave a hole in the
        drafter's context. The caller starts the row of any other proposer.
        """
        best, most = None, 0
        for entry in reversed(self._entries):
            usable = self._usable(entry, tokens, proposer)
            if usable > most:
                best, most = entry, usable
        if best is None:
            return None
        # Leave the state to its own conversation, unless little of it would be lost.
        if (len(best.tokens) - most) * LOSS_SHARE <= most:
            self._entries.remove(best)
        else:
            draft = best.draft.extract(0) if best.draft is not None else None
            best = Prefix(best.tokens, best.rows.extract(0), best.method, draft)
        best.rows.trim_to([most])
        draft = None
        if proposer is not None and proposer.spec.keeps_state:
            draft = best.draft
            proposer.trim_row(draft, most)
        return Prefix(list(tokens[:most]), best.rows, best.method, draft)

    def _usable(self, entry: Prefix, tokens: Sequence[int], proposer: Proposer | None) -> int:
        """How many positions of ``entry`` a prompt of ``tokens`` can start from."""
        shared = 0
        for ours, theirs in zip(tokens, entry.tokens, strict=False):
            if ours != theirs:
                break
            shared += 1
        if proposer is not None and proposer.spec.keeps_state:
            if entry.method != proposer.spec.name or entry.draft is None:
                return 0
            shared = min(shared, proposer.row_length(entry.draft))
            if not entry.draft.can_trim_to(0, shared):
                return 0
        return shared if shared and entry.rows.can_trim_to(0, shared) else 0
