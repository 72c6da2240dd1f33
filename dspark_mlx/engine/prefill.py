"""Requests before they are decoded: checked, queued, prefilled in chunks.

Bounds what the KV caches of all active requests may come to hold, and starts
each prefill from the longest prefix that an earlier reply left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors

from ..draft import Proposer
from ..errors import CacheError, UsageError
from ..events import Event, Notice, Prefill, Queued
from ..model.cache import rounded
from ..model.target import Target
from ..request import Request, Status
from .prefix_cache import Prefix, PrefixCache
from .sequence import SequenceState
from .text import encode_chat, encode_text

# While others decode, a step prefills at most this part of the usual, so that they do not stall.
BUSY_SHARE = 4

Ready: TypeAlias = tuple[SequenceState, Prefix]  # a sequence whose prompt is in its caches


class Prefiller:
    """The queue, and prefill of one chunk a step.

    ``kv_limit``: bytes of KV that active requests may reserve (a single one may
    exceed it by part of a step in which buffers grow). ``default_method`` answers
    requests for ``auto``; ``reason`` says why it was chosen. ``thinking`` is the
    mode the drafter was trained in, taken for chats that do not ask for one.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Any,
        proposers: Mapping[str, Proposer],
        *,
        default_method: str,
        reason: str,
        context_limit: int,
        kv_limit: int,
        prefill_chunk: int,
        reuse: bool,
        thinking: bool | None,
    ) -> None:
        self.queue: list[SequenceState] = []
        self.joining: list[Ready] = []  # in prefill, oldest first
        self.prefixes = PrefixCache(kv_limit // 4 if reuse else 0)
        self.context_limit = context_limit
        self.kv_limit = kv_limit
        self.default_method = default_method
        self.reason = reason
        self._target = target
        self._tokenizer = tokenizer
        self._proposers = proposers
        self._chunk = prefill_chunk
        self._thinking = thinking

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for _, state in self.joining) + self.prefixes.nbytes

    def clear(self) -> None:
        """Forget everything that waits or was kept."""
        self.queue.clear()
        self.joining.clear()
        self.prefixes.clear()

    def waiting(self) -> list[SequenceState]:
        """Prefilling and queued sequences, oldest first."""
        return [*(seq for seq, _ in self.joining), *self.queue]

    def submit(self, request: Request) -> list[Event]:
        """Check and queue a request. Raises DsparkError when it can never be served."""
        method = self._method(request)
        prompt = self._encode(request)
        if not prompt:
            raise UsageError("the prompt is empty")
        for token in request.sampling.logit_bias:
            self.check_id(token)
        if self.context_limit and len(prompt) >= self.context_limit:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens; the context is {self.context_limit}",
                "shorten it or start a new chat",
            )
        seq = SequenceState(
            request,
            prompt,
            self._tokenizer,
            context_limit=self._room(request, len(prompt), method),
            vocab_size=self._target.vocab_size,
            processors=_processors(request),
        )
        proposer = self._proposers.get(method)
        seq.method = method
        seq.samples_drafts = proposer is not None and proposer.spec.samples_drafts
        if self._needs(seq) > self.kv_limit:
            raise CacheError(
                f"this request may need {self._needs(seq) / 1e9:.2f} GB of KV cache; "
                f"the limit is {self.kv_limit / 1e9:.2f} GB",
                "shorten the prompt, lower max tokens, or quantise the cache (--kv-bits 8)",
            )
        self.queue.append(seq)
        events: list[Event] = [Queued(request.id, len(self.waiting()) - 1)]
        trained, asked = self._thinking, request.thinking
        drafts = proposer is not None and bool(proposer.spec.taps)
        if drafts and trained is not None and asked not in (None, trained):
            mode = "on" if trained else "off"
            events.append(
                Notice(f"this drafter was trained with thinking {mode}: expect fewer hits")
            )
        return events

    def admit(self, decoding: Sequence[SequenceState], max_rows: int) -> None:
        """Move waiting sequences to prefill while there is a row and KV room for them."""
        while self.queue and len(self.joining) + len(decoding) < max_rows:
            seq = self.queue[0]
            active = [*decoding, *(r for r, _ in self.joining)]
            # Rows share one buffer a layer, so each takes as much as the longest.
            reserved = (len(active) + 1) * max(map(self._holds, [*active, seq]))
            if active and reserved > self.kv_limit:
                return
            self.queue.pop(0)
            self.prefixes.shrink(max(0, self.kv_limit - int(reserved)))
            seq.status = Status.PREFILL
            proposer = self._proposers.get(seq.method)
            state = self.prefixes.take(seq.tokens[: seq.context], proposer)
            if state is None:
                state = Prefix([], self._target.make_rows(), seq.method, None)
            if proposer is not None and state.draft is None:
                state.draft = proposer.new_row()
                if state.tokens:  # it keeps no state of its own: it reads them again, on the host
                    proposer.prefill(state.draft, state.tokens, None)
            state.method = seq.method
            seq.reused = len(state.tokens)
            self.joining.append((seq, state))

    def prefill(self, others_decode: bool) -> Iterator[tuple[Event, Ready | None]]:
        """One step's share of the waiting prompts, the oldest first; each as soon as it is in.

        Several short prompts that came together are prefilled in one step, so that
        their replies are decoded together from the start.
        """
        room = max(1, self._chunk // BUSY_SHARE) if others_decode else self._chunk
        while self.joining and room > 0:
            seq, state = self.joining[0]
            total = seq.context
            chunk = seq.tokens[len(state.tokens) : min(len(state.tokens) + room, total)]
            if chunk:
                self._prefill_chunk(seq, state, chunk)
                room -= len(chunk)
            event = Prefill(seq.id, len(state.tokens), total, seq.reused)
            if len(state.tokens) < total:
                yield event, None
                continue
            self.joining.pop(0)
            seq.prefill_done()
            yield event, (seq, state)

    def remove(self, seq: SequenceState) -> None:
        """Take a sequence out of the queue or of prefill; what was prefilled may be reused."""
        if seq in self.queue:
            self.queue.remove(seq)
            return
        for entry in [entry for entry in self.joining if entry[0] is seq]:
            self.joining.remove(entry)
            self.remember(entry[1])

    def remember(self, state: Prefix) -> None:
        """Keep a row's state for requests that begin alike."""
        if self._target.rollback == "exact":
            proposer = self._proposers.get(state.method)
            if proposer is None or not proposer.spec.keeps_state:
                state.draft = None  # the next prompt starts it from its tokens
            self.prefixes.put(state)

    def _prefill_chunk(self, seq: SequenceState, state: Prefix, chunk: list[int]) -> None:
        proposer = self._proposers.get(seq.method)
        taps = proposer.spec.taps if proposer else ()
        # The logits are never evaluated, so the head is not computed for a prompt.
        _, features = self._target.forward(mx.array([chunk]), state.rows, taps)
        waiting = list(state.rows.arrays)
        if proposer is not None:
            waiting += proposer.prefill(state.draft, chunk, features)
        mx.eval(waiting)
        state.tokens += chunk
        state.rows.trim_to([len(state.tokens)])
        mx.clear_cache()

    def _room(self, request: Request, prompt: int, method: str) -> int:
        """Most positions the sequence may reach (0: no limit), or what fits where it sets none."""
        size = self._size(method)
        fits = int(self.kv_limit / size) if size else 0
        if request.max_tokens != -1 or fits <= prompt:
            return self.context_limit
        return min(fits, self.context_limit or fits)

    def _needs(self, seq: SequenceState) -> float:
        """Bytes of KV the sequence may come to need."""
        return self._size(seq.method) * (seq.prompt_tokens + seq.budget)

    def _holds(self, seq: SequenceState) -> float:
        """Bytes its row may come to hold: buffers grow in whole steps, for a round's draft too."""
        proposer = self._proposers.get(seq.method)
        draft = proposer.spec.block if proposer else 0
        return self._size(seq.method) * rounded(seq.prompt_tokens + seq.budget + draft)

    def _size(self, method: str) -> float:
        """Bytes a position takes in the caches of the target and of the proposer."""
        proposer = self._proposers.get(method)
        own = proposer.spec.kv_bytes_per_token if proposer else 0.0
        return self._target.kv_bytes_per_token + own

    def _method(self, request: Request) -> str:
        if request.method == "auto":
            return self.default_method
        if request.method != "none" and request.method not in self._proposers:
            raise UsageError(
                f"method {request.method!r} is not available: {self.reason or 'not loaded'}",
                f"choose one of {', '.join(['auto', *self._proposers, 'none'])}",
            )
        return request.method

    def check_id(self, token: int) -> None:
        """MLX indexes without checking, so an id that does not exist must not come near it."""
        if not 0 <= token < self._target.vocab_size:
            raise UsageError(f"token id {token} is not in this model's vocabulary")

    def _encode(self, request: Request) -> list[int]:
        if request.tokens is not None:
            for token in request.tokens:
                self.check_id(token)
            return list(request.tokens)
        if request.prompt is not None:
            return encode_text(self._tokenizer, request.prompt)
        thinking = self._thinking if request.thinking is None else request.thinking
        return encode_chat(self._tokenizer, request.messages, thinking)


def _processors(request: Request) -> tuple[Callable[..., Any], ...]:
    """Everything that changes a row's logits before a token is chosen, in mlx-lm's order."""
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
