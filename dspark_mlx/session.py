"""What the functions of ``generate`` keep with a model between calls.

mlx-lm's functions pass a bare model around, so the tokenizer's partner, the
drafter, the measured prices and the policies that learn are attached to it.
"""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from .drafter.load import load_drafter
from .drafter.model import Drafter
from .engine import Engine
from .errors import UsageError
from .loading import Pair, choose_method
from .prefix import Prefix
from .request import Method
from .schedule import CostModel, Policy, make_policy
from .target import Target


class PromptCache:
    """A conversation's KV state between calls; stands in for mlx-lm's list of caches.

    Pass it as ``prompt_cache`` with the new tokens only, as with mlx-lm.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.prefix: Prefix | None = None


class Session:
    """A pair, what rounds cost with it (None: not measured), and policies that remember."""

    def __init__(self, pair: Pair, cost: CostModel | None = None) -> None:
        self.pair = pair
        self.cost = cost
        self._policies: dict[str, Policy] = {}
        self._variants: dict[tuple[Any, ...], Session] = {}

    def attach(self) -> None:
        """Keep this session with its model."""
        object.__setattr__(self.pair.target.model, "_dspark", self)

    @classmethod
    def of(cls, model: nn.Module, tokenizer: Any) -> Session:
        """The session of ``model``; a new one, without a drafter, for a model loaded elsewhere."""
        session: Session | None = getattr(model, "_dspark", None)
        if session is None:
            target = Target(model)
            target.check()
            method, reason = choose_method(target, None, "auto", "no drafter was given")
            session = cls(Pair(target, tokenizer, None, method, reason))
            session.attach()
        return session

    def variant(
        self,
        draft_model: Drafter | str | None,
        kv_bits: int | None,
        kv_group_size: int | None = None,
    ) -> Session:
        """The same model with another drafter or KV cache; itself where neither differs."""
        pair = self.pair
        same_cache = kv_bits is None or kv_bits == pair.target.kv_bits
        if draft_model is None and same_cache:
            return self
        key = (draft_model if isinstance(draft_model, str) else id(draft_model), kv_bits)
        if key in self._variants:
            return self._variants[key]
        target, drafter = pair.target, pair.drafter
        if not same_cache:
            target = Target(
                target.model, target.config, kv_bits=kv_bits, kv_group_size=kv_group_size
            )
        if isinstance(draft_model, str):
            drafter = load_drafter(draft_model, target)
        elif draft_model is not None:
            if not isinstance(draft_model, Drafter):
                raise UsageError(
                    "draft_model must be a DSpark drafter or its folder",
                    "for a small language model as the draft use mlx_lm.stream_generate",
                )
            drafter = draft_model
        method, reason = choose_method(target, drafter, "auto", pair.reason)
        made = Session(Pair(target, pair.tokenizer, drafter, method, reason, pair.lookup_block))
        self._variants[key] = made
        return made

    def engine(
        self,
        tokenizer: Any,
        schedule: str,
        method: Method,
        *,
        prefill_chunk: int,
        cache: PromptCache | None = None,
        max_rows: int = 1,
    ) -> Engine:
        """An engine for one call; its policy is the one that earlier calls have taught."""
        pair = self.pair
        chosen, reason = pair.method, pair.reason
        if method != "auto":
            chosen, reason = choose_method(pair.target, pair.drafter, method, pair.reason)
        policy = self._policies.get(schedule)
        if policy is None:
            policy = self._policies[schedule] = make_policy(schedule, cost=self.cost)
        engine = Engine(
            pair.target,
            tokenizer,
            pair.proposers(),
            policy,
            default_method=chosen,
            reason=reason,
            max_rows=max_rows,
            prefill_chunk=prefill_chunk,
            kv_limit=1 << 62,  # as mlx-lm: the caller's own affair
            reuse=cache is not None,
        )
        if cache is not None and cache.prefix is not None:
            engine.intake.prefixes.put(cache.prefix)
            cache.prefix = None
        return engine


def wrapped(tokenizer: Any) -> Any:
    """mlx-lm's wrapper around a plain Hugging Face tokenizer; others as they are."""
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return TokenizerWrapper(tokenizer)
    return tokenizer


def refuse_two(sampler: object, sampling: object) -> None:
    """mlx-lm's ``sampler`` and our ``sampling`` say the same thing in two ways."""
    if sampler is not None and sampling is not None:
        raise UsageError("give sampler or sampling, not both")


def refuse_max_kv_size(max_kv_size: int | None) -> None:
    """A cache that forgets is not lossless."""
    if max_kv_size is not None:
        raise UsageError(
            "max_kv_size drops part of the context, so the text would no longer be the model's own",
            "leave it out; kv_bits=8 halves the memory of the cache",
        )
