"""The engine: draft, schedule, verify and commit, for all active requests at once.

``Engine.step`` is the cycle of the paper's Figure 1, one call a stage. It runs
on one thread (MLX streams belong to threads), which ``worker.EngineThread``
provides for callers on another. Requests wait and are prefilled by
``prefill.Prefiller``; the rows being decoded are the ``Batch``.
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
from ..schedule.device_load import LoadMonitor
from ..schedule.policy import Outcome, Policy, RowView
from .batch import Batch
from .clock import PipelinedTime, RoundClock
from .in_flight import InFlightStep
from .prefill import Prefiller
from .report import Reporter
from .sequence import SequenceState

CLEAR_EVERY = 256  # rounds between returns of unused buffers to the system, as in mlx-lm
# Of rows that could draft, one plain round is dispatched unasked for every so many that were
# plain before, and never more than so many in a row: drafting that would pay again, or a copy
# that turns up, waits for at most a quarter of the plain rounds so far.
PLAIN_FOR_EACH, MOST_UNASKED = 4, 8


class Engine:
    """Serves requests with one target, its proposers and a scheduling policy.

    ``default_method`` answers requests for ``auto``; ``reason`` says why it was
    chosen. At most ``max_rows`` requests are decoded at a time; ``kv_limit``
    bounds the bytes of KV they may reserve together. With ``reuse`` the caches
    of finished replies serve later prompts that begin alike. ``thinking`` is the
    mode the drafter was trained in, the default for chats. ``monitor`` watches
    the device's load (None: only what rounds show). ``cost`` is what rounds were
    measured to cost here, kept for policies that are made later.

    ``pipelined``: a plain round may be dispatched before the one before it was
    read, so that the device never waits for the host. None does so on a GPU; on a
    CPU, which host and device share, it costs 3-5 % of a round (2-core Linux).
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
        pipelined: bool | None = None,
        cost: CostModel | None = None,
    ) -> None:
        if max_rows < 1 or prefill_chunk < 1:  # with none of either no request would ever end
            raise UsageError("max rows and the prefill step size must be 1 or more")
        self.target = target
        self.tokenizer = tokenizer
        self.policy = policy  # may be replaced between two steps
        self.cost = cost
        self.max_rows = max_rows if target.batches else 1
        self.batch = Batch(target, proposers)
        self.prefiller = Prefiller(
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
        on_gpu = mx.default_device().type == mx.DeviceType.gpu
        self._pipelined = on_gpu if pipelined is None else pipelined
        self._next: InFlightStep | None = None  # dispatched before the last round was read
        self._plain_rounds = 0  # in a row, of the same rows
        self._unasked = 0  # more of them that may follow without asking the policy
        self._pipelined_time = PipelinedTime()

    # -- requests come and go ---------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. Raises DsparkError when it can never be served."""
        if self.knows(request.id):
            raise UsageError(f"a request with the id {request.id!r} is already active")
        self._events += self.prefiller.submit(request)

    def knows(self, request_id: str) -> bool:
        """Whether a request of this id is queued or being served."""
        return any(seq.id == request_id for seq in self._everyone())

    def cancel(self, request_id: str) -> bool:
        """Have a request leave at the next step; False when it is not active."""
        for seq in self._everyone():
            if seq.id == request_id:
                seq.cancelled = True
                return True
        return False

    @property
    def active(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._everyone())

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV held: rows being decoded or prefilled, and kept prefixes."""
        return self.batch.nbytes + self.prefiller.nbytes

    def logits_of(self, request_id: str) -> mx.array | None:
        """The target's logits ``(W, V)`` of the request's last round; None before it."""
        return self._logits.get(request_id)

    # -- one step -----------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Admit, prefill a chunk, then one round for all decoding rows; returns the events."""
        with self.target.model_lock:
            self._logits.clear()
            self._retire()
            self.prefiller.admit(self.batch.sequences, self.max_rows)
            if self._next is None:  # else that round comes first: a row that joins would undo it
                self._prefill()
            if self.batch.sequences:
                self._round()
                self._retire()
        events, self._events = self._events, []
        return events

    def _prefill(self) -> None:
        for event, ready in self.prefiller.prefill(others_decode=bool(self.batch.sequences)):
            self._events.append(event)
            if ready is not None:
                self._rows_changed()
                self.batch.extend(*ready)

    def _round(self) -> None:
        """One round of every row: dispatch it, collect it, tell the policy."""
        clock = RoundClock()
        step = self._next or self._dispatch(clock)
        self._next = self._dispatch_next(step, clock)
        self.policy.observe(self._collect(step, clock))
        if self._reporter.steps % CLEAR_EVERY == 0:
            mx.clear_cache()

    def _dispatch(self, clock: RoundClock) -> InFlightStep:
        """Draft, schedule, verify: one graph, unless the policy reads the confidences in between.

        The device begins on parts of the graph while the host builds the rest.
        """
        views = tuple(map(self._view, self.batch.sequences, self.batch.peek()))
        plan = self.policy.plan(views)
        self._plain_rounds = 0 if any(plan.widths) else self._plain_rounds + 1
        self._unasked = min(self._plain_rounds // PLAIN_FOR_EACH, MOST_UNASKED)
        draft = self.batch.draft(plan.widths)
        confidence = None
        if draft is not None:
            if plan.needs_confidence:
                confidence = self._read_confidence(draft, clock)
            else:
                _dispatch_now(clock, draft.tokens, draft.confidence)
        counts = draft.counts if draft else (0,) * len(views)
        schedule = self.policy.schedule(views, counts, confidence)
        with clock.model():
            eager = functools.partial(_dispatch_now, clock)
            logits, features = self.batch.forward(draft, max(schedule.lengths), eager)
        specs = [
            self._row_spec(seq, draft.q[r] if draft else None, schedule.lengths[r])
            for r, seq in enumerate(self.batch.sequences)
        ]
        verdict = verify(draft.tokens if draft else None, logits, specs)
        return InFlightStep(views, draft, schedule, verdict, features)

    def _read_confidence(self, draft: Draft, clock: RoundClock) -> list[list[float]]:
        """Read the confidences before verification: costs a device sync of its own."""
        with clock.sync("draft"):
            mx.eval(draft.tokens, draft.confidence)
        return draft.confidence_rows()

    def _collect(self, step: InFlightStep, clock: RoundClock) -> Outcome:
        """Wait for a round, commit what each row got of it, trim every cache to that."""
        waiting = [*step.arrays, *self.batch.append_features(step.features)]
        if self._next is None:
            waiting += self.batch.arrays
        with clock.sync("verify"):
            mx.eval(waiting)
        results, rows, context = step.read(), [], []
        for r, (seq, result) in enumerate(zip(self.batch.sequences, results, strict=True)):
            self._logits[seq.id] = step.verdict.logits[r]
            anchor = seq.anchor
            tokens, accepted = seq.commit(result)
            context.append([anchor, *(t.id for t in tokens[:-1])])
            rows.append(self._reporter.row(seq, step, r, result, tokens, accepted))
        lengths, verdict = step.schedule.lengths, [result.accepted for result in results]
        self.batch.commit(context, lengths, verdict, pipelined=self._next is not None)
        clock.stop()
        seconds = self._pipelined_time.of_round(
            clock.total, dispatched_early=step.pipelined, next_dispatched=self._next is not None
        )
        if step.untimed:
            seconds = 0.0
        self._monitor.round(step.schedule.predicted_seconds, seconds)
        load = self._monitor.load(len(self.batch), len(self.prefiller.waiting()))
        self._events.append(
            self._reporter.step(rows, self.policy.name, step.schedule, clock, load, self.kv_bytes)
        )
        return Outcome(
            rows=step.views,
            drafted=tuple(len(result.drafted) for result in results),
            scheduled=lengths,
            accepted=tuple(verdict),
            committed=tuple(len(row.tokens) for row in rows),
            confidence=tuple(tuple(result.confidence) for result in results),
            draft_seconds=clock.draft,
            verify_seconds=clock.verify,
            round_seconds=seconds,
            pipelined=step.pipelined or self._next is not None,
        )

    # -- plain rounds, dispatched before the last one was read ------------------------------

    def _dispatch_next(self, step: InFlightStep, clock: RoundClock) -> InFlightStep | None:
        """Dispatch the next plain round before the host has read this one, as mlx-lm does.

        Only behind a plain round, and where no row can end before and none is
        about to join. The policy is not asked and no copy is looked for: both
        need the token that is still on the device.
        """
        sequences = self.batch.sequences
        could_draft = any(seq.method in self.batch.proposers for seq in sequences)
        if (
            not (self._pipelined and step.plain)
            or (could_draft and self._unasked < 1)
            or self.prefiller.joining
            or any(seq.remaining < 2 or seq.processors or seq.sampler for seq in sequences)
        ):
            return None
        self._unasked -= 1
        self._plain_rounds += 1
        views = tuple(
            dataclasses.replace(view, context=view.context + 1, remaining=view.remaining - 1)
            for view in step.views
        )
        _dispatch_now(clock, step.arrays)
        with clock.model():
            logits, features = self.batch.forward_tokens(step.verdict.token[:, None])
        verdict = verify(None, logits, [self._row_spec(seq, None, 0, 1) for seq in sequences])
        following = InFlightStep(views, None, step.schedule, verdict, features, pipelined=True)
        _dispatch_now(clock, following.arrays)
        return following

    def _rows_changed(self) -> None:
        """The policy is asked before the next round."""
        self._plain_rounds = self._unasked = 0

    # -- leaving --------------------------------------------------------------------------

    def _retire(self) -> None:
        """Let cancelled and ended sequences go; keep their caches for what may follow them."""
        for seq in [s for s in self.prefiller.waiting() if s.cancelled]:
            self.prefiller.remove(seq)
            self._events.append(seq.finished())
        sequences = self.batch.sequences
        stay = [r for r, seq in enumerate(sequences) if not (seq.ended or seq.cancelled)]
        if len(stay) == len(sequences):
            return
        self._rows_changed()
        if self._next is not None:  # it goes on for those that stay
            self._next = self._next.filter(stay) if stay else None
        for r in sorted(set(range(len(sequences))) - set(stay)):
            self.prefiller.remember(self.batch.state_of(r))
            self._events.append(sequences[r].finished())
        self.batch.filter(stay)

    def abandon(self, message: str, hint: str = "") -> list[Event]:
        """After a failure inside a step: end every request, forget all state.

        Returns the closing events; the engine can be used again.
        """
        ended = self._everyone()
        for seq in ended:
            seq.fail(message, hint)
        self._next = None
        self._rows_changed()
        self.batch.clear()
        self.prefiller.clear()
        self._logits.clear()
        events, self._events = self._events, []
        return events + [seq.finished() for seq in ended]

    # -- small questions --------------------------------------------------------------------

    def _everyone(self) -> list[SequenceState]:
        return [*self.prefiller.waiting(), *self.batch.sequences]

    def _view(self, seq: SequenceState, known: tuple[float, ...] | None) -> RowView:
        proposer = self.batch.proposers.get(seq.method)
        block = proposer.spec.block if proposer else 0
        return RowView(
            request_id=seq.id,
            method=seq.method,
            block=block if known is None else len(known),
            remaining=seq.remaining,
            context=seq.context,
            schedule_invariant=seq.schedule_invariant,
            calibrated=proposer.spec.calibrated if proposer and known is None else False,
            cuts=seq.request.cuts,
            known_confidence=known,
        )

    def _row_spec(
        self, seq: SequenceState, q: mx.array | None, length: int, pipelined: int = 0
    ) -> RowSpec:
        """How row ``seq`` is verified, ``pipelined`` positions behind its last committed token."""
        request = seq.request
        history: Sequence[int] = ()
        if request.logits_processors:
            history = seq.tokens
        elif seq.processors:  # ours look back no further than this
            history = seq.tokens[-request.sampling.penalty_context :]
        return RowSpec(
            params=request.sampling,
            position=len(seq.tokens) + pipelined,
            length=length,
            q=q,
            processors=seq.processors,
            history=history,
            sampler=seq.sampler,
        )


def _dispatch_now(clock: RoundClock, *arrays: Any) -> None:
    """Have the device begin on ``arrays`` while the host builds what follows."""
    with clock.handover():
        mx.async_eval(*arrays)
