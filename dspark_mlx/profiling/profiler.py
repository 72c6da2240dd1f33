"""One measurement: passes over the kinds of ``grid``, and real rounds, within a budget of seconds.

Every pass visits every kind once, so that a hiccup spoils one sample of each and not all
samples of one.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import TypeAlias

import mlx.core as mx

from ..draft import Proposer
from ..draft.copying import CopyFirst
from ..engine.engine import Engine
from ..events import Loading, Notice, StepDone
from ..request import Request
from ..schedule import Fixed, Off, Plan, Policy, RowView
from ..schedule.cost import CostKey, CostModel
from ..sources.store import check_cancel
from .prices import DEEP, SHALLOW, StepKind, extra_seconds, grid, prices
from .profile_store import device_name, on_cpu
from .step_timer import StepTimer

Report: TypeAlias = Callable[[Loading | Notice], None]
Samples: TypeAlias = dict[StepKind, list[float]]

# Samples of a kind, its first run (when kernels are compiled) not counted. Four profiles in a row
# of smollm2-135m on two CPU cores, which afford about 7, agree on the staircase of one row within
# 3 to 5 % (median); 3 are the fewest that outvote a hiccup.
PASSES, LEAST_PASSES = 9, 3
ONE_ROW_PASSES = 15  # for one row, as in a chat, where a few percent decide what pays
# Shares of the budget at which passes over all kinds, and over those of one row, end. The rest
# pays the rounds below: 30 of 190 ms are 5.7 of the 32 s on two CPU cores.
ALL_KINDS, ONE_ROW = 0.7, 0.8
# Least and most rounds that price the reading of confidences, and the share of the budget for
# those beyond the least. There the price has a standard deviation of 3 ms after 30 rounds.
ROUNDS, ROUNDS_SHARE = (30, 60), 0.12
HOST_ROUNDS = 7  # rounds that price the host's own work, where nothing is read from the device
PLAIN_ROUNDS = 16  # plain rounds in a row, on a GPU; the first two are not yet pipelined
LEAST_OVERLAP = 0.02  # of a plain round that pipelining must save: less is noise of the prices


class Profiler:
    """One measurement of the target and the proposers of ``engine``."""

    def __init__(
        self,
        engine: Engine,
        budget: float,
        report: Report,
        cancel: threading.Event | None,
    ) -> None:
        self.engine, self.budget = engine, budget
        self._report, self._cancel = report, cancel
        # Copies cost nothing, and the text below repeats itself.
        self._proposers: dict[str, Proposer] = {
            name: proposer.inner if isinstance(proposer, CopyFirst) else proposer
            for name, proposer in engine.batch.proposers.items()
        }
        self._blocks = {name: p.spec.block for name, p in self._proposers.items()}
        self._first: dict[StepKind, float] = {}  # warm-ups, which count where nothing else is known
        self._samples: Samples = {}
        self._setup_seconds: dict[tuple[int, int], float] = {}  # by context and rows
        self._began = time.perf_counter()
        self._reported = -1
        self._device = device_name()

    def run(self, key: CostKey | None) -> CostModel:
        """Measure. Raises Cancelled."""
        try:
            kinds = self._choose(ALL_KINDS * self.budget)
            self._repeat(kinds, PASSES, ALL_KINDS * self.budget)
            base = min(kind.context for kind in kinds)
            one_row = [kind for kind in kinds if (kind.context, kind.rows) == (base, 1)]
            self._repeat(one_row, ONE_ROW_PASSES, ONE_ROW * self.budget)
            overhead, sync = self._price_rounds()
            overlap = self._overlap(overhead)
        finally:
            for proposer in self._proposers.values():
                proposer.filter([])
            mx.clear_cache()
        self._progress(1.0)
        return self._cost(overhead=overhead, sync_overhead=sync, overlap=overlap, key=key)

    # -- single steps -------------------------------------------------------------------

    def _choose(self, budget: float) -> list[StepKind]:
        """The levels that fit into ``budget`` seconds; the first is measured whatever it costs."""
        contexts = [SHALLOW, DEEP]
        limit = self.engine.prefiller.context_limit
        if limit:
            contexts = [c for c in contexts if c + 64 <= limit] or [max(1, limit // 2)]
        kv_bytes = self.engine.target.kv_bytes_per_token * contexts[-1] * self.engine.max_rows
        if kv_bytes > self.engine.prefiller.kv_limit / 2:
            contexts = contexts[:1]
        first, *levels = grid(self.engine.max_rows, self._blocks, contexts)
        self._pass(first)
        self._pass(first)  # the first was a warm-up: only now the seconds are real
        chosen = list(first)
        for level in levels:
            seconds = self._pass_seconds(chosen) * (LEAST_PASSES - 1)
            seconds += self._pass_seconds(level) * (LEAST_PASSES + 1)
            if self._spent() + seconds > budget:
                break
            self._pass(level)
            chosen += level
        return chosen

    def _repeat(self, kinds: Sequence[StepKind], passes: int, until: float) -> None:
        """Passes over ``kinds`` till each has ``passes`` samples or ``until`` seconds are spent.

        ``LEAST_PASSES`` are made in any case.
        """

        def fewest() -> int:
            return min(len(self._samples.get(kind, ())) for kind in kinds)

        while fewest() < passes:
            if fewest() >= LEAST_PASSES and self._spent() + self._pass_seconds(kinds) > until:
                break
            self._pass(kinds)

    def _pass(self, kinds: Sequence[StepKind]) -> None:
        """One sample of each kind; caches are filled once for all kinds of a context and rows."""
        for context, rows in sorted({(kind.context, kind.rows) for kind in kinds}):
            here = [kind for kind in kinds if (kind.context, kind.rows) == (context, rows)]
            # Drafts first, then wide steps before narrow ones: a step of one token may
            # leave work for the draft after it, which would be timed in the wrong place.
            here.sort(key=lambda kind: (not kind.method, -kind.size))
            began = time.perf_counter()
            timer = StepTimer(self.engine.target, list(self._proposers.values()), rows, context)
            self._setup_seconds[context, rows] = time.perf_counter() - began
            for kind in here:
                check_cancel(self._cancel)
                if kind.method:
                    seconds = timer.draft(self._proposers[kind.method], kind.size)
                else:
                    seconds = timer.step(kind.size)
                if kind in self._first:
                    self._samples.setdefault(kind, []).append(seconds)
                else:
                    self._first[kind] = seconds
                self._progress()
            timer.close()

    def _pass_seconds(self, kinds: Sequence[StepKind]) -> float:
        """Seconds that one pass over ``kinds`` will take, by what was measured so far."""
        cost = self._cost()
        slowest = max(self._setup_seconds.values())
        places = {(kind.context, kind.rows) for kind in kinds}
        total = sum(self._setup_seconds.get(place, slowest) for place in places)
        for kind in kinds:
            if kind.method:
                total += float(cost.drafts(kind.method, kind.rows, kind.size)[-1])
            else:
                total += cost.seconds(kind.rows, kind.size, kind.context)
        return total

    # -- whole rounds -------------------------------------------------------------------

    def _price_rounds(self) -> tuple[float, float]:
        """Seconds that a round adds to its step and draft: the host's work (commit, report, roll
        back), and what reading the confidences before verification costs."""
        proposer = self._proposers.get(self.engine.prefiller.default_method)
        policy, count = Fixed(), HOST_ROUNDS
        if proposer is not None and not proposer.spec.host_only:
            one = self._cost().seconds(1, proposer.spec.block + 1, SHALLOW)
            least, most = ROUNDS
            count = int(min(max(ROUNDS_SHARE * self.budget / one, least), most))
            policy = _ReadHalf()
        rounds = list(self._rounds(policy, count))
        rounds = rounds[1:] or rounds  # the first was a warm-up
        looked = [done.draft_seconds > 0.0 for done in rounds]
        host = [done.host_seconds for done, reads in zip(rounds, looked, strict=True) if not reads]
        seconds = [done.round_seconds for done in rounds]
        sync = extra_seconds(list(zip(looked, seconds, strict=True)))
        return median(host or [done.host_seconds for done in rounds]), sync

    def _overlap(self, overhead: float) -> float:
        """Seconds that a plain round saves by being dispatched before the last one was read.

        The engine does so on a GPU only. 0.0 where it saves so little that it may be nothing.
        """
        if on_cpu():
            return 0.0
        rounds = list(self._rounds(Off(), PLAIN_ROUNDS))[2:]
        alone = self._cost().seconds(1, 1, SHALLOW) + overhead
        saved = alone - median(done.round_seconds for done in rounds)
        return saved if saved > LEAST_OVERLAP * alone else 0.0

    def _rounds(self, policy: Policy, count: int) -> Iterator[StepDone]:
        """``count`` real rounds of one row, none of them cut short by the end of the reply."""
        old = self.engine
        engine = Engine(
            old.target,
            old.tokenizer,
            list(self._proposers.values()),
            policy,
            default_method=old.prefiller.default_method,
            max_rows=1,
            reuse=False,
        )
        limit = old.prefiller.context_limit
        tokens = tuple(1 + k % 4 for k in range(min(16, limit // 2 or 1) if limit else 16))
        # More tokens than these rounds can write: rounds at the end of a reply are shorter.
        most = (count + 1) * (1 + max(self._blocks.values(), default=0))
        engine.submit(Request("profile", tokens=tokens, max_tokens=most, ignore_eos=True))
        for _ in range(count):
            if not engine.active:
                break
            check_cancel(self._cancel)
            yield from (event for event in engine.step() if isinstance(event, StepDone))
            self._progress()
        engine.abandon("profiled")

    # -- the result ---------------------------------------------------------------------

    def _cost(
        self,
        overhead: float = 0.0,
        sync_overhead: float = 0.0,
        overlap: float = 0.0,
        key: CostKey | None = None,
    ) -> CostModel:
        """The cost model of what was measured so far."""
        places: dict[tuple[int, int], Samples] = {}  # a pass runs place by place
        for kind, first in self._first.items():
            here = places.setdefault((kind.context, kind.rows), {})
            here[kind] = self._samples.get(kind) or [first]
        step: dict[int, dict[int, dict[int, float]]] = {}
        draft: dict[str, dict[int, dict[int, float]]] = {}
        for samples in places.values():
            for kind, seconds in sorted(prices(samples).items()):
                table = draft.setdefault(kind.method, {}) if kind.method else None
                if table is None:
                    table = step.setdefault(kind.context, {})
                table.setdefault(kind.rows, {})[kind.size] = seconds
        return CostModel(
            step, draft, overhead=overhead, sync_overhead=sync_overhead, overlap=overlap, key=key
        )

    def _spent(self) -> float:
        return time.perf_counter() - self._began

    def _progress(self, done: float | None = None) -> None:
        share = min(0.99, self._spent() / self.budget) if done is None else done
        percent = int(100 * share)
        if percent > self._reported:
            self._reported = percent
            self._report(Loading("profile", percent, 100, self._device))


class _ReadHalf(Fixed):
    """Verifies whole blocks; in half of the rounds it reads their confidences first.

    In the order of the Thue-Morse sequence (no, yes, yes, no, yes, no, no, yes): unlike strict
    alternation it cannot fall into step with a machine that is slow in every second round.
    """

    def __init__(self) -> None:
        super().__init__()
        self._planned = 0

    def plan(self, rows: Sequence[RowView]) -> Plan:
        plan = super().plan(rows)
        odd = self._planned.bit_count() % 2 == 1
        self._planned += 1
        return dataclasses.replace(plan, needs_confidence=odd and any(plan.widths))
