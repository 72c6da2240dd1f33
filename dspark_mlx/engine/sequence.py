"""One sequence: a request on its way, its tokens and text, where it ends, and its counts.

Owns the rules of ending: end-of-text ids, stop strings, ``max_tokens`` and the
context limit, each exact at every offset of a block. Knows no model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..events import Finished, FinishReason, Token
from ..request import Request, Status
from .in_flight import RowResult
from .text import TextStream


@dataclass
class Counts:
    """What the rounds of one reply did; ``reached[k]`` of them judged position k."""

    rounds: int = 0
    drafted: int = 0
    scheduled: int = 0
    accepted: int = 0
    reached: list[int] = field(default_factory=list)
    survived: list[int] = field(default_factory=list)

    def add(self, drafted: int, scheduled: int, accepted: int, judged: int) -> None:
        """One round; ``judged``: positions verified, less those behind the reply's end."""
        self.rounds += 1
        self.drafted += drafted
        self.scheduled += scheduled
        self.accepted += accepted
        missing = judged - len(self.reached)
        self.reached += [0] * missing
        self.survived += [0] * missing
        for k in range(judged):
            self.reached[k] += 1
            self.survived[k] += k < accepted


class SequenceState:
    """A request on its way. ``tokens`` holds prompt and reply; the last one is the anchor."""

    def __init__(
        self,
        request: Request,
        prompt: Sequence[int],
        tokenizer: Any,
        *,
        context_limit: int,
        vocab_size: int,
        processors: tuple[Callable[..., Any], ...] = (),
    ) -> None:
        self.request = request
        self._vocab_size = vocab_size
        self.tokens = list(prompt)
        self.prompt_tokens = len(self.tokens)
        self.processors = tuple(self._guarded("a logits processor", p, False) for p in processors)
        self.sampler = (
            self._guarded("the sampler", request.sampler, True) if request.sampler else None
        )
        self.status = Status.QUEUED
        self.method = "none"
        self.samples_drafts = False  # what its proposer declares (``ProposerSpec``)
        self.reused = 0
        self.counts = Counts()
        self.ended: FinishReason | None = None
        self.message = ""
        self.hint = ""
        self.cancelled = False
        # By the position whose token could not be chosen: why not.
        self._broken: dict[int, str] = {}
        self._text = TextStream(tokenizer, request.stop)
        self._eos: frozenset[int] = (
            frozenset() if request.ignore_eos else frozenset(tokenizer.eos_token_ids)
        )
        room = context_limit - self.prompt_tokens if context_limit else 2**31
        asked = room if request.max_tokens == -1 else request.max_tokens
        self.budget = min(asked, room)
        self._born = time.perf_counter()
        self._prefilled = self._born
        self._first: float | None = None
        self._last = self._born

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def anchor(self) -> int:
        return self.tokens[-1]

    @property
    def context(self) -> int:
        """Positions that are, or will be after prefill, in the target's cache."""
        return len(self.tokens) - 1

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens the reply may still take."""
        return self.budget - self.generated

    @property
    def schedule_invariant(self) -> bool:
        """Whether the text is the same whatever is drafted and verified.

        It is, unless independently sampled drafts are judged by rejection.
        """
        return (
            not self.samples_drafts
            or self.request.sampler is not None
            or self.request.sampling.greedy
            or self.request.sampling.draft_sampling != "probabilistic"
        )

    def _guarded(self, what: str, call: Callable[..., Any], chooses: bool) -> Callable[..., Any]:
        """A user's processor or sampler that, when it raises, fails this reply and no other.

        It is called for each position of a round, in order. Behind a drafted
        token that is then rejected it sees a text that never was, so a failure
        there counts only once the reply comes to stand there.
        """
        round, asked = -1, 0

        def guarded(*given: Any) -> Any:
            nonlocal round, asked
            asked = asked + 1 if round == self.counts.rounds else 0
            round = self.counts.rounds
            try:
                return _checked(call(*given), given[-1], chooses)
            except (Exception, SystemExit) as error:
                why = str(error).strip().partition("\n")[0]
                line = f"{what} failed: {type(error).__name__}: {why}"
                self._broken.setdefault(len(self.tokens) + asked, line)
                return given[-1].argmax(axis=-1) if chooses else given[-1]

        return guarded

    def prefill_done(self) -> None:
        self._prefilled = time.perf_counter()

    def commit(self, result: RowResult) -> tuple[list[Token], int]:
        """Add the accepted part of a draft and the target's own token.

        Stops at the first end inside it. Returns the tokens added, as events,
        and how many of them were accepted drafts.
        """
        added: list[Token] = []
        accepted, survival = result.accepted, result.survival
        for k, id in enumerate([*result.drafted[:accepted], result.token]):
            if len(self.tokens) in self._broken:
                self.fail(self._broken[len(self.tokens)])
                break
            if not 0 <= id < self._vocab_size:  # it must not come near an embedding
                self.fail(f"the sampler failed: it chose token id {id}, which the model lacks")
                break
            self.tokens.append(id)
            text = self._end(id)
            known = k < accepted and k < len(survival)
            added.append(
                Token(
                    id=id,
                    text=text,
                    origin="draft" if k < accepted else "target",
                    confidence=result.confidence[k] if known else None,
                    survival=survival[k] if known else None,
                )
            )
            if self.ended:
                break
        if added:
            self._last = time.perf_counter()
            self._first = self._first or self._last
        self._broken.clear()
        used = min(accepted, len(added))
        inside = self.ended is not None and len(added) <= accepted
        judged = used if inside else result.scheduled
        self.counts.add(len(result.drafted), result.scheduled, used, judged)
        return added, used

    def _end(self, id: int) -> str:
        """The text of one more token; sets ``ended`` when the reply ends with it."""
        if id in self._eos:
            self.ended = "stop"
            return self._text.finish()
        text = self._text.push(id)
        if self._text.stopped:
            self.ended = "stop"
        elif self.remaining <= 0:
            self.ended = "length"
            text += self._text.finish()
            if self._text.stopped:
                self.ended = "stop"
        return text

    def fail(self, message: str, hint: str = "") -> None:
        self.ended = "error"
        self.message, self.hint = message, hint

    def finished(self) -> Finished:
        """The closing event. ``tail`` is text that was held back when the reply was cut off."""
        self.status = Status.FINISHED
        first = self._first or self._last
        return Finished(
            request_id=self.id,
            reason=self.ended or "cancelled",
            prompt_tokens=self.prompt_tokens,
            reused_tokens=self.reused,
            generation_tokens=self.generated,
            prompt_seconds=self._prefilled - self._born,
            first_token_seconds=first - self._born,
            generation_seconds=max(0.0, self._last - self._prefilled),
            rounds=self.counts.rounds,
            drafted=self.counts.drafted,
            scheduled=self.counts.scheduled,
            accepted=self.counts.accepted,
            reached=tuple(self.counts.reached),
            survived=tuple(self.counts.survived),
            method=self.method,
            seed=self.request.sampling.seed,
            message=self.message,
            hint=self.hint,
            tail=self._text.finish() if self.ended in (None, "cancelled", "error") else "",
        )


def _checked(made: Any, given: Any, chooses: bool) -> Any:
    """What a user's callable made of the array ``given``. Raises TypeError or ValueError.

    Whether a chosen id exists is seen only once the device has computed it.
    """
    if type(made) is not type(given):  # numpy's too: MLX would fail on it in a graph of all rows
        raise TypeError(f"it returned {type(made).__name__}, no mlx array")
    if made.size != 1 if chooses else made.shape != given.shape:
        raise ValueError(f"it returned an array of shape {made.shape}")
    if chooses and "int" not in str(made.dtype):
        raise TypeError(f"it returned {made.dtype}, no token id")
    return made
