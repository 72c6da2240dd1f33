"""The side every comparison has: mlx-lm on the loaded weights."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.sample_utils import make_sampler

from .energy import joules, joules_since
from .result import Run
from .sides import Clock

BASELINE = "mlx-lm"


class MlxLmSide:
    """mlx-lm's own ``generate_step``; several prompts at once by its ``BatchGenerator``.

    ``kv_bits`` quantises its KV cache as ours is, except in batches, which it
    cannot quantise.
    """

    name = BASELINE

    def __init__(
        self,
        model: Any,
        eos: Sequence[int],
        *,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        prefill_chunk: int = 512,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._model, self._eos, self._chunk = model, frozenset(eos), prefill_chunk
        self._clock = clock
        self._kv: dict[str, Any] = {}
        if kv_bits is not None:
            self._kv = {
                "kv_bits": kv_bits, "kv_group_size": kv_group_size, "quantized_kv_start": 0
            }  # fmt: skip

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        temperature: float,
        seed: int,
        at_once: int = 0,
    ) -> Run:
        mx.random.seed(seed)
        sampler = make_sampler(temp=temperature) if temperature > 0 else None
        before = joules()
        if len(prompts) == 1:
            run = self._single(prompts[0], max_tokens, sampler)
        else:
            run = self._batch(prompts, max_tokens, sampler, at_once or len(prompts))
        mx.clear_cache()
        return dataclasses.replace(run, joules=joules_since(before))

    def _single(self, prompt: Sequence[int], max_tokens: int, sampler: Any) -> Run:
        began = first = time.perf_counter()
        ready = self._clock()
        tokens: list[int] = []

        def progress(done: int, total: int) -> None:
            nonlocal ready
            if done == total - 1:
                ready = self._clock()

        steps = generate_step(
            mx.array(list(prompt), dtype=mx.int32),
            self._model,
            max_tokens=max_tokens,
            sampler=sampler,
            prefill_step_size=self._chunk,
            prompt_progress_callback=progress,
            **self._kv,
        )
        for token, _ in steps:
            if not tokens:
                first = time.perf_counter()
            tokens.append(int(token))
            if token in self._eos or len(tokens) == max_tokens:
                break
        ended = self._clock()
        steps.close()
        mx.synchronize()  # a step it began ahead of need must not run into the next measurement
        return Run((tuple(tokens),), ended - ready, (first - began,))

    def _batch(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, sampler: Any, at_once: int
    ) -> Run:
        clock = self._clock()
        generator = BatchGenerator(
            self._model,
            max_tokens=max_tokens,
            stop_tokens=[[t] for t in self._eos],
            sampler=sampler,
            completion_batch_size=at_once,
            prefill_batch_size=at_once,
            prefill_step_size=self._chunk,
        )
        waiting = [list(prompt) for prompt in prompts][::-1]
        tokens: dict[int, list[int]] = {}  # of a request, in the order of the prompts
        asked: dict[int, float] = {}
        first: dict[int, float] = {}

        def insert(count: int) -> None:
            for _ in range(min(count, len(waiting))):
                [uid] = generator.insert([waiting.pop()], [max_tokens])
                tokens[uid], asked[uid] = [], time.perf_counter()

        insert(at_once)
        with generator.stats() as stats:
            while responses := generator.next_generated():
                if not first:
                    clock = self._clock()
                for response in responses:
                    first.setdefault(response.uid, time.perf_counter() - asked[response.uid])
                    tokens[response.uid].append(int(response.token))
                    insert(response.finish_reason is not None)
        # By another clock than the generator's own the first step cannot be told from prefill:
        # the mean of the others stands in for it. What was read later has its share of the time.
        steps = max(map(len, tokens.values()))
        spent = (self._clock() - clock) * steps / max(1, steps - 1)
        if at_once < len(prompts):
            spent *= stats.generation_time / max(1e-9, stats.generation_time + stats.prompt_time)
        generator.close()
        mx.synchronize()
        return Run(
            tuple(map(tuple, tokens.values())),
            float(stats.generation_time) if self._clock is time.perf_counter else spent,
            tuple(first.get(uid, 0.0) for uid in tokens),
        )
