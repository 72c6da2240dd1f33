"""``--schedule auto``: draft only where it pays, and cut each draft by its own confidences.

In a padded step every decision is one integer, the width W (0 = plain):

    gain[W]    = Σ_rows Σ_{k ≤ min(W, cap)} a_k        a_k = c_1 · … · c_k
    seconds[W] = (step[rows, W, context] + draft + sync) · drift
    W          = argmax (rows + gain[W]) / seconds[W]

Before the draft is made, gain is the mean of each row's recent rounds, and the best W ≥ 1
must beat plain decoding by a margin. After it is made, gain is that of this draft: rows whose
text no decision can change take the optimum, others stop where tokens/s first fall, as in
Algorithm 1. While
drafting does not pay, one round in 16, then 32, … 256 drafts all the same, to see whether it
pays again; what such rounds lose is bounded. docs/scheduling.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .acceptance import Acceptance
from .cost import CostModel
from .limits import (
    any_needs_confidence,
    cumulative,
    limits,
    marginal_gains,
    padded,
    tokens,
    unpriced,
)
from .paper import first_fall, total_gain
from .policy import Floats, Outcome, Plan, RowView, Schedule
from .round_prices import Prices

MARGIN = 0.01  # how much better drafting must be before it is taken up again
WAITS = (16, 256)  # plain rounds between two explorations: at first, and at most
NEW_ROWS = 2  # plain rounds until drafting is tried for new rows
MEMORY = 16.0  # rounds over which the worth of a cut is averaged
SHARE = 0.01  # of all time, most that drafting may lose against plain decoding
CREDIT = 3.0  # plain rounds that may be lost before any time has passed
HICCUP = 2.0  # plain rounds that one round may count as lost: a stall of the system is no loss


@dataclass(frozen=True, slots=True)
class Way:
    """One way to spend a round: draft ``widths``, verify up to ``width``, at ``rate`` tokens/s.

    ``gains`` and ``seconds`` ``(K + 1,)`` by the width verified; ``sync``: the
    confidences are read first; ``known``: they are known already, of every row that drafts.
    """

    widths: tuple[int, ...]
    width: int
    rate: float
    gains: Floats
    seconds: Floats
    sync: bool
    known: bool


class Regret:
    """Seconds that drafting has lost against plain decoding, and what it may lose."""

    def __init__(self) -> None:
        self.lost, self.allowed = 0.0, 0.0

    def affords(self, loss: float, plain_seconds: float) -> bool:
        return self.lost + loss <= self.allowed + CREDIT * plain_seconds

    def forgive(self, credit: float = 0.0) -> None:
        """Of what was lost beyond what may be, let only ``credit`` seconds count."""
        self.lost = min(self.lost, self.allowed + credit)

    def observe(self, seconds: float, won: float) -> None:
        """A round of ``seconds``, which plain decoding would have taken ``won`` longer for."""
        self.allowed += SHARE * seconds
        self.lost = max(self.lost - won, 0.0)


class Auto:
    """Needs no tuning: prices from ``cost`` or learned, gains from what rounds showed."""

    name = "auto"

    def __init__(self, cost: CostModel | None = None) -> None:
        self.prices, self.acceptance = Prices(cost), Acceptance()
        self.regret = Regret()
        self._way: Way | None = None  # of the present round; None: plain
        self._rule = "plain"
        self._drafting = True  # whether the last decision was to draft
        self._wait = self._left = WAITS[0]  # plain rounds until the next exploration
        self._rows: set[str] = set()
        # Tokens a round that cutting a draft of D tokens by its confidences won lately, by D.
        self._cut_wins: Floats = np.zeros(1)

    # -- before the draft ---------------------------------------------------------------

    def plan(self, rows: Sequence[RowView]) -> Plan:
        self._rule, self._way = "plain", None
        caps = tuple(row.cap for row in rows)
        measure = self.prices.unmeasured(rows) if rows else None
        if measure is not None:
            self._rule = "measure"
            return self._plan(rows, tuple(min(cap, measure) for cap in caps))
        if not any(caps):
            return self._plan(rows, caps)
        if len(self._cut_wins) <= max(caps):
            self._cut_wins = np.pad(
                self._cut_wins, (0, max(caps) + 1 - len(self._cut_wins)), "edge"
            )
        way, plain = self._best(rows, caps), len(rows) / self.prices.plain(rows)
        self._way = way
        if way.rate > plain * (1.0 if self._drafting else 1.0 + MARGIN) and self._affordable(
            way, plain, len(rows)
        ):
            self._rule = "copy" if way.known else "optimum" if way.sync else "settled"
            return self._plan(rows, way.widths)
        if self._left <= 0 and self._affordable(way, plain, len(rows)):
            self._rule = "explore"
            return self._plan(rows, tuple(min(n, max(way.width, 1)) for n in way.widths))
        return self._plan(rows, (0,) * len(rows))

    def _plan(self, rows: Sequence[RowView], widths: tuple[int, ...]) -> Plan:
        reads = self._rule == "optimum" or any_needs_confidence(rows)
        return Plan(widths, any(widths) and reads)

    def _best(self, rows: Sequence[RowView], caps: tuple[int, ...]) -> Way:
        """All rows draft; or, where that is better, only those whose draft is known already."""
        way = self._evaluate(rows, caps)
        known = tuple(
            cap if row.known_confidence is not None else 0
            for row, cap in zip(rows, caps, strict=True)
        )
        if any(known) and known != caps:
            other = self._evaluate(rows, known)
            if other.rate > way.rate:
                return other
        return way

    def _evaluate(self, rows: Sequence[RowView], caps: tuple[int, ...]) -> Way:
        """The best way to draft ``caps`` at most: settled beforehand, or cut once it is there."""
        count, most = len(rows), max(caps)
        gains = total_gain(
            [self.acceptance.gains(r)[: cap + 1] for r, cap in zip(rows, caps, strict=True) if cap],
            most,
        )
        verify, draft = self.prices.verifying(rows, most), self.prices.drafts(rows, caps)
        rates = (count + gains) / (verify + draft)
        width = length = 1 + int(np.argmax(rates[1:]))
        rate, sync = float(rates[width]), 0.0
        known = [row.known_confidence is not None for row, n in zip(rows, caps, strict=True) if n]
        if not all(known):
            # Of a draft of D tokens a cut wins cut_wins[D] more than verifying the best width.
            best = np.minimum(np.arange(most + 1), width)
            cut = count + gains[best] + self._cut_wins[: most + 1]
            cut /= verify[best] + draft + self.prices.sync
            at = 1 + int(np.argmax(cut[1:]))
            if cut[at] > rate or any_needs_confidence(rows):
                length, rate, sync = at, float(cut[at]), self.prices.sync
        widths = tuple([min(cap, length) for cap in caps])
        return Way(
            widths,
            width,
            rate,
            gains,
            verify + (float(draft[length]) + sync),
            sync > 0.0,
            all(known),
        )

    def _affordable(self, way: Way, plain: float, rows: int) -> bool:
        seconds = float(way.seconds[way.width])
        loss = max(seconds - (rows + float(way.gains[way.width])) / plain, 0.0)
        return self.regret.affords(loss, rows / plain)

    # -- after it -------------------------------------------------------------------------

    def schedule(
        self,
        rows: Sequence[RowView],
        drafted: Sequence[int],
        confidence: Sequence[Sequence[float]] | None,
    ) -> Schedule:
        allowed = limits(rows, drafted, confidence)
        way = self._way
        most = max((length for length, _ in allowed), default=0)
        if way is None:
            if self._rule == "measure":
                line = f"measuring what {tokens(most + 1)} per row cost now"
                allowed = [(length, line) for length, _ in allowed]
            return unpriced(allowed, self._rule)
        if self._rule == "optimum" and confidence is not None and most:
            calibrated = self.acceptance.calibrator.correct(rows, drafted, confidence)
            seconds = way.seconds[: most + 1]
            gains = cumulative(marginal_gains(calibrated, allowed))
            if not all(row.schedule_invariant for row, n in zip(rows, drafted, strict=True) if n):
                width = first_fall((len(rows) + gains) / seconds)
                return padded(gains, seconds, width, allowed, "early-stop")
            rate = max(way.rate, len(rows) / self.prices.plain(rows))
            width = int(np.argmax(gains - rate * seconds))
            return padded(gains, seconds, width, allowed, "optimum")
        return self._settled(rows, allowed, most, way)

    def _settled(
        self, rows: Sequence[RowView], allowed: Sequence[tuple[int, str]], most: int, way: Way
    ) -> Schedule:
        """Lengths that were settled before the draft; only the rows' own cuts shorten them."""
        most = min(most, way.width)
        allowed = [(min(n, way.width), why) for n, why in allowed]
        gains, seconds = way.gains[: most + 1], way.seconds[: most + 1]
        if not most and self._rule == "plain":
            took = self.prices.plain(rows)
            extra = 1e3 * (float(way.seconds[way.width]) - took)
            line = (
                f"decoding plainly: drafting {way.width} would cost {extra:.1f} ms "
                f"for {float(way.gains[way.width]):.2f} expected tokens"
            )
            count = len(rows)
            return Schedule(
                lengths=(0,) * count,
                reasons=(line,) * count,
                curves=((count / took,),) * count,
                predicted_seconds=took,
                predicted_tps=count / took,
                policy="plain",
            )
        line = ""
        if self._rule == "explore":
            line = "trying whether drafting pays again"
        elif self._rule == "copy":
            won, ms = len(rows) + float(gains[most]), 1e3 * float(seconds[most])
            line = f"{tokens(most)} copied from above: {won:.2f} expected tokens in {ms:.0f} ms"
        return padded(gains, seconds, most, allowed, self._rule, line)

    # -- once it is over --------------------------------------------------------------------

    def observe(self, outcome: Outcome) -> None:
        rows = outcome.rows
        drafted = any(outcome.drafted)
        won = 0.0
        if outcome.round_seconds > 0.0 and rows and self.prices.cost.known:
            if drafted and self._rule in ("optimum", "settled", "explore"):
                plain = self.prices.plain(rows)
                won = sum(outcome.committed) * plain / len(rows) - outcome.round_seconds
                won = max(won, -HICCUP * plain)
            self.regret.observe(outcome.round_seconds, won)
        moves = self.prices.moves
        self.prices.observe(outcome)
        if self.prices.moves > moves:  # what was lost in another state of the device proves nothing
            self.regret.forgive()
        curves = self.acceptance.observe(outcome)
        if drafted and self._way is not None and not self._way.known:
            self._learn_cuts(np.add.reduce(curves, axis=0), self._way, rows)
        self._count_down(rows, drafted, won)

    def _count_down(self, rows: Sequence[RowView], drafted: bool, won: float) -> None:
        """When to explore next: rarer and rarer, at once after a win, soon for new rows."""
        self._drafting = self._rule in ("optimum", "settled")
        if self._drafting or (drafted and self._rule == "explore" and won > 0.0):
            self._wait, self._left = WAITS[0], 0
        elif drafted and self._rule == "explore":
            self._wait = self._left = min(2 * self._wait, WAITS[1])
        else:
            self._left -= 1
        present = {row.request_id for row in rows}
        if not present <= self._rows:
            self._wait, self._left = WAITS[0], min(self._left, NEW_ROWS)
            if self.prices.cost.known:  # enough for one more trial
                self.regret.forgive((CREDIT - 1.0) * self.prices.plain(rows))
        self._rows = present

    def _learn_cuts(self, gains: Floats, way: Way, rows: Sequence[RowView]) -> None:
        """What cutting by this round's ``gains`` would have won over the settled width.

        Rows that must not anticipate are cut where tokens/s first fall, as in Algorithm 1.
        """
        most = min(len(gains), len(way.seconds))
        worth = gains[:most] - way.rate * way.seconds[:most]
        lengths = np.arange(most)
        if all(row.schedule_invariant for row in rows):
            best = np.maximum.accumulate(worth)
        else:
            stop = first_fall((len(rows) + gains[:most]) / way.seconds[:most])
            best = worth[np.minimum(lengths, stop)]
        wins = best - worth[np.minimum(lengths, way.width)]
        self._cut_wins[:most] += (wins - self._cut_wins[:most]) / MEMORY
