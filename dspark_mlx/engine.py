"""The engine: draft, schedule, verify, commit, for all active requests at once.

``Engine.step`` is the cycle of the paper's Figure 1, one call a stage. The
engine owns the rows being decoded and the queue before them; it runs on one
thread (MLX streams belong to threads), which ``worker.EngineThread`` provides
for those who are on another.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors

from .clock import RoundClock
from .errors import CacheError, DsparkError, UsageError
from .events import Event, Load, Memory, Prefill, Queued, RowStep, StepDone
from .prefix import Prefix, PrefixStore
from .propose import Draft, DraftRow, Proposer
from .reply import Reply
from .request import Request, Status
from .rows import Rows
from .schedule.policy import Outcome, Plan, Policy, RowView, Schedule
from .target import Target
from .text import encode_chat, encode_text
from .verify import RowSpec, Verdict, verify

CLEAR_EVERY = 256  # rounds between returns of unused buffers to the system


class Engine:
    """Serves requests with one target, its proposers and a scheduling policy.

    ``default_method`` answers requests for ``auto``; ``reason`` says why it was
    chosen. ``kv_limit`` bounds the bytes of KV reserved by active requests;
    those that do not fit wait, and one that never could is refused.
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
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.proposers = {p.name: p for p in proposers}
        self.policy = policy
        self.default_method = default_method
        self.reason = reason
        self.max_rows = 1 if target.factory.unsupported else max_rows
        self.prefill_chunk = prefill_chunk
        self.context_limit = context_limit or target.context_limit
        self.kv_limit = kv_limit
        self.prefixes = PrefixStore(kv_limit // 4 if reuse else 0)
        self._taps = tuple(dict.fromkeys(t for p in proposers for t in p.taps))
        self._queue: list[Reply] = []
        self._joining: list[tuple[Reply, Prefix]] = []  # being prefilled
        self._replies: list[Reply] = []  # being decoded, one per row
        self._rows: Rows | None = None
        self._events: list[Event] = []
        self._steps = 0
        self._kv_per_token = 0.0
        self._weights = target.weight_bytes
        self._texts: dict[int, str] = {}
        self._last_logits: dict[str, mx.array] = {}

    # -- requests come and go ---------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. Raises DsparkError when it can never be served."""
        if any(r.id == request.id for r in self._everyone()):
            raise UsageError(f"a request with the id {request.id!r} is already active")
        prompt = self._encode(request)
        if not prompt:
            raise UsageError("the prompt is empty")
        if self.context_limit and len(prompt) >= self.context_limit:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens; this model's context is "
                f"{self.context_limit}",
                "shorten it or start a new chat",
            )
        reply = Reply(
            request,
            prompt,
            self.tokenizer,
            context_limit=self.context_limit,
            processors=self._processors(request),
        )
        reply.method = self._method(request)
        if self._needs(reply) > self.kv_limit:
            raise CacheError(
                f"this request may need {self._needs(reply) / 1e9:.1f} GB of KV cache; "
                f"the limit is {self.kv_limit / 1e9:.1f} GB",
                "shorten the prompt, lower max tokens, or use --kv-bits 8",
            )
        self._queue.append(reply)
        self._events.append(Queued(request.id, len(self._queue) - 1 + len(self._joining)))

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
        return bool(self._queue or self._joining or self._replies)

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV held: rows being decoded or prefilled, and kept prefixes."""
        decoding = self._rows.nbytes if self._rows is not None else 0
        return decoding + sum(p.rows.nbytes for _, p in self._joining) + self.prefixes.nbytes

    def logits_of(self, request_id: str) -> mx.array | None:
        """The target's logits ``(W, V)`` of the request's last round; None before it."""
        return self._last_logits.get(request_id)

    # -- one step -----------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Admit, prefill one chunk, then one round for all decoding rows; returns the events."""
        self._leave()
        self._admit()
        self._prefill()
        if self._replies:
            self._round()
        events, self._events = self._events, []
        return events

    def _round(self) -> None:
        clock = RoundClock()
        views = [self._view(reply) for reply in self._replies]
        plan = self.policy.plan(views)
        draft = self._draft(plan)
        confidence = self._look(draft, clock) if plan.look and draft else None
        counts = draft.counts if draft else (0,) * len(views)
        schedule = self.policy.schedule(views, counts, confidence)
        verdict = self._verify(draft, schedule.lengths, clock)
        outcome = self._commit(draft, schedule, verdict, views, clock)
        self.policy.observe(outcome)

    def _draft(self, plan: Plan) -> Draft | None:
        """Every proposer's draft for its own rows, as one draft for all rows; lazy."""
        parts: list[tuple[list[int], Draft]] = []
        for proposer in self.proposers.values():
            mine = self._rows_of(proposer)
            if not any(plan.widths[r] for r in mine):
                continue
            asked = []
            for r in mine:
                reply = self._replies[r]
                sampling = reply.request.sampling
                asked.append(DraftRow(reply.anchor, len(reply.tokens), sampling, plan.widths[r]))
            parts.append((mine, proposer.propose(asked)))
        if not parts:
            return None
        return _one_draft(parts, len(self._replies))

    def _look(self, draft: Draft, clock: RoundClock) -> list[list[float]]:
        """Read the confidences before verification: costs a device sync of its own."""
        with clock.sync("draft"):
            mx.eval(draft.tokens, draft.confidence)
        return _rows_of_floats(draft)

    def _verify(
        self, draft: Draft | None, lengths: Sequence[int], clock: RoundClock
    ) -> Verdict:
        """One target forward over ``[anchor, x_1..x_l]`` of every row, and its verdict; lazy."""
        assert self._rows is not None
        width = max(lengths) + 1
        tokens = mx.array([[reply.anchor] for reply in self._replies], dtype=mx.int32)
        if width > 1 and draft is not None:
            tokens = mx.concatenate([tokens, draft.tokens[:, : width - 1]], axis=1)
        with clock.model():
            logits, features = self.target.forward(tokens, self._rows, self._taps)
        specs = [self._spec(r, reply, draft, lengths) for r, reply in enumerate(self._replies)]
        verdict = verify(draft.tokens if draft else None, logits, specs)
        waiting = [verdict.accepted, verdict.token, *self._rows.arrays]
        if draft is not None:
            waiting += [draft.tokens, draft.confidence]
        for proposer in self.proposers.values():
            mine = self._rows_of(proposer)
            if mine:
                waiting += proposer.absorb(self._features_of(proposer, mine, features))
        with clock.sync("verify"):
            mx.eval(waiting)
        return verdict

    def _commit(
        self,
        draft: Draft | None,
        schedule: Schedule,
        verdict: Verdict,
        views: Sequence[RowView],
        clock: RoundClock,
    ) -> Outcome:
        """Add what stands to the replies, roll every cache back to it, report, let the ended leave."""
        assert self._rows is not None
        drafted = _rows_of_ints(draft) if draft else [[] for _ in views]
        confidence = _rows_of_floats(draft) if draft else [[] for _ in views]
        accepted: list[int] = verdict.accepted.tolist()
        own: list[int] = verdict.token.tolist()
        steps, context, used = [], [], []
        for r, reply in enumerate(self._replies):
            self._last_logits[reply.id] = verdict.logits[r]
            anchor, position = reply.anchor, len(reply.tokens)
            added, stood = reply.commit(
                drafted[r], accepted[r], own[r], confidence[r], schedule.lengths[r]
            )
            context.append([anchor, *(t.id for t in added[:-1])])
            used.append(stood)
            steps.append(
                RowStep(
                    request_id=reply.id,
                    position=position,
                    method=reply.method,
                    drafted=tuple(drafted[r]),
                    draft_texts=tuple(self._text(id) for id in drafted[r]),
                    confidence=tuple(confidence[r]),
                    survival=_survival(confidence[r]),
                    scheduled=schedule.lengths[r],
                    accepted=stood,
                    tokens=tuple(added),
                    reason=schedule.reasons[r],
                    curve=schedule.curves[r] if schedule.curves else (),
                    calibrated=views[r].calibrated,
                )
            )
        self._rows.roll_back([reply.context for reply in self._replies])
        for proposer in self.proposers.values():
            mine = self._rows_of(proposer)
            if mine:
                proposer.settle(
                    [context[r] for r in mine],
                    [schedule.lengths[r] for r in mine],
                    [accepted[r] for r in mine],
                )
        committed = tuple(len(step.tokens) for step in steps)
        clock.stop()
        self._report(steps, schedule, sum(committed), clock)
        self._leave()
        return Outcome(
            rows=tuple(views),
            drafted=tuple(map(len, drafted)),
            scheduled=schedule.lengths,
            accepted=tuple(accepted),
            committed=committed,
            confidence=tuple(map(tuple, confidence)),
            draft_seconds=clock.draft,
            verify_seconds=clock.verify,
            round_seconds=clock.total,
        )

    # -- joining and leaving ------------------------------------------------------------

    def _admit(self) -> None:
        """Move waiting requests to prefill while there is a row and KV room for them."""
        while self._queue and len(self._joining) + len(self._replies) < self.max_rows:
            reply = self._queue[0]
            reserved = sum(self._needs(r) for r in self._replies)
            reserved += sum(self._needs(r) for r, _ in self._joining)
            if reserved and reserved + self._needs(reply) > self.kv_limit:
                return
            self._queue.pop(0)
            self.prefixes.shrink(max(0, self.kv_limit - int(reserved + self._needs(reply))))
            reply.status = Status.PREFILL
            proposer = self.proposers.get(reply.method)
            start = self.prefixes.take(reply.tokens[: reply.context], proposer)
            if start is None:
                draft = proposer.new_row() if proposer else None
                start = Prefix([], self.target.make_rows(), reply.method, draft)
            reply.reused = len(start.tokens)
            self._joining.append((reply, start))

    def _prefill(self) -> None:
        """One chunk for the request that has waited longest; join it when its prompt is in."""
        if not self._joining:
            return
        reply, state = self._joining[0]
        done, total = len(state.tokens), reply.context
        proposer = self.proposers.get(reply.method)
        if done < total:
            # Short chunks while others decode, so that their replies do not stall.
            size = self.prefill_chunk if not self._replies else max(32, self.prefill_chunk // 4)
            chunk = reply.tokens[done : min(done + size, total)]
            taps = proposer.taps if proposer else ()
            _, features = self.target.forward(mx.array([chunk]), state.rows, taps)
            waiting = list(state.rows.arrays)
            if proposer is not None:
                waiting += proposer.prefill(state.draft, chunk, features)
            mx.eval(waiting)
            state.tokens += chunk
            done = len(state.tokens)
            state.rows.roll_back([done])
            mx.clear_cache()
        self._events.append(Prefill(reply.id, done, total, reply.reused))
        if done < total:
            return
        self._joining.pop(0)
        if total:
            self._kv_per_token = state.rows.nbytes / max(1, total)
        if self._rows is None:
            self._rows = state.rows
        else:
            self._rows.join(state.rows)
        if proposer is not None:
            proposer.join(state.draft)
        self._replies.append(reply)
        reply.prefill_done()

    def _leave(self) -> None:
        """Let cancelled and ended replies go; keep their caches for what may follow them."""
        for reply in [r for r in self._queue if r.cancelled]:
            self._queue.remove(reply)
            self._events.append(reply.finished())
        for reply, state in [j for j in self._joining if j[0].cancelled]:
            self._joining.remove((reply, state))
            self.prefixes.put(state)
            self._events.append(reply.finished())
        gone = [r for r, reply in enumerate(self._replies) if reply.ended or reply.cancelled]
        if not gone:
            return
        assert self._rows is not None
        for r in gone:
            reply = self._replies[r]
            if not self.target.factory.unsupported:
                self._keep_prefix(r, reply)
            self._last_logits.pop(reply.id, None)
            self._events.append(reply.finished())
        self._drop(gone)

    def _keep_prefix(self, r: int, reply: Reply) -> None:
        assert self._rows is not None
        proposer = self.proposers.get(reply.method)
        draft = None
        if proposer is not None and proposer.taps:
            draft = proposer.extract(self._rows_of(proposer).index(r))
        rows = self._rows if len(self._replies) == 1 else self._rows.extract(r)
        self.prefixes.put(Prefix(reply.tokens[: reply.context], rows, reply.method, draft))

    def _drop(self, gone: Sequence[int]) -> None:
        for proposer in self.proposers.values():
            mine = self._rows_of(proposer)
            if any(r in gone for r in mine):
                proposer.keep([i for i, r in enumerate(mine) if r not in gone])
        stay = [r for r in range(len(self._replies)) if r not in gone]
        if stay and self._rows is not None:
            self._rows.keep(stay)
        else:
            self._rows = None
        self._replies = [self._replies[r] for r in stay]

    def abandon(self, message: str, hint: str = "") -> list[Event]:
        """After a failure inside a step: end every request that was running, forget their state.

        The queue is kept. Returns the closing events.
        """
        running = [*self._replies, *(reply for reply, _ in self._joining)]
        for reply in running:
            reply.fail(message, hint)
        self._drop(range(len(self._replies)))
        self._joining.clear()
        self._last_logits.clear()
        self.prefixes.clear()
        for proposer in self.proposers.values():
            proposer.keep([])
        events, self._events = self._events, []
        return events + [reply.finished() for reply in running]

    # -- small questions ------------------------------------------------------------------

    def _everyone(self) -> list[Reply]:
        return [*self._queue, *(reply for reply, _ in self._joining), *self._replies]

    def _encode(self, request: Request) -> list[int]:
        if request.tokens is not None:
            bad = [t for t in request.tokens if not 0 <= t < self.target.vocab_size]
            if bad:
                raise UsageError(f"token id {bad[0]} is not in this model's vocabulary")
            return list(request.tokens)
        if request.prompt is not None:
            return encode_text(self.tokenizer, request.prompt)
        return encode_chat(self.tokenizer, request.messages, request.thinking)

    def _processors(self, request: Request) -> tuple[Any, ...]:
        s = request.sampling
        made = make_logits_processors(
            logit_bias=dict(s.logit_bias) or None,
            repetition_penalty=s.repetition_penalty if s.repetition_penalty != 1.0 else None,
            repetition_context_size=s.penalty_context,
            presence_penalty=s.presence_penalty,
            presence_context_size=s.penalty_context,
            frequency_penalty=s.frequency_penalty,
            frequency_context_size=s.penalty_context,
        )
        return (*made, *request.logits_processors)

    def _method(self, request: Request) -> str:
        """The proposer's name, or "none". Raises UsageError for one that is not there."""
        if request.method == "auto":
            return self.default_method
        if request.method != "none" and request.method not in self.proposers:
            raise UsageError(
                f"method {request.method!r} is not available: {self.reason or 'not loaded'}",
                f"choose one of {', '.join(['auto', *self.proposers, 'none'])}",
            )
        return request.method

    def _needs(self, reply: Reply) -> float:
        """Bytes of KV the reply may come to hold."""
        return self._kv_per_token * (reply.prompt_tokens + min(reply.budget, 1 << 20))

    def _rows_of(self, proposer: Proposer) -> list[int]:
        return [r for r, reply in enumerate(self._replies) if reply.method == proposer.name]

    def _features_of(
        self, proposer: Proposer, mine: Sequence[int], features: mx.array | None
    ) -> mx.array | None:
        if features is None or not proposer.taps:
            return None
        if len(mine) < len(self._replies):
            features = features[mx.array(mine)]
        if proposer.taps != self._taps:
            size = self.target.hidden_size
            at = [self._taps.index(t) * size for t in proposer.taps]
            features = mx.concatenate([features[..., a : a + size] for a in at], axis=-1)
        return features

    def _view(self, reply: Reply) -> RowView:
        proposer = self.proposers.get(reply.method)
        sampling = reply.request.sampling
        return RowView(
            request_id=reply.id,
            method=reply.method,
            block=proposer.block if proposer else 0,
            remaining=reply.remaining,
            context=reply.context,
            pathwise=sampling.greedy
            or sampling.draft_sampling != "probabilistic"
            or reply.request.sampler is not None
            or reply.method != "dspark",
            calibrated=proposer.calibrated if proposer else False,
            cuts=reply.request.cuts,
        )

    def _spec(
        self, r: int, reply: Reply, draft: Draft | None, lengths: Sequence[int]
    ) -> RowSpec:
        sampling = reply.request.sampling
        history: Sequence[int] = ()
        if reply.processors:
            everything = bool(reply.request.logits_processors)
            history = reply.tokens if everything else reply.tokens[-sampling.penalty_context :]
        return RowSpec(
            params=sampling,
            position=len(reply.tokens),
            length=lengths[r],
            q=draft.q[r] if draft else None,
            processors=reply.processors,
            history=history,
            sampler=reply.request.sampler,
        )

    def _text(self, id: int) -> str:
        text = self._texts.get(id)
        if text is None:
            text = self._texts[id] = str(self.tokenizer.decode([id]))
        return text

    def _report(
        self, steps: list[RowStep], schedule: Schedule, committed: int, clock: RoundClock
    ) -> None:
        self._steps += 1
        if self._steps % CLEAR_EVERY == 0:
            mx.clear_cache()
        self._events.append(
            StepDone(
                step=self._steps,
                time=time.time(),
                rows=tuple(steps),
                policy=self.policy.name,
                round_seconds=clock.total,
                draft_seconds=clock.draft,
                verify_seconds=clock.verify,
                host_seconds=clock.host,
                predicted_seconds=schedule.predicted_seconds,
                predicted_tps=schedule.predicted_tps,
                tps=committed / clock.total,
                syncs=clock.syncs,
                load=Load(active=len(self._replies), queued=len(self._queue)),
                memory=Memory(self._weights, self.kv_bytes, mx.get_peak_memory()),
            )
        )


def _one_draft(parts: list[tuple[list[int], Draft]], rows: int) -> Draft:
    """Drafts of groups of rows as one, padded; rows outside every group have none."""
    if len(parts) == 1 and len(parts[0][0]) == rows:
        return parts[0][1]
    width = max(draft.tokens.shape[1] for _, draft in parts)
    tokens = [mx.zeros((width,), dtype=mx.int32)] * rows
    confidence = [mx.zeros((width,), dtype=mx.float32)] * rows
    counts = [0] * rows
    q: list[mx.array | None] = [None] * rows
    for mine, draft in parts:
        pad = [(0, width - draft.tokens.shape[1])]
        for i, r in enumerate(mine):
            tokens[r] = mx.pad(draft.tokens[i], pad)
            confidence[r] = mx.pad(draft.confidence[i], pad)
            counts[r] = draft.counts[i]
            q[r] = draft.q[i]
    return Draft(mx.stack(tokens), tuple(counts), mx.stack(confidence), tuple(q))


def _rows_of_ints(draft: Draft) -> list[list[int]]:
    rows: list[list[int]] = draft.tokens.tolist()
    return [row[:n] for row, n in zip(rows, draft.counts, strict=True)]


def _rows_of_floats(draft: Draft) -> list[list[float]]:
    rows: list[list[float]] = draft.confidence.tolist()
    return [row[:n] for row, n in zip(rows, draft.counts, strict=True)]


def _survival(confidence: Sequence[float]) -> tuple[float, ...]:
    survival, product = [], 1.0
    for c in confidence:
        product *= c
        survival.append(product)
    return tuple(survival)
