"""What a round costs: measured seconds of target steps and drafts, kept as measured.

Rows are padded to the widest, so the price of a target step is that of (rows,
widest row, context). Between measured points it is interpolated, beyond them
extrapolated by the last slope and never flat: an assumed flat cost makes every
token look free. It may fall, where a wider step is the faster one (a multiple of
a kernel's tile). A model without measurements says so (``known`` is False) and
can learn from the rounds it sees. Everything in seconds; a *width* counts the
anchor, so verifying n drafted tokens is a step of width n + 1.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from ..errors import UsageError
from ..events import CostTable
from .policy import Floats

CONTEXT_STEP = 256  # contexts this close share one curve: KV buffers grow by as much
FLOOR = 0.02  # least growth per token beyond what was measured, as a share of the last cost
MOST_OVERLAP = 0.5  # of a plain round at most: overlapping rounds save waits, not work
LONGEST = 86_400.0  # seconds of a round that can be believed
SAMPLES = 9  # rounds a learned point remembers; the median of so many shrugs off two hiccups


@dataclass(frozen=True, slots=True)
class CostKey:
    """What a measurement holds for; it is made again when any of these changes."""

    model: str
    quantisation: str
    device: str
    mlx: str


Points = dict[int, float]  # width or block -> seconds


def _line(points: Points, x: float) -> float:
    """``points`` read at ``x``, which may lie between or outside of them."""
    xs = sorted(points)
    ys = [points[key] for key in xs]
    if x <= xs[0]:
        return ys[0]
    if x > xs[-1]:
        if len(xs) == 1:
            return ys[0] * x / max(xs[0], 1)  # one point says nothing of the slope: proportional
        mean = (ys[-1] - ys[0]) / (xs[-1] - xs[0])
        last = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
        return max(ys) + (x - xs[-1]) * max(last, mean, FLOOR * ys[-1])
    i = bisect_left(xs, x)
    t = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i - 1] + t * (ys[i] - ys[i - 1])


def _surface(table: Mapping[int, Points], rows: int, x: float) -> float:
    """A table of ``{rows: {width: seconds}}`` at any rows and width.

    Outside the measured rows a step is priced as the nearest measured one with
    the same number of tokens in all, which is what its matmuls see.
    """
    if rows in table:
        return _line(table[rows], x)
    known = sorted(table)
    if rows < known[0]:
        return _line(table[known[0]], max(1.0, x * rows / known[0]))
    if rows > known[-1]:
        return _line(table[known[-1]], x * rows / known[-1])
    i = bisect_left(known, rows)
    low, high = known[i - 1], known[i]
    t = (rows - low) / (high - low)
    return (1.0 - t) * _line(table[low], x) + t * _line(table[high], x)


class CostModel:
    """Measured prices. Empty when made without ``step``; then it learns from rounds.

    ``step[context][rows][width]`` and ``draft[method][rows][block]`` are
    seconds. ``overhead`` is what a round costs besides (sampling, commit,
    rollback), ``sync_overhead`` what reading the confidences before verification adds
    (a device sync, and a draft and a verification that are separate graphs),
    ``overlap`` what a plain round saves where it is dispatched before the last was
    read (0: it is not). A method without a draft table drafts for nothing (prompt lookup).
    """

    def __init__(
        self,
        step: Mapping[int, Mapping[int, Points]] | None = None,
        draft: Mapping[str, Mapping[int, Points]] | None = None,
        *,
        overhead: float = 0.0,
        sync_overhead: float = 0.0,
        overlap: float = 0.0,
        key: CostKey | None = None,
    ) -> None:
        self.step = {c: {r: dict(p) for r, p in t.items() if p} for c, t in (step or {}).items()}
        self.step = {c: t for c, t in self.step.items() if t}
        self.draft = {m: {r: dict(p) for r, p in t.items() if p} for m, t in (draft or {}).items()}
        self.overhead, self.sync_overhead = overhead, sync_overhead
        self.overlap, self.key = overlap, key
        self.profiled = bool(self.step)
        self._samples: dict[tuple[int, int], list[float]] = {}
        self._curves: dict[tuple[object, ...], Floats] = {}
        values = [*_leaves(self.step), *_leaves(self.draft), overhead, sync_overhead, overlap]
        if not all(0.0 <= v <= LONGEST for v in values):
            raise UsageError("a cost table must hold seconds, none below 0 or above a day")
        if any(v == 0.0 for v in _leaves(self.step)):
            raise UsageError("a target step cannot take no time")
        tables = [*self.step.values(), *self.draft.values()]
        if any(r < 1 or min(points) < 1 for table in tables for r, points in table.items()):
            raise UsageError("a cost table counts rows and widths from 1")

    @property
    def known(self) -> bool:
        """Whether anything was measured yet."""
        return bool(self.step)

    def steps(self, rows: int, context: int, drafted: int) -> Floats:
        """Seconds of a target step that verifies 0..``drafted`` tokens: ``(drafted + 1,)``."""
        bucket = context // CONTEXT_STEP if len(self.step) > 1 else 0
        key = ("step", rows, bucket, drafted)
        curve = self._curves.get(key)
        if curve is None:
            at = self._at_context((bucket + 0.5) * CONTEXT_STEP if bucket else 0.0)
            curve = np.array([at(rows, n + 1) for n in range(drafted + 1)])
            if not self.profiled:  # a few rounds: noise must not make more work look cheaper
                curve = np.maximum.accumulate(curve)
            self._curves[key] = curve
        return curve

    def _at_context(self, context: float) -> Any:
        known = sorted(self.step)
        if not known:
            raise UsageError("this cost model has no measurements yet")
        if len(known) == 1:
            return lambda rows, x: _surface(self.step[known[0]], rows, x)
        i = min(max(bisect_left(known, context), 1), len(known) - 1)
        low, high = known[i - 1], known[i]
        t = max(0.0, (context - low) / (high - low))

        def at(rows: int, x: float) -> float:
            a, b = _surface(self.step[low], rows, x), _surface(self.step[high], rows, x)
            return a + t * max(0.0, b - a)

        return at

    def drafts(self, method: str, rows: int, block: int) -> Floats:
        """Seconds to draft 0..``block`` tokens for ``rows`` rows: ``(block + 1,)``."""
        key = ("draft", method, rows, block)
        curve = self._curves.get(key)
        if curve is None:
            table = self.draft.get(method)
            curve = np.zeros(block + 1)
            if table and rows:
                curve[1:] = [_surface(table, rows, n) for n in range(1, block + 1)]
            curve = self._curves[key] = np.maximum.accumulate(curve)
        return curve

    def seconds(self, rows: int, widest: int, context: int = 0) -> float:
        """Price of one target step of ``rows`` rows, the widest of ``widest`` tokens."""
        return float(self.steps(rows, context, widest - 1)[widest - 1])

    def plain(self, rows: int, context: int = 0) -> float:
        """Seconds of a plain round; where they overlap, of one of several."""
        whole = self.seconds(rows, 1, context) + self.overhead
        return whole - min(self.overlap, MOST_OVERLAP * whole)

    # -- learning without a profile ---------------------------------------------------

    def learn(self, rows: int, width: int, seconds: float) -> None:
        """One round's time, for a model that was not profiled (a profile stays as measured)."""
        if self.profiled or not seconds > 0.0:
            return
        samples = self._samples.setdefault((rows, width), [])
        samples.append(seconds)
        del samples[:-SAMPLES]
        self.step.setdefault(0, {}).setdefault(rows, {})[width] = median(samples)
        self._curves.clear()

    def samples(self, rows: int, width: int) -> int:
        """How many rounds of this shape have been learned from."""
        return len(self._samples.get((rows, width), ()))

    # -- words ------------------------------------------------------------------------

    def to_json(self) -> str:
        return json.dumps(
            {
                "key": asdict(self.key) if self.key else None,
                "overhead": self.overhead,
                "sync_overhead": self.sync_overhead,
                "overlap": self.overlap,
                "step": self.step,
                "draft": self.draft,
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """Raises UsageError for text that is no cost table."""
        try:
            data = json.loads(text)
            return cls(
                {int(c): _table(t) for c, t in data["step"].items()},
                {str(m): _table(t) for m, t in data["draft"].items()},
                overhead=float(data["overhead"]),
                # Tables of older versions call it "look", and may lack the overlap.
                sync_overhead=float(
                    data["sync_overhead"] if "sync_overhead" in data else data["look"]
                ),
                overlap=float(data.get("overlap", 0.0)),
                key=CostKey(**data["key"]) if data.get("key") else None,
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(
                f"not a cost table: {error!r}", "measure again with dspark profile"
            ) from error

    def to_event(self, rows: Sequence[int], block: int, method: str, context: int = 0) -> CostTable:
        """The table as the event stream carries it."""
        return CostTable(
            rows=tuple(rows),
            widths=tuple(range(1, block + 2)),
            step_seconds=tuple(tuple(self.steps(r, context, block).tolist()) for r in rows),
            draft_seconds=tuple(tuple(self.drafts(method, r, block)[1:].tolist()) for r in rows),
            draft_widths=tuple(range(1, block + 1)),
            overhead_seconds=self.overhead,
            context=context,
        )


def _table(data: Mapping[str, Mapping[str, float]]) -> dict[int, Points]:
    return {int(r): {int(x): float(y) for x, y in points.items()} for r, points in data.items()}


def _leaves(tree: Mapping[Any, Mapping[int, Points]]) -> Iterable[float]:
    return (v for table in tree.values() for points in table.values() for v in points.values())
