"""How a policy responds to load: one system decodes while another program comes and goes.

Three phases, load off, on and off, have as many rounds each and begin with the same prompts,
because a length depends on the text too. For every round: what was scheduled, predicted and
measured. The text is compared with what is written without load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, pairwise
from statistics import mean, median
from typing import Any

from ..charts import Chart, LineChart, Series
from ..events import StepDone
from ..request import Request
from .competing_load import CompetingLoad
from .systems import EngineSystem
from .text_tables import number, text_table

PHASES = ("off", "on", "off")
WINDOW = 5  # rounds a length is averaged over: single lengths jump by tokens from round to round
# Goals. On two CPU cores the length moved within 13 and 15 rounds when two busy processes began
# and ended, and came back to 0.52 tokens from where it was.
SETTLE = 15  # rounds in which a length must have moved
MOVED = 0.25  # tokens; a smaller difference between phases counts as none
BACK = 0.75  # tokens; a length so near to the one before the load has recovered


@dataclass(frozen=True, slots=True)
class RoundPoint:
    """One round. ``length`` is the mean of the scheduled lengths of its rows, in tokens."""

    phase: int
    length: float
    round_seconds: float
    tps: float
    predicted_seconds: float | None
    predicted_tps: float | None
    slowdown: float


@dataclass(frozen=True, slots=True)
class LoadResponse:
    """``unchanged``: every text is the one written without load."""

    system: str
    load: str
    points: tuple[RoundPoint, ...]
    unchanged: bool
    replies: int

    def phase(self, p: int) -> list[RoundPoint]:
        return [point for point in self.points if point.phase == p]

    @property
    def moved(self) -> tuple[int | None, ...]:
        """Rounds until the length had moved, for each phase but the first; None: it need not."""
        lengths = [[point.length for point in self.phase(p)] for p in range(len(PHASES))]
        return tuple(rounds_to_move(before, after) for before, after in pairwise(lengths))

    @property
    def left(self) -> float:
        """Mean settled length in the last phase less that in the first, in tokens."""
        first, last = ([p.length for p in self.phase(n)] for n in (0, len(PHASES) - 1))
        return mean(_settled(last)) - mean(_settled(first))

    @property
    def recovered(self) -> bool:
        return abs(self.left) <= BACK

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "moved": self.moved, "left": self.left}


def rounds_to_move(before: Sequence[float], after: Sequence[float]) -> int | None:
    """Rounds until ``after`` differs from ``before`` by half of what it settles at.

    Both began with the same text, so rounds of the same number are compared, as running
    means. None where the two settle at the same length, so that nothing had to move.
    """
    if len(before) < WINDOW or len(after) < WINDOW:
        return None
    change = [now - then for then, now in zip(before, after, strict=False)]
    goal = mean(_settled(change))
    if abs(goal) < MOVED:
        return None
    for n in range(len(change) - WINDOW + 1):
        if (mean(change[n : n + WINDOW]) - goal / 2) * goal >= 0:
            return n
    return len(change)


def _settled(lengths: Sequence[float]) -> Sequence[float]:
    return lengths[SETTLE:] if len(lengths) > 2 * SETTLE else lengths[len(lengths) // 2 :]


def follow_load(
    system: EngineSystem,
    prompts: Sequence[Sequence[int]],
    load: CompetingLoad,
    *,
    rounds: int = 40,
    max_tokens: int = 128,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> LoadResponse:
    """In every phase, decode ``prompts`` one after another until it has its ``rounds``."""
    points: list[RoundPoint] = []
    texts: dict[int, list[tuple[int, ...]]] = {}
    with load:
        for phase, state in enumerate(PHASES):
            if state == "on":
                load.on()
            else:
                load.off()
            supply = cycle(enumerate(prompts))
            while len(points) < rounds * (phase + 1):
                i, prompt = next(supply)
                written: list[int] = []
                name = f"load-{len(points)}"
                system.engine.submit(Request(name, tokens=tuple(prompt), max_tokens=max_tokens))
                while system.engine.active and len(points) < rounds * (phase + 1):
                    progress(len(points), rounds * len(PHASES), f"{system.name}, load {state}")
                    for event in system.engine.step():
                        if isinstance(event, StepDone):
                            points.append(_point(phase, event))
                            written += [t.id for t in event.rows[0].tokens]
                system.engine.cancel(name)
                system.engine.step()
                texts.setdefault(i, []).append(tuple(written))
    replies = sum(map(len, texts.values()))
    for i, found in texts.items():  # now without load
        found.append(system.run([prompts[i]], max_tokens, 0.0, 0).tokens[0])
    return LoadResponse(
        system=system.name,
        load=f"{load.spec.kind}:{load.spec.processes}",
        points=tuple(points),
        unchanged=all(_one_text(found) for found in texts.values()),
        replies=replies,
    )


def _point(phase: int, event: StepDone) -> RoundPoint:
    return RoundPoint(
        phase=phase,
        length=mean(row.scheduled for row in event.rows),
        round_seconds=event.round_seconds,
        tps=event.tps,
        predicted_seconds=event.predicted_seconds,
        predicted_tps=event.predicted_tps,
        slowdown=event.load.slowdown_fast,
    )


def _one_text(texts: Sequence[Sequence[int]]) -> bool:
    """Whether all begin alike: one may have been cut short by the end of a phase."""
    whole = max(texts, key=len)
    return all(list(text) == list(whole[: len(text)]) for text in texts)


def text(response: LoadResponse) -> str:
    rows = []
    for p, (word, moved) in enumerate(zip(PHASES, (0, *response.moved), strict=True)):
        here = response.phase(p)
        predicted = [s.predicted_seconds for s in here if s.predicted_seconds is not None]
        rows.append(
            [
                f"load {word}",
                str(len(here)),
                number(mean(point.length for point in here)),
                number(1e3 * median(point.round_seconds for point in here), 1),
                number(1e3 * median(predicted) if predicted else None, 1),
                number(_rate(here)),
                number(median(point.slowdown for point in here)),
                "" if p == 0 else "same length" if moved is None else f"{moved} rounds",
            ]
        )
    head = ("", "rounds", "verified", "ms", "predicted", "tok/s", "slowdown", "moved after")
    same = "unchanged" if response.unchanged else "CHANGED"
    back = "is back" if response.recovered else "is NOT back"
    return "\n".join(
        [
            f"response of {response.system} to {response.load}",
            text_table(head, rows),
            f"the length {back} where it was before the load ({response.left:+.2f} tokens)",
            f"output {same} in {response.replies} replies",
        ]
    )


def charts(response: LoadResponse) -> list[Chart]:
    """Lengths, round times and throughput over the rounds, the load as a band."""
    points = response.points
    on = [float(i) for i, p in enumerate(points) if PHASES[p.phase] == "on"]
    bands = ((min(on), max(on), f"{response.load} on"),) if on else ()
    recent = [points[max(0, i - WINDOW + 1) : i + 1] for i in range(len(points))]

    def series(name: str, values: Sequence[float | None], step: bool = False) -> Series:
        gaps = (float("nan") if v is None else v for v in values)
        return Series(name, tuple((float(i), v) for i, v in enumerate(gaps)), step)

    def chart(title: str, unit: str, *lines: Series) -> LineChart:
        return LineChart(title, "round", unit, lines, bands)

    predicted = [p.predicted_seconds for p in points]
    return [
        chart(
            f"Tokens verified a round, {response.system}",
            "drafted tokens verified",
            series("scheduled", [p.length for p in points], step=True),
            series(f"mean of {WINDOW}", [mean(p.length for p in some) for some in recent]),
        ),
        chart(
            "Round time",
            "ms",
            series("measured", [1e3 * p.round_seconds for p in points]),
            series("predicted", [None if s is None else 1e3 * s for s in predicted]),
        ),
        chart(
            "Throughput",
            "tokens/s",
            series(f"measured, {WINDOW} rounds", [_rate(some) for some in recent]),
            series("predicted", [p.predicted_tps for p in points]),
        ),
    ]


def _rate(points: Sequence[RoundPoint]) -> float:
    """Tokens/s over all of ``points``: a round that was pipelined takes little time itself."""
    seconds = sum(p.round_seconds for p in points)
    return sum(p.tps * p.round_seconds for p in points) / max(1e-9, seconds)
