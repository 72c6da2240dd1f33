"""The sides of a comparison in this process: mlx-lm on the loaded weights, and our engine.

A side answers a group of prompts at once and says what it took. Decoding
seconds begin when a prompt is in the cache and end with the last token, for
both alike. They are read from the clock a side is given: the wall's, or the
process's own processor time, which on the CPU backend says what the work costs
however busy the machine is. Times to the first token are always the wall's.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.sample_utils import make_sampler

from ..engine import Engine
from ..errors import ModelError
from ..events import Event, Finished, Prefill, StepDone
from ..loading import Pair
from ..request import Request, SamplingParams
from ..schedule.load import LoadMonitor
from ..schedule.load_probe import probe
from ..schedule.policy import Policy
from . import energy
from .result import Run
from .shape import Shape, shared
from .variants import Variant

BASELINE = "mlx-lm"
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
CLEAR_EVERY = 16


class Side(Protocol):
    """``name`` as the tables show it.

    ``run`` answers the prompts ``at_once`` at a time (0: all), the next one joining when a
    reply ends; a side that serves one at a time is never given more.
    """

    name: str

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        temperature: float,
        seed: int,
        at_once: int = 0,
    ) -> Run: ...


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
        before = energy.joules()
        if len(prompts) == 1:
            run = self._single(prompts[0], max_tokens, sampler)
        else:
            run = self._batch(prompts, max_tokens, sampler, at_once or len(prompts))
        mx.clear_cache()
        return _with_joules(run, before)

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


class EngineSide:
    """Our engine with one method and one policy, which go on learning from run to run."""

    def __init__(
        self,
        pair: Pair,
        variant: Variant,
        policy: Policy,
        max_rows: int,
        *,
        prefill_chunk: int = 512,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.name = variant.label
        self._clock = clock
        self.engine = make_engine(pair, policy, max_rows, prefill_chunk)
        self._method = variant.method
        self._ids = itertools.count()

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        temperature: float,
        seed: int,
        at_once: int = 0,
    ) -> Run:
        before = energy.joules()
        ids = [f"{self.name}-{next(self._ids)}" for _ in prompts]
        waiting = [
            Request(
                name,
                tokens=tuple(prompt),
                max_tokens=max_tokens,
                sampling=SamplingParams(temperature=temperature, seed=seed),
                method=self._method,  # type: ignore[arg-type]
            )
            for name, prompt in zip(ids, prompts, strict=True)
        ][::-1]
        free = at_once or len(prompts)
        gathered = Gathered(ids)
        try:
            while waiting or self.engine.active:
                for _ in range(min(free, len(waiting))):
                    self.engine.submit(waiting.pop())
                    free -= 1
                began, clock = time.perf_counter(), self._clock()
                events = self.engine.step()
                gathered.add(events, time.perf_counter() - began, self._clock() - clock)
                free += sum(isinstance(event, Finished) for event in events)
        except BaseException:
            self.engine.abandon("the benchmark was stopped")
            raise
        mx.clear_cache()
        return _with_joules(gathered.run(), before)


def make_engine(
    pair: Pair, policy: Policy, max_rows: int, prefill_chunk: int = 512, reuse: bool = False
) -> Engine:
    """An engine with proposers of its own; without ``reuse`` every prompt is read anew."""
    return Engine(
        pair.target,
        pair.tokenizer,
        pair.proposers(),
        policy,
        default_method=pair.method,
        reason=pair.reason,
        max_rows=max_rows,
        prefill_chunk=prefill_chunk,
        reuse=reuse,
        monitor=LoadMonitor(probe, time.monotonic),
    )


class Gathered:
    """The events of one group's run, summed up."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.steps: list[StepDone] = []
        self._tokens: dict[str, list[int]] = {name: [] for name in ids}
        self._ends: dict[str, Finished] = {}
        self._seconds = self._wall = 0.0
        self._rules: Counter[str] = Counter()
        self._rounds: list[tuple[Shape, float]] = []

    def add(self, events: Sequence[Event], wall: float, seconds: float | None = None) -> None:
        """``wall`` and ``seconds`` (by the chosen clock) are of the whole step.

        Where a chunk of prefill was part of it, the round's share of both is counted.
        """
        seconds = wall if seconds is None else seconds
        prefilled = any(isinstance(event, Prefill) for event in events)
        for event in events:
            if isinstance(event, StepDone):
                self.steps.append(event)
                share = min(1.0, event.round_seconds / wall) if prefilled and wall > 0 else 1.0
                self._seconds += share * seconds
                self._rounds.append((self._shape(event), share * seconds))
                self._wall += share * wall
                self._rules[event.policy] += 1
                for row in event.rows:
                    self._tokens[row.request_id] += [t.id for t in row.tokens]
            elif isinstance(event, Finished):
                if event.reason in ("error", "cancelled"):
                    raise ModelError(f"a reply failed: {event.message or event.reason}", event.hint)
                self._ends[event.request_id] = event

    def _shape(self, step: StepDone) -> Shape:
        drafted = [len(row.drafted) for row in step.rows]
        most = max(drafted, default=0)
        before = self._rounds[-1][0].drafted if self._rounds else 1
        return Shape(
            rows=len(step.rows),
            drafting=sum(bool(row.drafted) and not row.copied for row in step.rows),
            drafted=most,
            scheduled=max((row.scheduled for row in step.rows), default=0),
            looked=step.draft_seconds > 0.0,
            after_draft=not most and before > 0,
        )

    def run(self) -> Run:
        ends = [self._ends[name] for name in self._tokens]
        width = max((len(e.reached) for e in ends), default=0)

        def column(values: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
            return tuple(sum(v[k] for v in values if k < len(v)) for k in range(width))

        return Run(
            tokens=tuple(tuple(t) for t in self._tokens.values()),
            seconds=self._seconds,
            first_token_seconds=tuple(e.first_token_seconds for e in ends),
            row_rounds=sum(e.rounds for e in ends),
            drafted=sum(e.drafted for e in ends),
            scheduled=sum(e.scheduled for e in ends),
            accepted=sum(e.accepted for e in ends),
            reached=column([e.reached for e in ends]),
            survived=column([e.survived for e in ends]),
            wall_seconds=self._wall,
            draft_seconds=sum(s.draft_seconds for s in self.steps),
            verify_seconds=sum(s.verify_seconds for s in self.steps),
            host_seconds=sum(s.host_seconds for s in self.steps),
            rules=tuple(sorted(self._rules.items())),
            rounds=tuple(shared(self._rounds)),
        )


def _with_joules(run: Run, before: float | None) -> Run:
    after = energy.joules()
    if before is None or after is None or after < before:  # the counter wraps now and then
        return run
    return dataclasses.replace(run, joules=after - before)
