"""What recent drafts were worth: per row, the gain curves of its last rounds.

A gain curve has the expected tokens won by verifying 0..K drafted tokens, the
running sum of survivals a_1 + ... + a_k. A row begins with the curves of its
method, of many texts rather than of the last, and the first row of a method with
a guess; its own rounds then replace them. Only rounds that are over enter, so
decisions made from it cannot anticipate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .calibration import Floats
from .honesty import Honesty
from .policy import Outcome, RowView

SAMPLES = 24  # gain curves a forecast is made from
BORROWED = 6  # rounds of a row that weigh as much as what it borrowed from others
GUESSED = 2  # and as much as a guess
INHERIT = 0.5  # how much of a token's odds, against the usual, those after it share
POOLED = 16  # of a method's rounds, one in so many is kept for rows to come: of several texts
FIRST = SAMPLES // 2  # rounds of a method that are kept all
KEPT_ROWS = 64  # rows remembered after they have left


class Ring:
    """The last ``SAMPLES`` gain curves ``(SAMPLES, block + 1)``.

    ``there[i]`` counts the tokens that the proposer had in round i.
    """

    __slots__ = ("_next", "_sums", "gains", "guessed", "own", "seen", "there")

    def __init__(
        self, gains: Floats, there: list[int], start: int = 0, guessed: bool = False
    ) -> None:
        self.gains, self.there, self.guessed = gains, there, guessed
        self._next = start % SAMPLES
        self._sums: Floats = np.add.reduce(gains)  # by length, kept up as rounds come in
        self.own = self.seen = 0  # rounds pushed, and those there were to choose from

    @property
    def short(self) -> bool:
        """Whether the proposer had less than a block in some of these rounds."""
        return bool(min(self.there) < self.gains.shape[1] - 1)

    @property
    def mean(self) -> Floats:
        """Tokens won by each length ``(block + 1,)``, on average."""
        return np.asarray(self._sums / SAMPLES)

    def won(self, length: int) -> float:
        """Tokens won by one length, on average."""
        return float(self._sums[length]) / SAMPLES

    def push(self, gain: Floats, there: int) -> None:
        """One round. The first count several times, so that a row is soon known by its own."""
        weak, n = GUESSED if self.guessed else BORROWED, self.own
        for _ in range(max(1, round(SAMPLES * weak / ((n + weak) * (n + weak + 1))))):
            i = self._next
            self._sums += gain - self.gains[i]
            self.gains[i], self.there[i] = gain, there
            self._next = (i + 1) % SAMPLES
        self.own += 1

    def copy(self, shift: int) -> Ring:
        """Rows that borrow the same rounds must not all be lucky in the same sample."""
        k = shift % SAMPLES
        there = self.there[SAMPLES - k :] + self.there[: SAMPLES - k]
        return Ring(np.roll(self.gains, k, axis=0), there, self._next, self.guessed)


class History:
    """Rings per row and per method."""

    def __init__(self, honesty: Honesty) -> None:
        self._honesty = honesty
        self._rows: dict[str, Ring] = {}
        self._methods: dict[tuple[str, int], Ring] = {}
        self._born = 0

    def observe(self, outcome: Outcome, asked: Sequence[int], honest: Floats) -> None:
        """``asked (R,)`` tokens each row's proposer was asked for; ``honest (R, K)`` its c_k.

        A draft that was foreseen says nothing of one that is still to be made.
        """
        if not any(asked):
            return
        count, width = honest.shape
        chance = np.zeros((count, max(width, *(row.block for row in outcome.rows))))
        chance[:, :width] = honest
        there = list(outcome.drafted)
        for r, row in enumerate(outcome.rows):
            n, block = there[r], row.block
            # The proposer had no more to give, unless it was not asked for more.
            if 0 < asked[r] <= n and row.foreseen is None:
                there[r] = block
                if n < block:
                    chance[r, n:block] = _inherited(self._honesty.rates(row, block), chance[r], n)
        gains = np.zeros((count, chance.shape[1] + 1))
        np.multiply.accumulate(chance, axis=1).cumsum(axis=1, out=gains[:, 1:])
        for r, row in enumerate(outcome.rows):
            if not asked[r] or row.foreseen is not None:
                continue
            gain = gains[r, : row.block + 1]
            self.ring(row).push(gain, there[r])
            pool = self._methods[row.method, row.block]
            if pool.seen < FIRST or pool.seen % POOLED == 0:
                pool.push(gain, there[r])
                pool.guessed = False
            pool.seen += 1

    def ring(self, row: RowView) -> Ring:
        """The row's curves, for its present block."""
        own = self._rows.get(row.request_id)
        if own is None or own.gains.shape[1] != row.block + 1:
            key = (row.method, row.block)
            pool = self._methods.get(key)
            if pool is None:
                guess = np.zeros(row.block + 1)
                np.cumsum(np.cumprod(self._honesty.rates(row, row.block)), out=guess[1:])
                pool = self._methods[key] = Ring(
                    np.tile(guess, (SAMPLES, 1)), [row.block] * SAMPLES, guessed=True
                )
            self._born += 1
            own = self._rows[row.request_id] = pool.copy(7 * self._born)
            while len(self._rows) > KEPT_ROWS:
                del self._rows[next(iter(self._rows))]
        return own


def _inherited(rates: Floats, chance: Floats, n: int) -> Floats:
    """Chances of the tokens after the ``n`` that were drafted: text that is easy stays easy."""
    usual = np.log(rates / (1.0 - rates))
    last = min(max(float(chance[n - 1]), 0.01), 0.99)
    ahead = usual[n:] + INHERIT * (np.log(last / (1.0 - last)) - usual[n - 1])
    return np.asarray(1.0 / (1.0 + np.exp(-ahead)))
