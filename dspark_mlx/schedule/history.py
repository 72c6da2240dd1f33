"""What recent drafts were worth: per row, the gain curves of its last rounds.

A gain curve has the expected tokens won by verifying 0..K drafted tokens, the
running sum of survivals a_1 + ... + a_k. A row begins with the curves of its
method, and the first row of a method with a guess; its own rounds then replace
them. Only rounds that are over enter, so decisions made from it cannot
anticipate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .calibration import Floats
from .honesty import Honesty
from .policy import Outcome, RowView

SAMPLES = 24  # gain curves a forecast is made from
EAGER = 4  # a row's first rounds count double, so that it is soon known by its own
KEPT_ROWS = 64  # rows remembered after they have left


class Ring:
    """The last ``SAMPLES`` gain curves ``(SAMPLES, block + 1)`` and tokens there ``(SAMPLES,)``.

    ``total (block + 1,)`` is the sum of the curves; ``short`` says whether in
    some of these rounds the proposer had less than a block.
    """

    __slots__ = ("_next", "gains", "own", "short", "there", "total")

    def __init__(self, gains: Floats, there: Floats, start: int = 0) -> None:
        self.gains, self.there = gains, there
        self._next = start % SAMPLES
        self.own = 0
        self._sum()

    def _sum(self) -> None:
        self.total: Floats = self.gains.sum(axis=0)
        self.short = bool(self.there.min() < self.gains.shape[1] - 1)

    def push(self, gain: Floats, there: int) -> None:
        self.own += 1
        for _ in range(2 if self.own <= EAGER else 1):
            self.gains[self._next] = gain
            self.there[self._next] = there
            self._next = (self._next + 1) % SAMPLES
        self._sum()

    def copy(self, shift: int) -> Ring:
        """Rows that borrow the same rounds must not all be lucky in the same sample."""
        return Ring(np.roll(self.gains, shift, axis=0), np.roll(self.there, shift), self._next)


class History:
    """Rings per row and per method."""

    def __init__(self, honesty: Honesty) -> None:
        self._honesty = honesty
        self._rows: dict[str, Ring] = {}
        self._methods: dict[tuple[str, int], Ring] = {}
        self._born = 0

    def observe(self, outcome: Outcome, asked: Sequence[int], honest: Floats) -> None:
        """``asked (R,)`` tokens each row's proposer was asked for; ``honest (R, K)`` its c_k."""
        for r, row in enumerate(outcome.rows):
            if not asked[r]:
                continue
            n, block = outcome.drafted[r], row.block
            chance = np.zeros(block)
            chance[:n] = honest[r, :n]
            there = n  # the proposer had no more to give, unless it was not asked for more
            if n >= asked[r]:
                there = block
                if n < block:
                    chance[n:] = self._honesty.rates(row, block)[n:]
            gain = np.zeros(block + 1)
            np.cumsum(np.multiply.accumulate(chance), out=gain[1:])
            own = self.ring(row)
            own.push(gain, there)
            self._methods[row.method, block].push(gain, there)

    def ring(self, row: RowView) -> Ring:
        """The row's curves, for its present block."""
        own = self._rows.get(row.request_id)
        if own is None or own.gains.shape[1] != row.block + 1:
            key = (row.method, row.block)
            pool = self._methods.get(key)
            if pool is None:
                guess = np.zeros(row.block + 1)
                np.cumsum(np.cumprod(self._honesty.rates(row, row.block)), out=guess[1:])
                full = np.full(SAMPLES, float(row.block))
                pool = self._methods[key] = Ring(np.tile(guess, (SAMPLES, 1)), full)
            self._born += 1
            own = self._rows[row.request_id] = pool.copy(7 * self._born)
            while len(self._rows) > KEPT_ROWS:
                del self._rows[next(iter(self._rows))]
        return own
