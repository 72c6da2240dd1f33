"""A round on its way through the device, and what is left of it when a row leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..draft import Draft
from ..model.verify import Verdict
from ..schedule.policy import RowView, Schedule


@dataclass(frozen=True)
class Flight:
    """All a round was asked; nothing of it is read yet.

    ``early``: begun before the last one was read. ``wider``: rows have left since, so
    what it takes is not the price of those that stayed.
    """

    views: tuple[RowView, ...]
    draft: Draft | None
    schedule: Schedule
    verdict: Verdict
    features: mx.array | None
    early: bool = False
    wider: bool = False

    @property
    def arrays(self) -> list[mx.array]:
        """What the host or the proposers will want of it."""
        wanted = [self.verdict.accepted, self.verdict.token]
        if self.draft is not None:
            wanted += [self.draft.tokens, self.draft.confidence]
        return wanted if self.features is None else [*wanted, self.features]

    def keep(self, rows: Sequence[int]) -> Flight:
        """The same plain round for these rows alone, in this order."""
        assert self.draft is None
        index = mx.array(list(rows), dtype=mx.int32)
        verdict, plan = self.verdict, self.schedule
        return dataclasses.replace(
            self,
            views=tuple(self.views[r] for r in rows),
            schedule=dataclasses.replace(
                plan,
                lengths=tuple(plan.lengths[r] for r in rows),
                reasons=tuple(plan.reasons[r] for r in rows),
                curves=tuple(plan.curves[r] for r in rows) if plan.curves else (),
            ),
            verdict=Verdict(verdict.accepted[index], verdict.token[index], verdict.logits[index]),
            features=None if self.features is None else self.features[index],
            wider=True,
        )
