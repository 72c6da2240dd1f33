"""What a scheduling policy is: the questions the engine asks it each round.

Pure: no mlx, no clock, no I/O, so that a policy can be simulated in milliseconds. One
round is ``plan`` (how many tokens to draft, and whether to read the confidences before
verifying), ``schedule`` (how many of the drafted tokens each row verifies) and
``observe`` (what came of it). The engine may run plain rounds without a ``plan`` of
their own, so what a policy remembers moves in ``observe``.

A policy must be *non-anticipating* (paper, appendix A): whether position k is verified
may not depend on the drafted token x_k or anything drawn after it, except for
*schedule-invariant* rows, whose text no decision can change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..request import Cuts

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RowView:
    """What a policy may know of one row before its draft is made.

    ``block``: most tokens the row's proposer can draft now (0: it has none).
    ``remaining``: most tokens the reply may still take (max_tokens, context).
    ``context``: tokens already in the target's cache.
    ``schedule_invariant``: the row's text is the same whatever is verified (greedy
    target, or draft sampling greedy or coupled).
    ``calibrated``: its confidences were calibrated on held-out rounds.
    ``known_confidence``: the confidences of its draft, where they are known before it is
    made (a copy of earlier text, on the host): that draft is ``block`` tokens long and
    costs nothing. Else None.
    """

    request_id: str
    method: str
    block: int
    remaining: int
    context: int
    schedule_invariant: bool
    calibrated: bool = False
    cuts: Cuts = field(default_factory=Cuts)
    known_confidence: tuple[float, ...] | None = None

    @property
    def cap(self) -> int:
        """Most tokens worth verifying: the target adds one of its own to those accepted."""
        most, limit = self.block, self.cuts.draft_length
        if limit is not None and limit < most:
            most = limit
        if self.remaining <= most:
            most = self.remaining - 1
        return most if most > 0 else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Tokens to draft per row (0: decode that row plainly).

    ``needs_confidence``: the policy wants to read the confidences before it schedules.
    """

    widths: tuple[int, ...]
    needs_confidence: bool


@dataclass(frozen=True, slots=True)
class Schedule:
    """Tokens to verify per row, with one line each why, and the curve that led to it.

    ``curves[r][n]`` is the expected tokens/s of all rows when row r, and with it
    the padded batch, is verified to n tokens. ``predicted_seconds`` is the whole
    round. ``policy`` names the rule that decided, where a policy has several.
    """

    lengths: tuple[int, ...]
    reasons: tuple[str, ...]
    curves: tuple[tuple[float, ...], ...] = ()
    predicted_seconds: float | None = None
    predicted_tps: float | None = None
    policy: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round really did; ``confidence`` rows are empty where never computed.

    ``drafted``, ``scheduled`` and ``accepted`` count draft tokens per row;
    ``committed`` counts tokens added to the text. ``draft_seconds`` is 0.0 when
    draft and verification ran as one graph, ``round_seconds`` when nobody can tell
    what this round cost, as the next one was dispatched within it. ``pipelined``: a
    plain round that overlapped with the one before it or behind it.
    """

    rows: tuple[RowView, ...]
    drafted: tuple[int, ...]
    scheduled: tuple[int, ...]
    accepted: tuple[int, ...]
    committed: tuple[int, ...]
    confidence: tuple[tuple[float, ...], ...]
    draft_seconds: float
    verify_seconds: float
    round_seconds: float
    pipelined: bool = False


class Policy(Protocol):
    """``name`` as given to ``--schedule``."""

    name: str

    def plan(self, rows: Sequence[RowView]) -> Plan: ...

    def schedule(
        self,
        rows: Sequence[RowView],
        drafted: Sequence[int],
        confidence: Sequence[Sequence[float]] | None,
    ) -> Schedule:
        """``confidence[r][k]`` is row r's c_k for its drafted tokens, None when not read."""
        ...

    def observe(self, outcome: Outcome) -> None: ...
