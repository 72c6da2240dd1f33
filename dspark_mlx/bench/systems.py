"""The systems of a comparison that run in this process: our engine, and mlx-lm.

A system answers a group of prompts and says what that took. Decoding seconds begin when a
prompt is in the cache and end with the last token, for all systems alike. They are read from
the clock a system is given: the wall's, or the processor time of this process, which on the CPU
backend says what the work costs however busy the machine is. Times to the first token are
always the wall's.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.sample_utils import make_sampler

from ..events import Finished
from ..loading import Pair, make_engine
from ..request import Request, SamplingParams
from ..schedule.cost import CostModel
from ..schedule.policy import Policy
from .results import Run, RunStats
from .workload import Variant

Clock = Callable[[], float]
TokenIds = Sequence[Sequence[int]]  # of several prompts
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
BASELINE = "mlx-lm"
PREFILL_CHUNK = 512  # tokens of a prompt read in one step, the same for our engine and mlx-lm


class System(Protocol):
    """``name`` as the tables show it."""

    name: str

    def run(
        self,
        prompts: TokenIds,
        max_tokens: int,
        temperature: float,
        seed: int,
        concurrency: int = 0,
    ) -> Run:
        """Answer the prompts, ``concurrency`` at a time (0: all); the next joins as one ends.

        A system that serves one request at a time is never given more.
        """


class EngineSystem:
    """Our engine with one method and one policy, which go on learning from run to run."""

    def __init__(
        self,
        pair: Pair,
        variant: Variant,
        policy: Policy,
        max_rows: int,
        *,
        clock: Clock = time.perf_counter,
        cost: CostModel | None = None,
    ) -> None:
        self.name = variant.label
        self._clock = clock
        self.engine = make_engine(
            pair,
            policy,
            max_rows=max_rows,
            prefill_chunk=PREFILL_CHUNK,
            reuse=False,  # every prompt is read anew
            cost=cost,
        )
        self._method = variant.method
        self._ids = itertools.count()

    def run(
        self,
        prompts: TokenIds,
        max_tokens: int,
        temperature: float,
        seed: int,
        concurrency: int = 0,
    ) -> Run:
        waiting = [
            Request(
                f"{self.name}-{next(self._ids)}",
                tokens=tuple(prompt),
                max_tokens=max_tokens,
                sampling=SamplingParams(temperature=temperature, seed=seed),
                method=self._method,  # type: ignore[arg-type]
            )
            for prompt in prompts
        ]
        stats = RunStats([request.id for request in waiting])
        free = concurrency or len(prompts)
        try:
            while waiting or self.engine.active:
                for _ in range(min(free, len(waiting))):
                    self.engine.submit(waiting.pop(0))
                    free -= 1
                began, clock = time.perf_counter(), self._clock()
                events = self.engine.step()
                stats.add(events, time.perf_counter() - began, self._clock() - clock)
                free += sum(isinstance(event, Finished) for event in events)
        except BaseException:
            self.engine.abandon("the benchmark was stopped")
            raise
        mx.clear_cache()
        return stats.run()


class MlxLmSystem:
    """The baseline: mlx-lm on the same loaded weights.

    One prompt is answered by its ``generate_step``, several by its ``BatchGenerator``.
    ``kv_bits`` quantises its KV cache as ours is, except in batches, which it cannot quantise.
    """

    name = BASELINE

    def __init__(
        self,
        model: Any,
        eos: Sequence[int],
        *,
        kv_bits: int | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._model, self._eos, self._clock = model, frozenset(eos), clock
        self._kv: dict[str, Any] = {}
        if kv_bits is not None:
            self._kv = {"kv_bits": kv_bits, "kv_group_size": 64, "quantized_kv_start": 0}

    def run(
        self,
        prompts: TokenIds,
        max_tokens: int,
        temperature: float,
        seed: int,
        concurrency: int = 0,
    ) -> Run:
        mx.random.seed(seed)
        sampler = make_sampler(temp=temperature) if temperature > 0 else None
        if len(prompts) == 1:
            run = self._single(prompts[0], max_tokens, sampler)
        else:
            run = self._batch(prompts, max_tokens, sampler, concurrency or len(prompts))
        mx.synchronize()  # a step it dispatched early must not run into the next measurement
        mx.clear_cache()
        return run

    def _single(self, prompt: Sequence[int], max_tokens: int, sampler: Any) -> Run:
        began = first = time.perf_counter()
        prefilled = self._clock()
        tokens: list[int] = []

        def progress(done: int, total: int) -> None:
            nonlocal prefilled
            if done == total - 1:
                prefilled = self._clock()

        steps = generate_step(
            mx.array(list(prompt), dtype=mx.int32),
            self._model,
            max_tokens=max_tokens,
            sampler=sampler,
            prefill_step_size=PREFILL_CHUNK,
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
        return Run((tuple(tokens),), ended - prefilled, (first - began,))

    def _batch(self, prompts: TokenIds, max_tokens: int, sampler: Any, concurrency: int) -> Run:
        generator: Any = BatchGenerator(
            self._model,
            max_tokens=max_tokens,
            stop_tokens=[[t] for t in self._eos],
            sampler=sampler,
            completion_batch_size=concurrency,
            prefill_batch_size=concurrency,
            prefill_step_size=PREFILL_CHUNK,
        )
        waiting = [list(prompt) for prompt in prompts]
        tokens: dict[int, list[int]] = {}  # by request id, in the order of the prompts
        asked: dict[int, float] = {}
        first: dict[int, float] = {}
        clock = self._clock()

        def insert(count: int) -> None:
            for _ in range(min(count, len(waiting))):
                [uid] = generator.insert([waiting.pop(0)], [max_tokens])
                tokens[uid], asked[uid] = [], time.perf_counter()

        insert(concurrency)
        with generator.stats() as stats:
            while responses := generator.next_generated():
                if not first:
                    clock = self._clock()
                for response in responses:
                    first.setdefault(response.uid, time.perf_counter() - asked[response.uid])
                    tokens[response.uid].append(int(response.token))
                    insert(response.finish_reason is not None)
        seconds = float(stats.generation_time)
        if self._clock is not time.perf_counter:
            # The generator tells generation from prefill by the wall's clock only. By another
            # the first step, which follows the prefill, counts as the mean of the others, and
            # of the rest the share that generation had of the wall's time.
            steps = max(map(len, tokens.values()))
            seconds = (self._clock() - clock) * steps / max(1, steps - 1)
            if concurrency < len(prompts):
                seconds *= stats.generation_time / max(
                    1e-9, stats.generation_time + stats.prompt_time
                )
        generator.close()
        return Run(
            tuple(map(tuple, tokens.values())),
            seconds,
            tuple(first.get(uid, 0.0) for uid in tokens),
        )
