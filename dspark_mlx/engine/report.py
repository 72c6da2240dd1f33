"""Rounds as events: what was drafted, cut, verified and committed, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..events import Load, Memory, RowStep, StepDone, Token
from ..schedule.policy import Schedule
from .clock import RoundClock
from .in_flight import InFlightStep, RowResult
from .sequence import SequenceState


class Reporter:
    """Makes the events of one engine and numbers its steps."""

    def __init__(self, tokenizer: Any, weight_bytes: int) -> None:
        self.steps = 0
        self._tokenizer = tokenizer
        self._weights = weight_bytes
        self._texts: dict[int, str] = {}

    def row(
        self,
        seq: SequenceState,
        step: InFlightStep,
        r: int,
        result: RowResult,
        tokens: Sequence[Token],
        accepted: int,
    ) -> RowStep:
        """Row ``r`` of ``step``: ``tokens`` were committed, ``accepted`` of them drafted."""
        view, schedule = step.views[r], step.schedule
        return RowStep(
            request_id=seq.id,
            position=len(seq.tokens) - len(tokens),
            method=seq.method,
            drafted=tuple(result.drafted),
            draft_texts=tuple(self._text(id) for id in result.drafted),
            confidence=tuple(result.confidence),
            survival=result.survival,
            scheduled=result.scheduled,
            accepted=accepted,
            tokens=tuple(tokens),
            reason=schedule.reasons[r],
            curve=schedule.curves[r] if schedule.curves else (),
            calibrated=view.calibrated,
            copied=view.known_confidence is not None and bool(result.drafted),
        )

    def step(
        self,
        rows: Sequence[RowStep],
        policy: str,
        schedule: Schedule,
        clock: RoundClock,
        load: Load,
        kv_bytes: int,
    ) -> StepDone:
        self.steps += 1
        committed = sum(len(row.tokens) for row in rows)
        return StepDone(
            step=self.steps,
            time=time.time(),
            rows=tuple(rows),
            policy=policy,
            round_seconds=clock.total,
            draft_seconds=clock.draft,
            verify_seconds=clock.verify,
            host_seconds=clock.host,
            predicted_seconds=schedule.predicted_seconds,
            predicted_tps=schedule.predicted_tps,
            tps=committed / clock.total,
            syncs=clock.syncs,
            load=load,
            memory=Memory(self._weights, kv_bytes, mx.get_peak_memory()),
            rule=schedule.policy,
        )

    def _text(self, id: int) -> str:
        text = self._texts.get(id)
        if text is None:
            text = self._texts[id] = str(self._tokenizer.decode([id]))
        return text
