"""What a caller asks of the engine: one frozen ``Request`` per reply.

Owns the words of the request and their range checks. Must not import mlx or
anything heavier than the standard library: requests cross threads as plain
values.
"""

from __future__ import annotations

import enum
import math
import numbers
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import UsageError

Method = Literal["auto", "dspark", "dflash", "eagle3", "mtp", "draft", "lookup", "none"]
DraftSampling = Literal["greedy", "coupled", "probabilistic"]
METHODS: tuple[Method, ...] = (
    "auto",
    "dspark",
    "dflash",
    "eagle3",
    "mtp",
    "draft",
    "lookup",
    "none",
)
# llama.cpp's names of the same methods.
METHOD_ALIASES: dict[str, Method] = {
    "draft-simple": "draft",
    "draft-dflash": "dflash",
    "draft-eagle3": "eagle3",
    "draft-mtp": "mtp",
    "ngram": "lookup",
}
DRAFT_SAMPLINGS: tuple[DraftSampling, ...] = ("greedy", "coupled", "probabilistic")


def _require(ok: bool, what: str) -> None:
    if not ok:
        raise UsageError(what)


def method_named(name: str) -> Method:
    """The method of that name, ours or llama.cpp's. Raises UsageError."""
    method = METHOD_ALIASES.get(name, name)
    if method not in METHODS:
        raise UsageError(f"no method named {name!r}", f"choose one of {', '.join(METHODS)}")
    return method


def _whole(*values: Any) -> bool:
    """Whether all are whole numbers, numpy's too."""
    return all(isinstance(v, numbers.Integral) and not isinstance(v, bool) for v in values)


def _real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn from the target's logits.

    ``temperature`` 0 means greedy. ``top_p``, ``top_k`` and ``min_p`` are off
    at 1.0, 0 and 0.0. A ``seed`` of None is replaced by a fresh one, so that
    every reply can be repeated from the value kept here.

    ``draft_sampling`` says how the drafter's tokens are drawn when
    ``temperature`` > 0:

    * ``greedy``: the drafter's most likely token;
    * ``coupled``: a sample drawn with the same noise the target will use at
      that position (Gumbel coupling), which agrees with it more often;
    * ``probabilistic``: an independent sample, verified by rejection sampling
      as in the paper.

    With the first two the text for a given seed does not depend on the
    drafter at all; with the third only its law does not.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    draft_sampling: DraftSampling = "coupled"
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_context: int = 20
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            _require(_real(getattr(self, name)), f"{name.replace('_', ' ')} must be a number")
        _require(isinstance(self.logit_bias, Mapping), "logit bias maps token ids to numbers")
        _require(0.0 <= self.temperature < float("inf"), "temperature must be finite, 0 or more")
        _require(0.0 < self.top_p <= 1.0, "top-p must be above 0 and at most 1")
        _require(_whole(self.top_k) and self.top_k >= 0, "top-k must be 0 (off) or more")
        _require(0.0 <= self.min_p <= 1.0, "min-p must be between 0 and 1")
        _require(
            self.draft_sampling in DRAFT_SAMPLINGS,
            f"draft sampling must be one of {', '.join(DRAFT_SAMPLINGS)}",
        )
        _require(0 < self.repetition_penalty < math.inf, "repetition penalty must be above 0")
        _require(
            math.isfinite(self.presence_penalty) and math.isfinite(self.frequency_penalty),
            "presence and frequency penalty must be finite",
        )
        _require(
            _whole(self.penalty_context) and self.penalty_context > 0,
            "penalty context must be 1 or more",
        )
        _require(
            _whole(*self.logit_bias)
            and all(isinstance(v, numbers.Real) and v < math.inf for v in self.logit_bias.values()),
            "logit bias maps token ids to numbers below infinity",
        )
        if self.seed is None:
            object.__setattr__(self, "seed", secrets.randbits(32))
        _require(
            _whole(self.seed) and 0 <= (self.seed or 0) < 2**64,
            "seed must be a whole number from 0 to 2^64 - 1",
        )
        for name in ("top_k", "penalty_context", "seed"):
            object.__setattr__(self, name, int(getattr(self, name)))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether the logits depend on the tokens already written."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class Cuts:
    """Static limits on how much of a draft is verified; any proposer obeys them.

    ``draft_length``: at most this many tokens a round (None: the block).
    ``p_min``: stop before the first token whose own confidence is below it.
    ``p_survival_min``: stop before the first token whose chance to survive,
    the product of the confidences so far, is below it.
    """

    draft_length: int | None = None
    p_min: float = 0.0
    p_survival_min: float = 0.0

    def __post_init__(self) -> None:
        _require(
            self.draft_length is None or (_whole(self.draft_length) and self.draft_length >= 0),
            "draft length must be 0 or more",
        )
        _require(_real(self.p_min) and _real(self.p_survival_min), "p-min must be a number")
        _require(0.0 <= self.p_min <= 1.0, "p-min must be between 0 and 1")
        _require(0.0 <= self.p_survival_min <= 1.0, "p-survival-min must be between 0 and 1")

    @property
    def needs_confidence(self) -> bool:
        """Whether the confidences must be read before verification."""
        return self.p_min > 0.0 or self.p_survival_min > 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One reply to generate.

    Exactly one of ``messages`` (a chat: mappings with ``role`` and
    ``content``), ``prompt`` (raw text, no chat template) and ``tokens`` (ids)
    is given. ``max_tokens`` of -1 means until the model stops or its context
    is full. ``stop`` strings end the reply and are not part of its text.

    ``logits_processors`` are mlx-lm's: callables ``(tokens, logits (1, V)) ->
    logits``; ``sampler`` is mlx-lm's too: ``logprobs (1, V) -> token (1,)``.
    Both run on the engine's thread.
    """

    id: str
    messages: tuple[Mapping[str, str], ...] = ()
    prompt: str | None = None
    tokens: tuple[int, ...] | None = None
    max_tokens: int = 512
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cuts: Cuts = field(default_factory=Cuts)
    method: Method = "auto"
    stop: tuple[str, ...] = ()
    thinking: bool | None = None
    ignore_eos: bool = False
    logits_processors: tuple[Callable[..., Any], ...] = ()
    sampler: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        given = [bool(self.messages), self.prompt is not None, self.tokens is not None]
        _require(sum(given) == 1, "give exactly one of messages, prompt and tokens")
        _require(isinstance(self.prompt, str | None), "the prompt must be text")
        _require(
            all(
                isinstance(m, Mapping) and isinstance(m.get("content", ""), str)
                for m in self.messages
            ),
            "each message must be a mapping with text as its content",
        )
        _require(isinstance(self.sampling, SamplingParams), "sampling must be SamplingParams")
        _require(isinstance(self.cuts, Cuts), "cuts must be Cuts")
        if self.tokens is not None:
            _require(_whole(*self.tokens), "tokens must be token ids, whole numbers")
            object.__setattr__(self, "tokens", tuple(map(int, self.tokens)))
        _require(
            _whole(self.max_tokens) and (self.max_tokens == -1 or self.max_tokens > 0),
            "max tokens must be positive, or -1",
        )
        object.__setattr__(self, "max_tokens", int(self.max_tokens))
        object.__setattr__(self, "method", method_named(self.method))
        _require(not isinstance(self.stop, str), "stop must be a tuple of strings, not one string")
        _require(all(isinstance(s, str) for s in self.stop), "stop strings must be text")
        _require(all(self.stop), "a stop string must not be empty")


class Status(enum.Enum):
    """Where a request stands in the engine."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODING = "decoding"
    FINISHED = "finished"
