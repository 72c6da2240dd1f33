"""One measurement: passes over the shapes of ``grid``, within a budget of seconds.

Every pass visits every shape, so that a hiccup spoils one sample of each and
not all samples of one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import TypeAlias

import mlx.core as mx

from ..draft import Proposer
from ..draft.copying import CopyFirst
from ..engine.engine import Engine
from ..events import Event, Loading, Notice, StepDone
from ..request import Request
from ..schedule import Policy, make_policy
from ..schedule.cost import CostKey, CostModel
from ..sources.store import check_cancel
from .fit import Samples, evened, fit
from .grid import DEEP, SHALLOW, Shape, grid
from .site import Site
from .store import device_name
from .turns import TURN, Looks, Turns

Report: TypeAlias = Callable[[Loading | Notice], None]
Clock: TypeAlias = Callable[[], float]

PASSES, LEAST_PASSES = 9, 3  # samples of a shape, its first run (kernels compile) not counted
FINE_PASSES = 15  # samples of a shape of one row
COARSE, FINE = 0.7, 0.9  # of the budget, spent when all shapes, and those of one row, are done
LOOK_ROUNDS = 18, 48  # least and most rounds with and without a look, in turns
LOOK_SHARE = 0.12  # of the budget, for those beyond the least
HOST_ROUNDS = 7
OVERLAP_TURNS = 4, 16  # least and most turns of plain rounds, alone and begun ahead
OVERLAP_SHARE = 0.15  # of the budget, for those beyond the least
LEAST_OVERLAP = 0.02  # of a plain round that beginning it early must save: less is noise


class Profiler:
    """One measurement. Samples are kept per shape, the first of each apart as its warm-up."""

    def __init__(
        self,
        engine: Engine,
        budget: float,
        report: Report,
        cancel: threading.Event | None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.engine, self.budget = engine, budget
        self._report, self._cancel, self._clock = report, cancel, clock
        self._device = device_name()
        # Copies cost nothing, and the text below repeats itself.
        self._proposers: dict[str, Proposer] = {
            name: proposer.inner if isinstance(proposer, CopyFirst) else proposer
            for name, proposer in engine.batch.proposers.items()
        }
        self._blocks = {name: p.spec.block for name, p in self._proposers.items()}
        self._first: dict[Shape, float] = {}
        self._samples: dict[Shape, list[float]] = {}
        self._seating: dict[tuple[int, int], float] = {}
        self._began = clock()
        self._told = -1

    def run(self, key: CostKey | None) -> CostModel:
        try:
            shapes = self._choose(COARSE * self.budget)
            self._repeat(shapes, PASSES, COARSE * self.budget)
            # Chats are one row, and what pays there is decided by a few percent.
            context = min(s.context for s in shapes)
            alone = [s for s in shapes if (s.context, s.rows) == (context, 1)]
            self._repeat(alone, FINE_PASSES, FINE * self.budget)
            look = self._price_of_a_look()
            overhead = self._overhead()
            overlap = self._overlap()
        finally:
            for proposer in self._proposers.values():
                proposer.filter([])
            mx.clear_cache()
        self._say(1.0)
        return self._cost(overhead=overhead, look=look, overlap=overlap, key=key)

    def _repeat(self, shapes: Sequence[Shape], passes: int, until: float) -> None:
        """Passes over ``shapes`` till each has ``passes`` samples, or ``until`` seconds are spent.

        A few are made in any case.
        """
        while self._fewest(shapes) < passes:
            enough = self._fewest(shapes) >= LEAST_PASSES
            if enough and self._spent() + self._ahead(shapes) > until:
                break
            self._pass(shapes)

    def _choose(self, budget: float) -> list[Shape]:
        """The levels that fit into ``budget``; the first is measured whatever it costs."""
        contexts = [SHALLOW, DEEP]
        limit = self.engine.prefiller.context_limit
        if limit:
            contexts = [c for c in contexts if c + 64 <= limit] or [max(1, limit // 2)]
        if self._kv_bytes(contexts[-1]) > self.engine.prefiller.kv_limit / 2:
            contexts = contexts[:1]
        first, *levels = grid(self.engine.max_rows, self._blocks, contexts)
        self._pass(first)
        self._pass(first)  # the first was a warm-up: only now the prices are real
        chosen = list(first)
        for level in levels:
            ahead = self._ahead(chosen) * (LEAST_PASSES - 1)
            ahead += self._ahead(level) * (LEAST_PASSES + 1)
            if self._spent() + ahead > budget:
                break
            self._pass(level)
            chosen += level
        return chosen

    def _ahead(self, shapes: Sequence[Shape]) -> float:
        """Seconds that one pass over ``shapes`` will take, as far as is known."""
        guess = self._cost()
        seats = {(s.context, s.rows) for s in shapes}
        slowest = max(self._seating.values())
        return sum(_price(guess, s) for s in shapes) + sum(
            self._seating.get(seat, slowest) for seat in seats
        )

    def _kv_bytes(self, context: int) -> float:
        return self.engine.target.kv_bytes_per_token * context * self.engine.max_rows

    def _pass(self, shapes: Sequence[Shape]) -> None:
        """One sample of each shape; rows are seated once for all shapes of a site."""
        sites = sorted({(s.context, s.rows) for s in shapes})
        for context, rows in sites:
            here = [s for s in shapes if (s.context, s.rows) == (context, rows)]
            # Drafts first, then wide steps before narrow ones: a step of one token may
            # leave work for the draft after it, which would be timed in the wrong place.
            here.sort(key=lambda s: (not s.method, -s.size))
            began = self._clock()
            site = self._site(context, rows)
            self._seating[context, rows] = self._clock() - began
            for shape in here:
                check_cancel(self._cancel)
                if shape.method:
                    seconds = site.draft(self._proposers[shape.method], shape.size)
                else:
                    seconds = site.step(shape.size)
                if shape in self._first:
                    self._samples.setdefault(shape, []).append(seconds)
                else:
                    self._first[shape] = seconds
                self._say()
            site.close()

    def _site(self, context: int, rows: int) -> Site:
        return Site(self.engine.target, list(self._proposers.values()), rows, context)

    def _price_of_a_look(self) -> float:
        """Extra seconds of a round that reads its confidences before verifying."""
        proposer = self._proposers.get(self.engine.prefiller.default_method)
        if (
            proposer is None or proposer.spec.host_only
        ):  # its drafts are on the host: nothing to wait for
            return 0.0
        looks = Looks()
        one = self._cost().seconds(1, proposer.spec.block + 1, SHALLOW)
        for _ in self._rounds(looks, self._affordable(LOOK_ROUNDS, LOOK_SHARE, one)):
            pass
        return looks.price

    def _overhead(self) -> float:
        """Median host seconds of real rounds: committing, reporting, rolling back."""
        found: list[float] = []
        for events in self._rounds(make_policy("fixed"), HOST_ROUNDS):
            found += [e.host_seconds for e in events if isinstance(e, StepDone)]
        return median(found[1:] or found)

    def _overlap(self) -> float:
        """Median seconds that a plain round saves where it is begun before the last was read.

        0.0 where that is so little that it may be none: then it is not begun early.
        """
        turns = Turns()
        one = self._cost().seconds(1, 1, SHALLOW)
        count = self._affordable(OVERLAP_TURNS, OVERLAP_SHARE, TURN * one)
        for _ in self._rounds(turns, count * TURN):
            pass
        return turns.saved if turns.saved > LEAST_OVERLAP * one else 0.0

    def _affordable(self, bounds: tuple[int, int], share: float, seconds: float) -> int:
        """How many times ``seconds`` that ``share`` of the budget pays, within ``bounds``."""
        least, most = bounds
        return int(min(max(share * self.budget / seconds, least), most))

    def _rounds(self, policy: Policy, count: int) -> Iterator[Sequence[Event]]:
        """The events of ``count`` real rounds of one row, round by round."""
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
        # More than these rounds can write: those at a reply's end are shorter than others.
        most = (count + 1) * (1 + max(self._blocks.values(), default=0))
        engine.submit(Request("profile", tokens=tokens, max_tokens=most, ignore_eos=True))
        for _ in range(count):
            if not engine.active:
                break
            check_cancel(self._cancel)
            yield engine.step()
            self._say()
        engine.abandon("profiled")

    def _cost(
        self,
        overhead: float = 0.0,
        look: float = 0.0,
        overlap: float = 0.0,
        key: CostKey | None = None,
    ) -> CostModel:
        step: dict[int, Samples] = {}
        draft: dict[str, Samples] = {}
        sites: dict[tuple[int, int], dict[Shape, list[float]]] = {}
        for shape, first in self._first.items():
            here = sites.setdefault((shape.context, shape.rows), {})
            here[shape] = self._samples.get(shape) or [first]
        samples = [item for here in sites.values() for item in evened(here).items()]
        for shape, seconds in samples:
            table = draft.setdefault(shape.method, {}) if shape.method else None
            if table is None:
                table = step.setdefault(shape.context, {})
            table.setdefault(shape.rows, {})[shape.size] = seconds
        steps = {context: fit(by_rows) for context, by_rows in step.items()}
        drafts = {method: fit(by_rows) for method, by_rows in draft.items()}
        return CostModel(steps, drafts, overhead=overhead, look=look, overlap=overlap, key=key)

    def _fewest(self, shapes: Sequence[Shape]) -> int:
        return min(len(self._samples.get(shape, ())) for shape in shapes)

    def _spent(self) -> float:
        return self._clock() - self._began

    def _say(self, done: float | None = None) -> None:
        share = min(0.99, self._spent() / self.budget) if done is None else done
        percent = int(100 * share)
        if percent > self._told:
            self._told = percent
            self._report(Loading("profile", percent, 100, self._device))


def _price(cost: CostModel, shape: Shape) -> float:
    if not shape.method:
        return cost.seconds(shape.rows, shape.size, shape.context)
    return float(cost.drafts(shape.method, shape.rows, shape.size)[-1])
