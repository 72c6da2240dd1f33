"""``batch_generate``: replies to several prompts at once, in mlx-lm's shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchResponse
from mlx_lm.generate_utils import BatchCounters, BatchCountersSnapshot
from mlx_lm.sample_utils import greedy_sampler

from ..engine.engine import Engine
from ..errors import ModelError, UsageError
from ..events import Finished, StepDone
from ..request import Method, Request, SamplingParams
from .session import Session, prompt_ids, refuse_max_kv_size, refuse_two, wrapped


def batch_generate(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str | mx.array | Sequence[int]],
    prompt_caches: None = None,
    max_tokens: int | Sequence[int] = 128,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    *,
    sampler: Callable[[mx.array], mx.array] | None = None,
    logits_processors: Sequence[Callable[..., mx.array]] | None = None,
    max_kv_size: int | None = None,
    completion_batch_size: int = 8,
    prefill_batch_size: int = 1,
    prefill_step_size: int = 512,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    method: Method = "auto",
    schedule: str = "auto",
    max_rows: int | None = None,
    draft_model: nn.Module | str | None = None,
    kv_bits: int | None = None,
) -> Any:
    """Replies to several prompts at once, as mlx-lm's ``BatchResponse``.

    Each reply is what its prompt alone would have given. At most ``max_rows``
    (``completion_batch_size`` in mlx-lm's words) are decoded at a time; the
    others follow as rows become free. Prompts are prefilled one after another,
    ``prefill_step_size`` tokens at a time, whatever ``prefill_batch_size`` says.
    Raises DsparkError for what cannot be honoured.
    """
    if prompt_caches is not None or return_prompt_caches:
        raise UsageError("prompt_caches are not supported here", "use stream_generate for chats")
    refuse_max_kv_size(max_kv_size)
    refuse_two(sampler, sampling)
    tokenizer = wrapped(tokenizer)
    session = Session.of(model, tokenizer).variant(draft_model, kv_bits)
    engine = session.engine(
        tokenizer,
        schedule,
        method,
        prefill_chunk=prefill_step_size,
        max_rows=completion_batch_size if max_rows is None else max_rows,
    )
    if isinstance(prompts, str | bytes):
        raise UsageError("prompts is a list of prompts, not one", "put it in a list")
    n = len(prompts)
    limits = list(max_tokens) if isinstance(max_tokens, Sequence) else [max_tokens] * n
    params = SamplingParams() if sampling is None else sampling
    each = [params] * n if isinstance(params, SamplingParams) else list(params)
    if not len(limits) == len(each) == n:
        raise UsageError(f"{n} prompts need {n} values of max_tokens and sampling, or one for all")
    for i, (prompt, limit, one) in enumerate(zip(prompts, limits, each, strict=True)):
        engine.submit(
            Request(
                str(i),
                tokens=prompt_ids(tokenizer, prompt),
                max_tokens=limit,
                sampling=one,
                logits_processors=tuple(logits_processors or ()),
                sampler=None if sampler is greedy_sampler else sampler,
            )
        )
    tokens: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    counters = BatchCounters()
    start = BatchCountersSnapshot()
    ended = 0
    while engine.active:
        for event in engine.step():
            if isinstance(event, StepDone):
                counters.generation_steps += 1
                counters.decode_time += event.round_seconds
                for row in event.rows:
                    ids = [t.id for t in row.tokens]
                    tokens[int(row.request_id)] += ids
                    if return_logprobs:
                        logprobs[int(row.request_id)] += _logprobs(engine, row.request_id, ids)
                    counters.generation_tokens += len(row.tokens)
            elif isinstance(event, Finished):
                ended += 1
                if event.reason == "error":
                    raise ModelError(event.message, event.hint)
                counters.prompt_tokens += event.prompt_tokens - event.reused_tokens
                counters.prompt_time += event.prompt_seconds
                if event.reason == "stop":
                    for lists in (tokens, logprobs):
                        del lists[int(event.request_id)][-1:]
                if verbose:
                    print(f"[batch_generate] Finished processing {ended}/{n} ...", end="\r")
    if verbose:
        print(f"[batch_generate] Finished processing {ended}/{n}")
    end = BatchCountersSnapshot(**vars(counters))
    stats = BatchCountersSnapshot.between(start, end)
    texts = [tokenizer.decode(ids) for ids in tokens]
    return BatchResponse(
        texts,
        stats,
        None,
        tokens if return_token_ids else None,
        logprobs if return_logprobs else None,
    )


def _logprobs(engine: Engine, request_id: str, ids: Sequence[int]) -> list[float]:
    """The log-probabilities of the tokens a row has just committed."""
    logits = engine.logits_of(request_id)
    if logits is None or not ids:
        return []
    logits = logits[: len(ids)].astype(mx.float32)
    chosen = mx.take_along_axis(logits, mx.array(list(ids))[:, None], axis=-1)[:, 0]
    values: Any = (chosen - mx.logsumexp(logits, axis=-1)).tolist()
    return list(values)
