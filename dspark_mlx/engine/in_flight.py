"""One round on its way through the device, and what each row got of it once it was read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import mlx.core as mx

from ..draft import Draft
from ..model.verify import Verdict
from ..schedule.policy import RowView, Schedule


@dataclass(frozen=True, slots=True)
class RowResult:
    """One row's round: the first ``scheduled`` of ``drafted`` were verified, ``accepted`` kept.

    ``confidence`` has one entry per drafted token; ``token`` is the target's own,
    behind the accepted ones.
    """

    drafted: list[int]
    confidence: list[float]
    scheduled: int
    accepted: int
    token: int

    @property
    def survival(self) -> tuple[float, ...]:
        """a_k = c_1 · … · c_k, the chance that draft token k and all before it are accepted."""
        return tuple(accumulate(self.confidence, mul))


@dataclass(frozen=True)
class InFlightStep:
    """A dispatched round; nothing of it has been read yet.

    ``pipelined``: it was dispatched before the round before it was read.
    ``untimed``: rows have left since, so its time is not the price of those that stayed.
    """

    views: tuple[RowView, ...]
    draft: Draft | None
    schedule: Schedule
    verdict: Verdict
    features: mx.array | None
    pipelined: bool = False
    untimed: bool = False

    @property
    def plain(self) -> bool:
        return self.draft is None

    @property
    def arrays(self) -> list[mx.array]:
        """What the host or the proposers read of it."""
        wanted = [self.verdict.accepted, self.verdict.token]
        if self.draft is not None:
            wanted += [self.draft.tokens, self.draft.confidence]
        return wanted if self.features is None else [*wanted, self.features]

    def read(self) -> list[RowResult]:
        """Each row's result. The arrays must have been evaluated, else this waits for them."""
        none: list[list[int]] = [[] for _ in self.views]
        drafted = self.draft.token_rows() if self.draft else none
        confidence = self.draft.confidence_rows() if self.draft else [[] for _ in self.views]
        accepted: Any = self.verdict.accepted.tolist()
        token: Any = self.verdict.token.tolist()
        return [
            RowResult(*row)
            for row in zip(drafted, confidence, self.schedule.lengths, accepted, token, strict=True)
        ]

    def filter(self, rows: Sequence[int]) -> InFlightStep:
        """The same plain round for these rows alone, in this order."""
        assert self.plain
        index = mx.array(list(rows), dtype=mx.int32)
        verdict, made = self.verdict, self.schedule
        return dataclasses.replace(
            self,
            views=tuple(self.views[r] for r in rows),
            schedule=dataclasses.replace(
                made,
                lengths=tuple(made.lengths[r] for r in rows),
                reasons=tuple(made.reasons[r] for r in rows),
                curves=tuple(made.curves[r] for r in rows) if made.curves else (),
            ),
            verdict=Verdict(verdict.accepted[index], verdict.token[index], verdict.logits[index]),
            features=None if self.features is None else self.features[index],
            untimed=True,
        )
