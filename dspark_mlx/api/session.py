"""What the functions of ``generate`` keep with a model between calls.

mlx-lm's functions pass a bare model around, so the tokenizer's partner, the
drafter, the measured prices and the policies that learn are attached to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from ..draft.dspark.network import Drafter
from ..draft.strategies import draft_model as small_model
from ..draft.strategies import dspark_drafter, load_for
from ..engine.engine import Engine
from ..engine.prefix_cache import Prefix
from ..engine.text import encode_text
from ..errors import UsageError
from ..loading import Pair, choose_method, make_engine
from ..model.target import Target
from ..request import Method
from ..schedule import CostModel, Policy, make_policy


class PromptCache:
    """A conversation's KV state between calls; stands in for mlx-lm's list of caches.

    Pass it as ``prompt_cache`` with the new tokens only, as with mlx-lm. It
    belongs to one model (``model``, or that of the first call) and, from the
    first call on, to one quantisation of the KV cache; others are refused.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.tokens: list[int] = []
        self.prefix: Prefix | None = None
        # Weak, so that a kept conversation does not keep an unloaded model's memory.
        self._model = weakref.ref(model) if model is not None else None
        self._kv: tuple[int | None, int | None] | None = None

    def claim(self, target: Target) -> None:
        """Bind to ``target``; UsageError when the state inside is another's."""
        kv = (target.kv_bits, target.kv_group_size)
        if self._model is not None and self._model() is not target.model:
            raise UsageError(
                "this prompt_cache belongs to another model", "make one for each model"
            )
        if self.tokens and self._kv not in (None, kv):
            raise UsageError(
                f"this prompt_cache was begun with {_describe(self._kv)}, not {_describe(kv)}",
                "keep kv_bits and kv_group_size within a conversation",
            )
        self._model, self._kv = weakref.ref(target.model), kv


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
            with target.model_lock:
                target.check()
            method, reason = choose_method(target, None, "auto", "no drafter was given")
            session = cls(Pair(target, tokenizer, None, method, reason))
            session.attach()
        return session

    def variant(
        self,
        draft_model: nn.Module | str | None,
        kv_bits: int | None,
        kv_group_size: int | None = None,
    ) -> Session:
        """The same model with another drafter or KV cache; itself where neither differs."""
        pair = self.pair
        same_cache = kv_bits is None or (
            kv_bits == pair.target.kv_bits and kv_group_size in (None, pair.target.kv_group_size)
        )
        if draft_model is None and same_cache:
            return self
        drafter_key = draft_model if isinstance(draft_model, str) else id(draft_model)
        key = (drafter_key, None if same_cache else (kv_bits, kv_group_size))
        if key in self._variants:
            return self._variants[key]
        target, drafter = pair.target, pair.drafter
        if not same_cache:
            target = Target(
                target.model, target.config, kv_bits=kv_bits, kv_group_size=kv_group_size
            )
            target.check()
        if isinstance(draft_model, str):
            drafter = load_for(draft_model, target, pair.tokenizer)
        elif isinstance(draft_model, Drafter):
            drafter = dspark_drafter(draft_model, target)
        elif isinstance(draft_model, nn.Module):  # mlx-lm's own meaning: a small language model
            model = Target(draft_model)
            model.check()
            drafter = small_model(model, None, target, pair.tokenizer)
        elif draft_model is not None:
            raise UsageError("draft_model must be a drafter, a small language model or a folder")
        method, reason = choose_method(target, drafter, "auto", pair.reason)
        made = Session(
            Pair(target, pair.tokenizer, drafter, method, reason, pair.lookup_block, pair.copy)
        )
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
        if cache is not None:
            cache.claim(pair.target)
        return make_engine(
            pair,
            policy,
            tokenizer=tokenizer,
            default_method=chosen,
            reason=reason,
            max_rows=max_rows,
            prefill_chunk=prefill_chunk,
            kv_limit=1 << 62,  # as in mlx-lm, memory is the caller's own affair
            reuse=cache is not None,
            monitor=None,
        )


def _describe(kv: tuple[int | None, int | None] | None) -> str:
    bits, group = kv or (None, None)
    if bits is None:
        return "an unquantised KV cache"
    return f"a KV cache of {bits} bits" + (f" in groups of {group}" if group else "")


def wrapped(tokenizer: Any) -> Any:
    """mlx-lm's wrapper around a plain Hugging Face tokenizer; others as they are."""
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return TokenizerWrapper(tokenizer)
    return tokenizer


def prompt_ids(tokenizer: Any, prompt: Any) -> tuple[int, ...]:
    """A prompt's ids: text is encoded, as by mlx-lm; a list or an array of ids is taken."""
    if isinstance(prompt, str):
        return tuple(encode_text(tokenizer, prompt))
    if isinstance(prompt, mx.array):
        prompt = prompt.tolist()
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | bytearray):
        raise UsageError("a prompt is text, a list of token ids or an array of them")
    return tuple(prompt)


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
