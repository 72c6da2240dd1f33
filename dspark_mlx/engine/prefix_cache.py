"""Prompt prefixes worth keeping: KV state of finished replies, found by their tokens.

The next turn of a chat repeats everything before it, so its prefill can start
where the last reply ended. Rows are handed over whole where possible and copied
where a different conversation shares only their beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..draft import CopyingRow, Proposer
from ..model.rows import Rows

# What a proposer keeps of a row that holds arrays; anything else is rebuilt from the tokens.
_WITH_ARRAYS = (Rows, CopyingRow)
# A state is cut rather than copied when it loses less than this part of what is kept.
LOSS_SHARE = 8


@dataclass
class Prefix:
    """One row's state: ``tokens`` are those its cache holds, ``draft`` the proposer's row."""

    tokens: list[int]
    rows: Rows
    method: str
    draft: Any

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + (self.draft.nbytes if isinstance(self.draft, _WITH_ARRAYS) else 0)

    @property
    def arrays(self) -> list[mx.array]:
        """What must be evaluated for the state to stand without the rows it was taken from."""
        return self.rows.arrays + (
            self.draft.arrays if isinstance(self.draft, _WITH_ARRAYS) else []
        )


class PrefixStore:
    """The last few prefixes, at most ``limit_bytes`` of KV, least recently used out first."""

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
        """The state that covers most of ``tokens``, cut to what they share; None if nothing does.

        With a proposer, only positions that its own state covers count: what
        the target alone has seen would leave a hole in the drafter's context.
        """
        best, most = None, 0
        for entry in reversed(self._entries):
            usable = self._usable(entry, tokens, proposer)
            if usable > most:
                best, most = entry, usable
        if best is None:
            return None
        # Leave the state to its own conversation, unless what would be lost of it is little.
        if (len(best.tokens) - most) * LOSS_SHARE <= most:
            self._entries.remove(best)
        else:
            best = Prefix(best.tokens, best.rows.extract(0), best.method, _copy(best.draft))
        shared = list(tokens[:most])
        best.rows.roll_back([most])
        if proposer is None:
            return Prefix(shared, best.rows, "none", None)
        draft = best.draft
        if proposer.taps:
            proposer.roll_back_row(draft, most)
        else:
            draft = proposer.new_row()
            proposer.prefill(draft, shared, None)
        return Prefix(shared, best.rows, proposer.name, draft)

    def _usable(self, entry: Prefix, tokens: Sequence[int], proposer: Proposer | None) -> int:
        shared = 0
        for ours, theirs in zip(tokens, entry.tokens, strict=False):
            if ours != theirs:
                break
            shared += 1
        if proposer is not None and proposer.taps:
            if entry.method != proposer.name:
                return 0
            shared = min(shared, proposer.row_length(entry.draft))
        return shared if shared and entry.rows.can_roll_back(0, shared) else 0


def _copy(draft: Any) -> Any:
    """What outlives the row it was taken from."""
    return draft.extract(0) if isinstance(draft, _WITH_ARRAYS) else None
