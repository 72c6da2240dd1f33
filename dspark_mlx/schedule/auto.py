"""``--schedule auto``: the most tokens per second that stays lossless for these rows.

Each round it takes the best of these ways: decode plainly; verify a copy of earlier
text, whose confidences are known beforehand (``copy``); draft and verify a width
settled from earlier rounds, in one graph (``lagged``); or look at the confidences
first and pay for it, then verify the global optimum where no decision can change the
text (``optimum``), else enter level after level on what is known so far (``causal``).
Which of them it was is ``Schedule.policy``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from . import reasons
from .cost import CostModel
from .cuts import Limits, any_looks, limits, tokens
from .learner import Learner
from .optimum import level_stop, levels, per_rate
from .padded import gains_of, padded, survivals
from .policy import Outcome, Plan, RowView, Schedule
from .skip import AHEAD, SURE, Budget, Choice, Outlook, Switch, outlook, worth_drafting

HOLD = 3  # rounds more that a choice may hold before it is made anew
SPARED = 24  # rounds in a row, at most, in which rows go without a draft beside copies
COPIES_OVER = 16.0  # plans that show how often something is foreseen
COPY_WINS = 2.0  # plain rounds that a copy saves, about


@dataclass(frozen=True, slots=True)
class _Round:
    """What the plan of this round decided, for its schedule and outcome."""

    kind: str  # plain, probe, measure, check, copy, lagged, look
    choice: Choice | None = None
    outlook: Outlook | None = None
    ahead: int = 0

    def holds(self, before: _Round) -> int:
        """Rounds more that are to be like this one: of plain ones those that were settled, of
        a way to draft some where it came out twice in a row."""
        if self.kind == "plain":
            return min(self.ahead, HOLD)
        if self.kind not in ("lagged", "look") or before.kind != self.kind:
            return 0
        a, b = self.choice, before.choice
        return HOLD if a and b and a.width == b.width else 0


class Auto:
    """Needs no tuning: prices from ``cost`` or learned, gains from what rounds showed."""

    name = "auto"

    def __init__(self, cost: CostModel | None = None) -> None:
        self.learner = Learner(cost)
        self.switch = Switch()
        self.budget = Budget()
        self._round = _Round("plain")
        self._moves = 0
        self._present: set[str] = set()
        self._spared = 0  # rounds in a row in which rows went without a draft beside copies
        self._copying = 0.0  # share of the last plans that foresaw something
        self._plan = Plan(widths=(), look=False)
        self._made_for: Sequence[tuple[object, ...]] = ()  # what of its rows a plan hangs on
        self._left = 0  # rounds that the plan still holds for, while its rows are the same
        self._unread: list[Outcome] = []  # rounds not yet learned from

    def plan(self, rows: Sequence[RowView]) -> Plan:
        """Decided anew only where that may change something.

        A decision and what it learns from cost an engine at work up to a millisecond a round.
        """
        foreseen = any(row.foreseen for row in rows)
        self._copying += (foreseen - self._copying) / COPIES_OVER
        rows_now = [(r.request_id, r.method, r.block, r.cap, r.pathwise, r.cuts) for r in rows]
        same = rows_now == self._made_for and not foreseen
        if same and self._left > 0:
            promised = min(self._plan.plain_ahead, self._left - 1)
            return replace(self._plan, plain_ahead=promised)
        before, self._left = self._round, 0
        self._learn()
        self._plan, self._made_for = self._plan_anew(rows), rows_now
        self._left = 1 + (self._round.holds(before) if same else 0)
        return self._plan

    def _learn(self) -> None:
        unread, self._unread = self._unread, []
        for outcome in unread:
            self.learner.observe(outcome)

    def _plan_anew(self, rows: Sequence[RowView]) -> Plan:
        if self._moves != self.learner.correction.moves:
            self._moves = self.learner.correction.moves
            self.budget.renew()
        self._round, widths = self._decide(rows)
        self.learner.asked(rows, widths)
        if not any(widths):
            return Plan(widths=widths, look=False, plain_ahead=self._ahead(rows))
        return Plan(widths=widths, look=self._round.kind == "look" or any_looks(rows))

    def _ahead(self, rows: Sequence[RowView]) -> int:
        """Plain rounds that may be promised: none where they would keep too many copies away."""
        if not self._round.ahead or not self._copying:
            return self._round.ahead
        won = self._copying * COPY_WINS * self.learner.plain(rows)
        return self._round.ahead if won <= self.learner.cost.overlap else 0

    def _decide(self, rows: Sequence[RowView]) -> tuple[_Round, tuple[int, ...]]:
        none = (0,) * len(rows)
        if not rows:
            return _Round("plain"), none
        caps = tuple(row.cap for row in rows)
        width = self.learner.unmeasured(rows)
        if width is not None:
            return _Round("measure"), tuple(min(cap, width) for cap in caps)
        if not any(caps):
            return _Round("plain", ahead=AHEAD), none
        slow = len(rows) / self.learner.plain(rows)
        wanted = sum(map(bool, caps))
        caps = worth_drafting(self.learner, rows, caps, slow, spare=self._spared < SPARED)
        # Rows that go without a draft beside others' copies are tried again now and then.
        fewer = sum(map(bool, caps)) < wanted and any(row.foreseen for row in rows)
        self._spared = self._spared + 1 if fewer else 0
        if not any(caps):
            return _Round("plain", ahead=AHEAD), none
        if self.learner.correction.blind(len(rows)):
            return _Round("check"), none
        causal = any(cap and not row.pathwise for cap, row in zip(caps, rows, strict=True))
        view = outlook(self.learner, rows, caps, causal, any_looks(rows))
        best, plain, once = view.best, view.plain.rate, len(rows) / view.plain.rate
        if all(row.foreseen is not None for cap, row in zip(caps, rows, strict=True) if cap):
            # Known beforehand: nothing to look at, nothing to try, nothing learned of drafting.
            choice = best if any_looks(rows) else view.fixed
            if choice.rate > plain:
                return _Round("copy", choice, view), tuple(min(cap, choice.width) for cap in caps)
            return _Round("plain", view.plain, view), none
        widths = tuple(min(cap, best.width) for cap in caps)
        present = {row.request_id for row in rows}
        self.budget.welcome(len(present - self._present) / len(rows), once)
        self._present = present
        if self.switch.update(plain, best.rate) and self._may_lose(best.rate, plain, len(rows)):
            kind = "look" if best.look else "lagged"
            return _Round(kind, best, view), widths
        trial = view.fixed
        if view.hope(len(rows)) <= plain:  # not even a perfect draft would pay
            return _Round("plain", view.plain, view, AHEAD), none
        seconds = (len(rows) + float(view.mean[trial.width])) / trial.rate
        loss = max(seconds * (1.0 - trial.rate / plain), 0.0)
        if self.budget.pause <= 0 and self.budget.left(loss, once):
            return _Round("probe", trial, view), tuple(min(cap, trial.width) for cap in caps)
        return _Round("plain", view.plain, view, self.budget.wait(loss, once)), none

    def _may_lose(self, rate: float, plain: float, rows: int) -> bool:
        """Whether a round that promises ``rate`` may be tried: it is safe, or can be afforded."""
        sure = rate > SURE * plain and self.budget.proven
        return sure or self.budget.left(0.0, rows / plain)

    def schedule(
        self,
        rows: Sequence[RowView],
        drafted: Sequence[int],
        confidence: Sequence[Sequence[float]] | None,
    ) -> Schedule:
        allowed = limits(rows, drafted, confidence)
        view, choice = self._round.outlook, self._round.choice
        if view is None or choice is None:
            return self._unpriced(allowed)
        if self._round.kind == "look" and confidence is not None and any(drafted):
            return self._looked(rows, drafted, confidence, allowed, view, choice)
        return self._settled(rows, allowed, view, choice)

    def _unpriced(self, allowed: Limits) -> Schedule:
        most = max((length for length, _ in allowed), default=0)
        if self._round.kind in ("measure", "check"):
            line = f"measuring what {tokens(most + 1)} per row cost now"
            allowed = [(length, line) for length, _ in allowed]
        return reasons.unpriced(allowed, self._round.kind)

    def _looked(
        self,
        rows: Sequence[RowView],
        drafted: Sequence[int],
        confidence: Sequence[Sequence[float]],
        allowed: Limits,
        view: Outlook,
        choice: Choice,
    ) -> Schedule:
        most = max(length for length, _ in allowed)
        honest = self.learner.honesty.correct(rows, drafted, confidence)
        seconds = choice.seconds[: most + 1]
        marginal = survivals(honest, allowed).sum(axis=0)[:most]
        gains = gains_of(marginal)
        rate = max(choice.rate, view.plain.rate)
        if all(row.pathwise for row, n in zip(rows, drafted, strict=True) if n):
            return padded(gains, seconds, per_rate(gains, seconds, rate), allowed, "optimum")
        width = level_stop(marginal, levels(view.mean[: most + 1], seconds, rate))
        return padded(gains, seconds, int(width), allowed, "causal")

    def _settled(
        self,
        rows: Sequence[RowView],
        allowed: Limits,
        view: Outlook,
        choice: Choice,
    ) -> Schedule:
        """The lengths the plan settled; only the rows' own cuts can shorten them now."""
        most = max((length for length, _ in allowed), default=0)
        seconds = choice.seconds[: most + 1]
        gains = view.mean[: most + 1]
        curve = tuple(((len(rows) + gains) / seconds).tolist())
        kind, took = self._round.kind, float(seconds[most])
        expected = len(rows) + float(gains[most])
        if kind == "plain":
            width = view.fixed.width
            slow = (len(rows) + float(view.mean[width])) / view.fixed.rate
            line = reasons.plain(width, slow, took, float(view.mean[width]))
            lines = [line] * len(rows)
        elif kind == "copy":
            lines = [reasons.copied(n, most, took, expected) if n else why for n, why in allowed]
        elif kind == "probe":
            lines = ["trying whether drafting pays again" if n else why for n, why in allowed]
        else:
            line = reasons.chosen(most, took, expected)
            lines = [line if n == most and n else reasons.kept(n, w, most) for n, w in allowed]
        return Schedule(
            lengths=tuple(length for length, _ in allowed),
            reasons=tuple(lines),
            curves=tuple([curve[: length + 1] for length, _ in allowed]),
            predicted_seconds=took,
            predicted_tps=curve[most],
            policy=kind,
        )

    def observe(self, outcome: Outcome) -> None:
        if outcome.round_seconds > 0.0:
            self.budget.round(outcome.round_seconds)
            view = self._round.outlook
            drafted = any(outcome.drafted) and self._round.kind != "copy"
            if view is not None and drafted:
                committed, rows = sum(outcome.committed), len(outcome.rows)
                self.budget.charge(outcome.round_seconds, committed, view.plain.rate, rows)
                if not self._may_lose(view.best.rate, view.plain.rate, rows):
                    self._left = 0
        self._unread.append(outcome)
        self._left -= 1
        if self._left <= 0:  # the next plan will want it
            self._learn()
