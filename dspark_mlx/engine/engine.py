"""The engine: draft, schedule, verify, commit, for all active requests at once.

``Engine.step`` is the cycle of the paper's Figure 1, one call a stage. It runs
on one thread (MLX streams belong to threads), which ``worker.EngineThread``
provides for those who are on another. Requests wait and are prefilled in
``intake``; the rows being decoded are the ``batch``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..draft import Draft, Proposer
from ..errors import UsageError
from ..events import Event
from ..model.target import Target
from ..model.verify import RowSpec, verify
from ..request import Request
from ..schedule.cost import CostModel
from ..schedule.load import LoadMonitor
from ..schedule.policy import Outcome, Policy, RowView
from .batch import Batch
from .clock import Overlap, RoundClock
from .in_flight import Flight
from .prefill import Intake
from .report import Reporter
from .sequence import Reply

CLEAR_EVERY = 256  # rounds between returns of unused buffers to the system


class Engine:
    """Serves requests with one target, its proposers and a scheduling policy.

    ``default_method`` answers requests for ``auto``; ``reason`` says why it was
    chosen. At most ``max_rows`` requests are decoded at a time; ``kv_limit``
    bounds the bytes of KV they may reserve together. With ``reuse`` the caches
    of finished replies serve later prompts that begin alike. ``thinking`` is the
    mode the drafter was trained in, the default for chats. ``monitor`` keeps
    watch over the device's load (None: only what rounds show).
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Any,
        proposers: Sequence[Proposer],
        policy: Policy,
        *,
        default_method: str = "none",
        reason: str = "",
        max_rows: int = 8,
        prefill_chunk: int = 512,
        context_limit: int = 0,
        kv_limit: int = 4 << 30,
        reuse: bool = True,
        thinking: bool | None = None,
        monitor: LoadMonitor | None = None,
    ) -> None:
        if max_rows < 1 or prefill_chunk < 1:  # with none of either no request would ever end
            raise UsageError("max rows and the prefill step size must be 1 or more")
        self.target = target
        self.tokenizer = tokenizer
        self.policy = policy
        self.cost: CostModel | None = None  # what rounds cost here, where it was measured
        self.max_rows = max_rows if target.batches else 1
        self.batch = Batch(target, proposers)
        self.intake = Intake(
            target,
            tokenizer,
            self.batch.proposers,
            default_method=default_method,
            reason=reason,
            context_limit=context_limit or target.context_limit,
            kv_limit=kv_limit,
            prefill_chunk=prefill_chunk,
            reuse=reuse,
            thinking=thinking,
        )
        self._monitor = monitor or LoadMonitor()
        self._reporter = Reporter(tokenizer, target.weight_bytes)
        self._events: list[Event] = []
        self._logits: dict[str, mx.array] = {}
        self._ahead: Flight | None = None  # a plain round begun before the last was read
        self._overlap = Overlap()
        self._plain_rounds = 0  # how many more the policy has promised

    # -- requests come and go ---------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. Raises DsparkError when it can never be served."""
        if self.knows(request.id):
            raise UsageError(f"a request with the id {request.id!r} is already active")
        self._events += self.intake.submit(request)

    def knows(self, request_id: str) -> bool:
        """Whether a request of this id is queued or being served."""
        return any(reply.id == request_id for reply in self._everyone())

    def cancel(self, request_id: str) -> bool:
        """Have a request leave at the next step; False when it is not active."""
        for reply in self._everyone():
            if reply.id == request_id:
                reply.cancelled = True
                return True
        return False

    @property
    def active(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._everyone())

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV held: rows being decoded or prefilled, and kept prefixes."""
        return self.batch.nbytes + self.intake.nbytes

    def logits_of(self, request_id: str) -> mx.array | None:
        """The target's logits ``(W, V)`` of the request's last round; None before it."""
        return self._logits.get(request_id)

    # -- one step -----------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Admit, prefill one chunk, then one round for all decoding rows; returns the events."""
        with self.target.turns:
            self._logits.clear()
            self._leave()
            self.intake.admit(self.batch.replies, self.max_rows)
            if self._ahead is None:  # else that round comes first: a row that joins would undo it
                self._prefill()
            if self.batch.replies:
                self._round()
                self._leave()
        events, self._events = self._events, []
        return events

    def _prefill(self) -> None:
        done = self.intake.prefill(others_decode=bool(self.batch.replies))
        if done is None:
            return
        event, ready = done
        self._events.append(event)
        if ready is not None:
            self._plain_rounds = 0
            self.batch.join(*ready)

    def _round(self) -> None:
        """One round of every row: launch it, land it."""
        clock = RoundClock()
        flight = self._ahead or self._launch(clock)
        self._ahead = self._launch_ahead(flight, clock)
        outcome = self._land(flight, clock)
        self.policy.observe(outcome)
        if self._reporter.steps % CLEAR_EVERY == 0:
            mx.clear_cache()

    def _launch(self, clock: RoundClock) -> Flight:
        """Draft, schedule, verify: one graph unless the policy looks in between.

        Parts of it are begun on as they are built, so that the device need not wait for all.
        """
        foreseen = self.batch.foresee()
        views = tuple(map(self._view, self.batch.replies, foreseen))
        plan = self.policy.plan(views)
        self._plain_rounds = plan.plain_ahead if not any(plan.widths) else 0
        draft = self.batch.draft(plan.widths)
        confidence = None
        if draft is not None:
            if plan.look:
                confidence = self._look(draft, clock)
            else:
                _begin(clock, draft.tokens, draft.confidence)
        counts = draft.counts if draft else (0,) * len(views)
        schedule = self.policy.schedule(views, counts, confidence)
        with clock.model():
            width, begin = max(schedule.lengths), functools.partial(_begin, clock)
            logits, features = self.batch.forward(draft, width, begin)
        specs = [
            self._spec(reply, draft.q[r] if draft else None, schedule.lengths[r])
            for r, reply in enumerate(self.batch.replies)
        ]
        verdict = verify(draft.tokens if draft else None, logits, specs)
        return Flight(views, draft, schedule, verdict, features)

    def _launch_ahead(self, flight: Flight, clock: RoundClock) -> Flight | None:
        """Begin the next plain round before the host has read this one.

        The device then never waits for the host, as in plain generation. Only
        while the policy has promised plain rounds, no row can end before and
        none is about to join; and not where it was measured to save nothing, as
        on a processor that the host and the device share.
        """
        replies = self.batch.replies
        cost = self.cost
        if (
            self._plain_rounds < 1
            or self.intake.joining
            or (cost is not None and cost.profiled and not cost.overlap)
            or any(reply.remaining < 2 or reply.processors or reply.sampler for reply in replies)
        ):
            return None
        self._plain_rounds -= 1
        views = tuple(
            dataclasses.replace(view, context=view.context + 1, remaining=view.remaining - 1)
            for view in flight.views
        )
        _begin(clock, flight.arrays)
        with clock.model():
            logits, features = self.batch.forward_tokens(flight.verdict.token[:, None])
        verdict = verify(None, logits, [self._spec(reply, None, 0, 1) for reply in replies])
        ahead = Flight(views, None, flight.schedule, verdict, features, early=True)
        _begin(clock, ahead.arrays)
        return ahead

    def _look(self, draft: Draft, clock: RoundClock) -> list[list[float]]:
        """Read the confidences before verification: costs a device sync of its own."""
        with clock.sync("draft"):
            mx.eval(draft.tokens, draft.confidence)
        return draft.confidence_rows()

    def _land(self, flight: Flight, clock: RoundClock) -> Outcome:
        """Wait for a round, add what stands to the replies, roll every cache back to it."""
        draft, schedule, views = flight.draft, flight.schedule, flight.views
        begins_next = self._ahead is not None
        waiting = [*flight.arrays, *self.batch.absorb(flight.features)]
        if self._ahead is None:
            waiting += self.batch.arrays
        with clock.sync("verify"):
            mx.eval(waiting)
        drafted = draft.token_rows() if draft else [[] for _ in views]
        confidence = draft.confidence_rows() if draft else [[] for _ in views]
        accepted: list[int] = flight.verdict.accepted.tolist()
        own: list[int] = flight.verdict.token.tolist()
        steps, context = [], []
        for r, reply in enumerate(self.batch.replies):
            self._logits[reply.id] = flight.verdict.logits[r]
            anchor, position = reply.anchor, len(reply.tokens)
            tokens, stood = reply.commit(
                drafted[r], accepted[r], own[r], confidence[r], schedule.lengths[r]
            )
            context.append([anchor, *(t.id for t in tokens[:-1])])
            steps.append(
                self._reporter.row(
                    reply,
                    position,
                    drafted[r],
                    confidence[r],
                    r,
                    schedule,
                    tokens,
                    stood,
                    views[r],
                )
            )
        self.batch.settle(
            context, schedule.lengths, accepted, ahead=0 if self._ahead is None else 1
        )
        clock.stop()
        seconds = self._overlap.seconds(
            clock.total, was_begun=flight.early, begins_next=begins_next
        )
        if flight.wider:
            seconds = 0.0
        self._monitor.round(schedule.predicted_seconds, seconds)
        load = self._monitor.load(len(self.batch), len(self.intake.waiting()))
        self._events.append(
            self._reporter.step(steps, self.policy.name, schedule, clock, load, self.kv_bytes)
        )
        return Outcome(
            rows=views,
            drafted=tuple(map(len, drafted)),
            scheduled=schedule.lengths,
            accepted=tuple(accepted),
            committed=tuple(len(step.tokens) for step in steps),
            confidence=tuple(map(tuple, confidence)),
            draft_seconds=clock.draft,
            verify_seconds=clock.verify,
            round_seconds=seconds,
            overlapped=flight.early or begins_next,
        )

    # -- leaving --------------------------------------------------------------------------

    def _leave(self) -> None:
        """Let cancelled and ended replies go; keep their caches for what may follow them."""
        for reply in [r for r in self.intake.waiting() if r.cancelled]:
            self.intake.remove(reply)
            self._events.append(reply.finished())
        gone = [r for r, reply in enumerate(self.batch.replies) if reply.ended or reply.cancelled]
        if not gone:
            return
        self._plain_rounds = 0
        if self._ahead is not None:  # it goes on for those that stay
            stay = [r for r in range(len(self.batch)) if r not in gone]
            self._ahead = self._ahead.keep(stay) if stay else None
        for r in gone:
            self.intake.keep(self.batch.state_of(r))
            self._events.append(self.batch.replies[r].finished())
        self.batch.drop(gone)

    def abandon(self, message: str, hint: str = "") -> list[Event]:
        """After a failure inside a step: end every request, forget all state.

        Returns the closing events; the engine can be used again.
        """
        ended = self._everyone()
        for reply in ended:
            reply.fail(message, hint)
        self._ahead = None
        self.batch.clear()
        self.intake.queue.clear()
        self.intake.joining.clear()
        self.intake.prefixes.clear()
        self._logits.clear()
        events, self._events = self._events, []
        return events + [reply.finished() for reply in ended]

    # -- small questions --------------------------------------------------------------------

    def _everyone(self) -> list[Reply]:
        return [*self.intake.waiting(), *self.batch.replies]

    def _view(self, reply: Reply, foreseen: tuple[float, ...] | None) -> RowView:
        proposer = self.batch.proposers.get(reply.method)
        block = proposer.block if proposer else 0
        return RowView(
            request_id=reply.id,
            method=reply.method,
            block=block if foreseen is None else len(foreseen),
            remaining=reply.remaining,
            context=reply.context,
            pathwise=reply.pathwise,
            calibrated=proposer.calibrated if proposer and foreseen is None else False,
            cuts=reply.request.cuts,
            foreseen=foreseen,
        )

    def _spec(self, reply: Reply, q: mx.array | None, length: int, ahead: int = 0) -> RowSpec:
        request = reply.request
        history: Sequence[int] = ()
        if request.logits_processors:
            history = reply.tokens
        elif reply.processors:  # ours look back no further than this
            history = reply.tokens[-request.sampling.penalty_context :]
        return RowSpec(
            params=request.sampling,
            position=len(reply.tokens) + ahead,
            length=length,
            q=q,
            processors=reply.processors,
            history=history,
            sampler=reply.sampler,
        )


def _begin(clock: RoundClock, *arrays: Any) -> None:
    """Have the device begin on ``arrays`` while the host goes on building what follows."""
    with clock.handover():
        mx.async_eval(*arrays)
