"""What one of our engine's runs took, summed up from its events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..errors import ModelError
from ..events import Event, Finished, Prefill, StepDone
from .result import Run
from .shape import Shape, shared


class Gathered:
    """The events of one group's run, summed up."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.steps: list[StepDone] = []
        self._tokens: dict[str, list[int]] = {name: [] for name in ids}
        self._ends: dict[str, Finished] = {}
        self._seconds = self._wall = 0.0
        self._rules: Counter[str] = Counter()
        self._rounds: list[tuple[Shape, float]] = []

    def add(self, events: Sequence[Event], wall: float, seconds: float | None = None) -> None:
        """``wall`` and ``seconds`` (by the chosen clock) are of the whole step.

        Where a chunk of prefill was part of it, the round's share of both is counted.
        """
        seconds = wall if seconds is None else seconds
        prefilled = any(isinstance(event, Prefill) for event in events)
        for event in events:
            if isinstance(event, StepDone):
                self.steps.append(event)
                share = min(1.0, event.round_seconds / wall) if prefilled and wall > 0 else 1.0
                self._seconds += share * seconds
                self._rounds.append((self._shape(event), share * seconds))
                self._wall += share * wall
                self._rules[event.policy] += 1
                for row in event.rows:
                    self._tokens[row.request_id] += [t.id for t in row.tokens]
            elif isinstance(event, Finished):
                if event.reason in ("error", "cancelled"):
                    raise ModelError(f"a reply failed: {event.message or event.reason}", event.hint)
                self._ends[event.request_id] = event

    def _shape(self, step: StepDone) -> Shape:
        drafted = [len(row.drafted) for row in step.rows]
        most = max(drafted, default=0)
        before = self._rounds[-1][0].drafted if self._rounds else 1
        return Shape(
            rows=len(step.rows),
            drafting=sum(bool(row.drafted) and not row.copied for row in step.rows),
            drafted=most,
            scheduled=max((row.scheduled for row in step.rows), default=0),
            looked=step.draft_seconds > 0.0,
            after_draft=not most and before > 0,
        )

    def run(self) -> Run:
        ends = [self._ends[name] for name in self._tokens]
        width = max((len(e.reached) for e in ends), default=0)

        def column(values: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
            return tuple(sum(v[k] for v in values if k < len(v)) for k in range(width))

        return Run(
            tokens=tuple(tuple(t) for t in self._tokens.values()),
            seconds=self._seconds,
            first_token_seconds=tuple(e.first_token_seconds for e in ends),
            row_rounds=sum(e.rounds for e in ends),
            drafted=sum(e.drafted for e in ends),
            scheduled=sum(e.scheduled for e in ends),
            accepted=sum(e.accepted for e in ends),
            reached=column([e.reached for e in ends]),
            survived=column([e.survived for e in ends]),
            wall_seconds=self._wall,
            draft_seconds=sum(s.draft_seconds for s in self.steps),
            verify_seconds=sum(s.verify_seconds for s in self.steps),
            host_seconds=sum(s.host_seconds for s in self.steps),
            rules=tuple(sorted(self._rules.items())),
            rounds=tuple(shared(self._rounds)),
        )
