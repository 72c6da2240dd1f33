"""mlx-lm's functions with DSpark inside: load, generate, stream_generate, batch_generate.

Same names, argument orders and response fields; a script written for mlx-lm
needs only its import changed. What mlx-lm offers and speculation cannot honour
is refused with the reason.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.sample_utils import greedy_sampler

from ..engine.engine import Engine
from ..errors import DsparkError, ModelError, UsageError
from ..events import Event, Finished, Prefill, StepDone
from ..loading import LoadOptions, load_pair, measure
from ..registry import Registry
from ..request import Cuts, Method, Request, SamplingParams
from .batched import batch_generate
from .session import PromptCache, Session, prompt_ids, refuse_max_kv_size, refuse_two, wrapped

_ids = itertools.count()


@dataclass
class GenerationResponse:
    """One token of a reply: mlx-lm's fields, then ours.

    ``drafted``, ``scheduled`` and ``accepted`` count the draft of the round the
    token came from; ``confidence`` and ``survival`` are the token's own, None
    for the target's tokens.
    """

    text: str
    token: int
    logprobs: mx.array
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None = None
    drafted: int = 0
    scheduled: int = 0
    accepted: int = 0
    confidence: float | None = None
    survival: float | None = None


def make_prompt_cache(model: nn.Module, max_kv_size: int | None = None) -> PromptCache:
    """An empty prompt cache. ``max_kv_size`` is refused: a cache that forgets is not lossless."""
    refuse_max_kv_size(max_kv_size)
    return PromptCache(model)


def load(
    path_or_hf_repo: str,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    drafter: str | None = None,
    method: Method = "auto",
    **options: Any,
) -> tuple[Any, ...]:
    """A model and its tokenizer, with the drafter that belongs to it attached.

    ``path_or_hf_repo`` is a name from ``models.toml``, a folder or a Hub id;
    ``revision`` a branch, tag or commit of the latter; ``drafter`` a folder or
    Hub id ("none": without). With ``return_config`` the model's config follows
    as a third value. ``options`` are further fields of ``loading.LoadOptions``.
    Raises DsparkError.
    """
    for name, value in (
        ("tokenizer_config", tokenizer_config),
        ("model_config", model_config),
        ("adapter_path", adapter_path),
        ("trust_remote_code", trust_remote_code),
    ):
        if value:
            raise UsageError(
                f"{name} is not supported by dspark_mlx.load",
                "load with mlx_lm.load and pass that model to stream_generate",
            )
    if not isinstance(path_or_hf_repo, str | Path) or not isinstance(drafter, str | Path | None):
        raise UsageError("a model and a drafter are given by name, folder or Hub id")
    path_or_hf_repo, drafter = str(path_or_hf_repo), drafter and str(drafter)
    known = {field.name for field in dataclasses.fields(LoadOptions)} - {"model"}
    for name in options:
        if name not in known:
            raise UsageError(
                f"load has no option {name!r}", f"choose from {', '.join(sorted(known))}"
            )
    where = f"{path_or_hf_repo}@{revision}" if revision else path_or_hf_repo
    entry = Registry.load().resolve(where)
    chosen = LoadOptions(where, drafter=drafter, method=method, **options)
    pair = load_pair(entry, chosen)
    session = Session(pair, measure(pair, entry, chosen))
    session.attach()
    if return_config:
        return pair.target.model, pair.tokenizer, pair.target.config
    return pair.target.model, pair.tokenizer


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | Sequence[int],
    max_tokens: int = 256,
    draft_model: nn.Module | str | None = None,
    *,
    sampler: Callable[[mx.array], mx.array] | None = None,
    logits_processors: Sequence[Callable[..., mx.array]] | None = None,
    prompt_cache: PromptCache | None = None,
    prefill_step_size: int = 2048,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    num_draft_tokens: int | None = None,
    max_kv_size: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int | None = None,
    quantized_kv_start: int = 0,
    input_embeddings: mx.array | None = None,
    sampling: SamplingParams | None = None,
    cuts: Cuts | None = None,
    stop: str | Sequence[str] | None = None,
    method: Method = "auto",
    schedule: str = "auto",
    on_event: Callable[[Event], None] | None = None,
) -> Generator[GenerationResponse, None, None]:
    """Generate text token by token, as ``mlx_lm.stream_generate`` does, only sooner.

    ``model`` comes from ``load`` here or from ``mlx_lm.load``. ``draft_model``
    is a DSpark drafter, a small language model of mlx-lm's, or the folder of one
    (default: the drafter attached). Sampling is
    mlx-lm's ``sampler`` (greedy when None) or our ``sampling``, which also
    makes independent and coupled drafts possible. ``num_draft_tokens`` bounds
    each draft. ``method`` and ``schedule`` as on the command line;
    ``on_event`` receives the engine's events.
    Raises DsparkError for what cannot be honoured.
    """
    refuse_max_kv_size(max_kv_size)
    if input_embeddings is not None:
        raise UsageError("input embeddings cannot be drafted for", "use mlx_lm.stream_generate")
    if kv_bits is not None and quantized_kv_start:
        raise UsageError(
            "quantized_kv_start is not supported: the KV cache is quantised from the first token",
            "leave it out",
        )
    if prompt_cache is not None and not isinstance(prompt_cache, PromptCache):
        raise UsageError(
            "this prompt_cache is mlx-lm's, which cannot be rolled back",
            "make one with dspark_mlx.make_prompt_cache",
        )
    refuse_two(sampler, sampling)
    if cuts is not None and num_draft_tokens is not None:
        raise UsageError("give num_draft_tokens or cuts, not both", "Cuts has draft_length")
    tokenizer = wrapped(tokenizer)
    session = Session.of(model, tokenizer).variant(draft_model, kv_bits, kv_group_size)
    engine = session.engine(
        tokenizer, schedule, method, prefill_chunk=prefill_step_size, cache=prompt_cache
    )
    ids = prompt_ids(tokenizer, prompt)
    if prompt_cache is not None:
        ids = (*prompt_cache.tokens, *ids)
    request = Request(
        id=f"generate-{next(_ids)}",
        tokens=ids,
        max_tokens=max_tokens,
        sampling=sampling or SamplingParams(),
        cuts=cuts or Cuts(draft_length=num_draft_tokens),
        stop=(stop,) if isinstance(stop, str | int) else tuple(stop or ()),
        logits_processors=tuple(logits_processors or ()),
        sampler=None if sampler is greedy_sampler else sampler,
    )
    yield from _stream(engine, request, prompt_progress_callback, on_event, prompt_cache)


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int],
    verbose: bool = False,
    **kwargs: Any,
) -> str:
    """The whole reply as text; ``kwargs`` as for ``stream_generate``."""
    if verbose:
        print("=" * 10)
    text = ""
    response = None
    for response in stream_generate(model, tokenizer, prompt, **kwargs):
        if verbose:
            print(response.text, end="", flush=True)
        text += response.text
    if verbose:
        print(f"\n{'=' * 10}")
        if response is None or not text:
            print("No text generated for this prompt")
            return text
        print(f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec")
        print(
            f"Generation: {response.generation_tokens} tokens, "
            f"{response.generation_tps:.3f} tokens-per-sec"
        )
        print(f"Peak memory: {response.peak_memory:.3f} GB")
    return text


def _stream(
    engine: Engine,
    request: Request,
    progress: Callable[[int, int], None] | None,
    on_event: Callable[[Event], None] | None,
    cache: PromptCache | None,
) -> Generator[GenerationResponse, None, None]:
    engine.submit(request)
    if cache is not None and cache.prefix is not None:
        engine.prefiller.prefixes.put(cache.prefix)  # only now: a refused call leaves it as it was
        cache.prefix = None
    text: list[int] = list(request.tokens or ())
    before = len(cache.tokens) if cache is not None else 0
    prompt_tokens = len(text) - before
    clock = _Rates(len(text))
    if progress is not None:
        progress(0, prompt_tokens)
    try:
        while engine.active:
            events = engine.step()
            ending = next((e for e in events if isinstance(e, Finished)), None)
            if ending is not None and ending.reason == "error":
                raise ModelError(ending.message, ending.hint)
            for event in events:
                if on_event is not None:
                    on_event(event)
                if isinstance(event, Prefill):
                    clock.prefilled(event)
                    if progress is not None and event.done > before:
                        progress(event.done - before, prompt_tokens)
                if not isinstance(event, StepDone):
                    continue
                if progress is not None and len(text) == before + prompt_tokens:
                    progress(prompt_tokens, prompt_tokens)
                logits = engine.logits_of(request.id)
                row = event.rows[0]
                for k, token in enumerate(row.tokens):
                    text.append(token.id)
                    last = ending is not None and k == len(row.tokens) - 1
                    one = logits[k] if logits is not None else mx.zeros((0,))
                    yield GenerationResponse(
                        text=token.text + (ending.tail if last and ending else ""),
                        token=token.id,
                        logprobs=one - mx.logsumexp(one, keepdims=True),
                        from_draft=token.origin == "draft",
                        prompt_tokens=prompt_tokens,
                        generation_tokens=len(text) - before - prompt_tokens,
                        **clock.rates(len(text) - before - prompt_tokens),
                        peak_memory=event.memory.peak / 1e9,
                        finish_reason=ending.reason if last and ending else None,
                        drafted=len(row.drafted),
                        scheduled=row.scheduled,
                        accepted=row.accepted,
                        confidence=token.confidence,
                        survival=token.survival,
                    )
    finally:
        engine.cancel(request.id)
        if engine.active:
            engine.step()
        if cache is not None:
            cache.tokens = text
            cache.prefix = engine.prefiller.prefixes.take(
                text, engine.batch.proposers.get(engine.prefiller.default_method)
            )


class _Rates:
    """Prompt and generation speed as mlx-lm reports them."""

    def __init__(self, prompt_tokens: int) -> None:
        self._now = time.perf_counter
        self._prompt = prompt_tokens
        self._start = self._now()
        self._begun: float | None = None

    def prefilled(self, event: Prefill) -> None:
        if event.done == event.total:
            self._begun = self._now()
            self._prompt -= event.reused

    def rates(self, generated: int) -> dict[str, float]:
        begun = self._begun or self._now()
        return {
            "prompt_tps": self._prompt / max(begun - self._start, 1e-9),
            "generation_tps": generated / max(self._now() - begun, 1e-9),
        }


__all__ = [
    "DsparkError",
    "GenerationResponse",
    "PromptCache",
    "batch_generate",
    "generate",
    "load",
    "make_prompt_cache",
    "stream_generate",
]
