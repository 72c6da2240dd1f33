"""How a policy responds to load: one side decodes while another program comes and goes.

Phases off, on, off of as many rounds each, which all begin with the same prompts: a
length depends on the text too. Per round what was scheduled, predicted and measured.
The text is compared with what was written without load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, pairwise
from statistics import mean, median
from typing import Any

from ..events import StepDone
from ..request import Request
from . import picture
from .load import CompetingLoad
from .sides import EngineSide
from .tables import number, table

PHASES = ("off", "on", "off")
WINDOW = 5  # rounds a length is averaged over when its move is looked for
SETTLE = 15  # rounds in which it must have moved
MOVED = 0.25  # tokens; a smaller difference between phases is none
BACK = 0.75  # tokens; so near to what it was before the load, a length has recovered


@dataclass(frozen=True, slots=True)
class Point:
    """One round of one row."""

    phase: int
    length: float
    round_seconds: float
    tps: float
    predicted_seconds: float | None
    predicted_tps: float | None
    slowdown: float


@dataclass(frozen=True, slots=True)
class Response:
    """``moved[p]``: rounds after phase p began until its length had moved, None if it need not.

    ``unchanged``: every text was what it is without load.
    """

    side: str
    load: str
    points: tuple[Point, ...]
    unchanged: bool
    replies: int

    def phase(self, p: int) -> list[Point]:
        return [point for point in self.points if point.phase == p]

    @property
    def moved(self) -> tuple[int | None, ...]:
        lengths = [[point.length for point in self.phase(p)] for p in range(len(PHASES))]
        return tuple(rounds_to_move(before, after) for before, after in pairwise(lengths))

    @property
    def left(self) -> float:
        """How much longer (below 0: shorter) drafts are verified than before the load, settled."""
        first, last = ([p.length for p in self.phase(n)] for n in (0, len(PHASES) - 1))
        return mean(_settled(last)) - mean(_settled(first))

    @property
    def recovered(self) -> bool:
        return abs(self.left) <= BACK

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "moved": self.moved, "left": self.left}


def rounds_to_move(before: Sequence[float], after: Sequence[float]) -> int | None:
    """Rounds of ``after`` until what it differs by from ``before`` is half of what it settles at.

    Both began with the same text, so rounds of the same number are compared, as running
    means. None when the two settle at the same length, so that nothing had to move.
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


def respond(
    side: EngineSide,
    prompts: Sequence[Sequence[int]],
    load: CompetingLoad,
    *,
    rounds: int = 40,
    max_tokens: int = 128,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Response:
    """In every phase, decode ``prompts`` one after another until it has its rounds."""
    points: list[Point] = []
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
                side.engine.submit(Request(name, tokens=tuple(prompt), max_tokens=max_tokens))
                while side.engine.active and len(points) < rounds * (phase + 1):
                    progress(len(points), rounds * len(PHASES), f"{side.name}, load {state}")
                    for event in side.engine.step():
                        if isinstance(event, StepDone):
                            points.append(_point(phase, event))
                            written += [t.id for t in event.rows[0].tokens]
                side.engine.cancel(name)
                side.engine.step()
                texts.setdefault(i, []).append(tuple(written))
    for i in texts:  # what is written when nobody else is there
        texts[i].append(side.run([prompts[i]], max_tokens, 0.0, 0).tokens[0])
    return Response(
        side=side.name,
        load=f"{load.spec.kind}:{load.spec.processes}",
        points=tuple(points),
        unchanged=all(_one_text(found) for found in texts.values()),
        replies=sum(len(found) - 1 for found in texts.values()),
    )


def _point(phase: int, event: StepDone) -> Point:
    return Point(
        phase=phase,
        length=mean(row.scheduled for row in event.rows),
        round_seconds=event.round_seconds,
        tps=event.tps,
        predicted_seconds=event.predicted_seconds,
        predicted_tps=event.predicted_tps,
        slowdown=event.load.slowdown_fast,
    )


def _one_text(texts: Sequence[Sequence[int]]) -> bool:
    """Whether they all begin alike: one may have been cut short by the end of a phase."""
    whole = max(texts, key=len)
    return all(list(text) == list(whole[: len(text)]) for text in texts)


def text(response: Response) -> str:
    rows = []
    for p, word in enumerate(PHASES):
        here = response.phase(p)
        moved = "" if p == 0 else _words(response.moved[p - 1])
        rows.append(
            [
                f"load {word}",
                str(len(here)),
                number(mean(point.length for point in here)),
                number(1e3 * median(point.round_seconds for point in here), 1),
                _predicted(here),
                number(_rate(here)),
                number(median(point.slowdown for point in here)),
                moved,
            ]
        )
    head = ("", "rounds", "verified", "ms", "predicted", "tok/s", "slowdown", "moved after")
    same = "unchanged" if response.unchanged else "CHANGED"
    back = "is back" if response.recovered else "is NOT back"
    return "\n".join(
        [
            f"response of {response.side} to {response.load}",
            table(head, rows),
            f"the length {back} where it was before the load ({response.left:+.2f} tokens)",
            f"output {same} in {response.replies} replies",
        ]
    )


def charts(response: Response) -> list[picture.Chart]:
    n = len(response.points)
    on = [float(i) for i, p in enumerate(response.points) if PHASES[p.phase] == "on"]
    bands = ((min(on), max(on), f"{response.load} on"),) if on else ()

    def series(name: str, values: Sequence[float | None], step: bool = False) -> picture.Series:
        points = tuple((float(i), float("nan") if v is None else v) for i, v in enumerate(values))
        return picture.Series(name, points, step)

    lengths = [p.length for p in response.points]
    smooth = [mean(lengths[max(0, i - WINDOW + 1) : i + 1]) for i in range(n)]
    return [
        picture.Lines(
            f"Tokens verified a round, {response.side}",
            "round",
            "drafted tokens verified",
            (series("scheduled", lengths, True), series(f"mean of {WINDOW}", smooth)),
            bands,
        ),
        picture.Lines(
            "Round time",
            "round",
            "ms",
            (
                series("measured", [1e3 * p.round_seconds for p in response.points]),
                series(
                    "predicted",
                    [
                        None if p.predicted_seconds is None else 1e3 * p.predicted_seconds
                        for p in response.points
                    ],
                ),
            ),
            bands,
        ),
        picture.Lines(
            "Throughput",
            "round",
            "tokens/s",
            (
                series(
                    f"measured, {WINDOW} rounds",
                    [_rate(response.points[max(0, i - WINDOW + 1) : i + 1]) for i in range(n)],
                ),
                series("predicted", [p.predicted_tps for p in response.points]),
            ),
            bands,
        ),
    ]


def _rate(points: Sequence[Point]) -> float:
    """Tokens per second over all of ``points``: a round begun ahead of time takes none itself."""
    seconds = sum(p.round_seconds for p in points)
    return sum(p.tps * p.round_seconds for p in points) / max(1e-9, seconds)


def _predicted(points: Sequence[Point]) -> str:
    known = [p.predicted_seconds for p in points if p.predicted_seconds is not None]
    return number(1e3 * median(known), 1) if known else "–"


def _words(moved: int | None) -> str:
    return "same length" if moved is None else f"{moved} rounds"
