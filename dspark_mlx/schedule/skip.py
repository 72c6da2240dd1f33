"""Whether to draft at all, and how long a block.

Drafting has a fixed cost that no cut recovers, so where the best way to draft
expects fewer tokens per second than the target alone, nothing is drafted. Then
nothing is learned either: now and then a probe drafts all the same. What
probes and doubtful rounds lose is bounded by a share of the time spent.
``outlook`` compares the ways to spend a round; ``Switch`` holds the state, with
hysteresis; ``Budget`` the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .calibration import Floats
from .history import SAMPLES
from .learner import Learner
from .optimum import Counts, attainable, fixed_seconds
from .policy import RowView

MARGIN = 0.01  # how much better drafting must look before it is taken up again
LOOKING = 0.01  # how much better looking must promise to be: the best of guesses flatters itself
SURE = 1.1  # so many times plain decoding is no longer in doubt
SHARE = 0.008  # of all time, most that drafting may lose while it is in doubt
CREDIT = 2.0  # plain rounds that may be lost before any were earned
FRESH = 0.75  # plain rounds of that which new replies may lose once more: theirs is another text
KEPT = 5.0  # plain rounds won that are kept to be risked later: the next text may be another
AHEAD = 10  # plain rounds promised at most: a load that ends must show within 15
RECENT = 12.0  # drafting rounds that show whether the forecast holds
PAUSE = 2  # rounds between probes at least


class Choice(NamedTuple):
    """One way to spend rounds, and the tokens/s of all rows it should reach.

    ``width`` tokens are drafted; with ``look`` fewer may be verified. Width 0
    is plain decoding. ``seconds (width + 1,)`` prices the round by the number
    verified.
    """

    width: int
    look: bool
    rate: float
    seconds: Floats


class Outlook(NamedTuple):
    """What a plan was made from: all rows together, padded to the widest.

    ``gains (N, K + 1)`` past rounds, ``mean (K + 1,)`` their average;
    ``plain`` the choice of not drafting, ``fixed`` the best width without a
    look, ``best`` the best way to draft; ``each (K + 1,)`` the mean
    seconds of drafting and verifying each width.
    """

    gains: Floats
    mean: Floats
    plain: Choice
    fixed: Choice
    best: Choice
    each: Floats

    def hope(self, rows: int) -> float:
        """Tokens/s if all that is drafted were accepted."""
        return rows * float((np.arange(2, len(self.each) + 1) / self.each[1:]).max())


def worth_drafting(
    learner: Learner,
    rows: Sequence[RowView],
    caps: Sequence[int],
    rate: float,
    spare: bool = True,
) -> tuple[int, ...]:
    """``caps``, but 0 for rows whose own draft costs more than it could ever win.

    In a padded step one row's verification is paid by the widest row, its draft
    is not. Beside rows that need no draft, all those of a method may go without (``spare``).
    """
    caps = list(caps)
    drafting: dict[str, list[int]] = {}
    for r, row in enumerate(rows):
        if caps[r] and row.foreseen is None:
            drafting.setdefault(row.method, []).append(r)
    copying = [row.method for row, cap in zip(rows, caps, strict=True) if row.foreseen and cap]
    if spare and copying:
        for method, mine in list(drafting.items()):
            longest = max(caps[r] for r in mine)
            won = sum(learner.history.ring(rows[r]).won(caps[r]) for r in mine)
            count = len(mine) + copying.count(method)
            price = learner.cost.drafts(method, count, longest)[longest]
            if won < rate * price:
                del drafting[method]
                for r in mine:
                    caps[r] = 0
    counts = {method: len(mine) for method, mine in drafting.items()}
    extra: dict[tuple[str, int], Floats] = {}  # what one row more costs, per draft length
    for r, row in enumerate(rows):
        n, cap = counts.get(row.method, 0), caps[r]
        if not cap or n < 2 or row.foreseen is not None:
            continue
        key = row.method, n
        more = extra.get(key)
        if more is None or len(more) <= cap:
            drafts = learner.cost.drafts
            more = drafts(row.method, n, row.block) - drafts(row.method, n - 1, row.block)
            extra[key] = more
        if more[cap] > 0.0 and learner.history.ring(row).won(cap) < rate * more[cap]:
            caps[r] = 0
            counts[row.method] -= 1
    return tuple(caps)


def outlook(
    learner: Learner, rows: Sequence[RowView], caps: Sequence[int], causal: bool, must_look: bool
) -> Outlook:
    """Compare plain decoding with every width, looking and not."""
    count, most = len(rows), max(caps)
    total, there = _together(learner, rows, caps, most)
    step = learner.step(rows, most)
    draft = learner.draft(rows, caps, most)
    blind = learner.correction.factors(count, most, False)
    alone = learner.plain(rows) * blind[:1]
    plain = Choice(0, False, count / float(alone[0]), alone)
    mean = np.add.reduce(total) / SAMPLES
    each = fixed_seconds(there, draft, step, blind)
    rates = (count + mean) / each
    rates[0] = 0.0
    width = int(np.argmax(rates))
    seconds = (step[: width + 1] + draft[width]) * blind[: width + 1]
    fixed = best = Choice(width, False, float(rates[width]), seconds)
    if learner.cost.profiled or must_look:
        sighted = learner.correction.factors(count, most, True)
        price = learner.cost.look
        known = plain.rate if must_look else max(plain.rate, fixed.rate)
        for block in sorted({width, most}):
            seconds = (step[: block + 1] + draft[block] + price) * sighted[: block + 1]
            rate = attainable(count, total[:, : block + 1], seconds, known, causal)
            least = best.rate if best.look or must_look else (1.0 + LOOKING) * best.rate
            if rate > least or (must_look and not best.look):
                best = Choice(block, True, rate, seconds)
    return Outlook(total, mean, plain, fixed, best, each)


def _together(
    learner: Learner, rows: Sequence[RowView], caps: Sequence[int], most: int
) -> tuple[Floats, Counts]:
    """Gains ``(SAMPLES, most + 1)`` of all rows, and tokens the longest draft had."""
    total = np.zeros((SAMPLES, most + 1))
    there, least = np.zeros(SAMPLES, np.int64), 0
    for row, cap in zip(rows, caps, strict=True):
        if not cap:
            continue
        if row.foreseen is not None:  # known, the same in every sample
            gains = learner.gains(row)
            total[:, : cap + 1] += gains[: cap + 1]
            total[:, cap + 1 :] += gains[cap]
            least = max(least, cap)
            continue
        ring = learner.history.ring(row)
        if ring.gains.shape[1] == most + 1 == cap + 1:
            total += ring.gains
        else:
            total[:, : cap + 1] += ring.gains[:, : cap + 1]
            total[:, cap + 1 :] += ring.gains[:, cap : cap + 1]
        if ring.short:
            np.maximum(there, np.minimum(ring.there, cap), out=there)
        else:
            least = max(least, cap)
    return total, np.maximum(there, least)


class Budget:
    """Bounds, in seconds, what drafting may lose against plain decoding.

    Losses may add up to a share of all time spent and a few rounds of credit;
    gains pay them back, and a few are kept for worse times. ``renew`` allows
    the few rounds of credit once more.
    """

    def __init__(self, share: float = SHARE) -> None:
        self.share = share
        self.earned = 0.0
        self.lost = 0.0
        self.pause = 0
        self._won = 0.0  # seconds a drafting round won lately, over those it took

    @property
    def proven(self) -> bool:
        """Whether the last rounds that drafted were no slower than plain ones."""
        return self._won >= 0.0

    def left(self, loss: float, plain_seconds: float) -> bool:
        """Whether ``loss`` more may be risked."""
        return self.lost + loss <= self.earned + CREDIT * plain_seconds

    def wait(self, loss: float, plain_seconds: float) -> int:
        """Plain rounds until ``loss`` may be risked, at most ``AHEAD``."""
        short = self.lost + loss - self.earned - CREDIT * plain_seconds
        rounds = short / (self.share * plain_seconds)
        return int(min(max(rounds, self.pause, 0.0), AHEAD))

    def renew(self) -> None:
        """The device is in another state: what was lost in the last one proves nothing."""
        self.lost = min(self.lost, self.earned)
        self.pause = 0
        self._won = max(self._won, 0.0)

    def welcome(self, share: float, plain_seconds: float) -> None:
        """New replies, ``share`` of all rows: what earlier ones lost says little of theirs."""
        if share > 0.0 and self.lost > self.earned:
            most = self.earned + CREDIT * plain_seconds
            self.lost = max(self.earned, min(self.lost, most) - FRESH * share * plain_seconds)

    def charge(self, seconds: float, tokens: int, plain_rate: float, rows: int) -> None:
        """A round that drafted took ``seconds`` for ``tokens``; plain makes ``plain_rate`` /s."""
        loss = seconds - tokens / plain_rate
        self.lost = max(self.lost + loss, self.earned - KEPT * rows / plain_rate)
        self.pause = 0 if loss < 0.0 else PAUSE
        self._won -= (loss / seconds + self._won) / RECENT

    def round(self, seconds: float) -> None:
        """Any round earns."""
        self.earned += self.share * seconds
        self.pause -= 1


class Switch:
    """Drafting or not; entered again only for a clear difference."""

    def __init__(self) -> None:
        self.on = True

    def update(self, plain: float, best: float) -> bool:
        self.on = best > plain * (1.0 if self.on else 1.0 + MARGIN)
        return self.on
