"""The sides of a comparison in this process; this one is our engine's.

A side answers a group of prompts at once and says what it took. Decoding
seconds begin when a prompt is in the cache and end with the last token, for
all alike. They are read from the clock a side is given: the wall's, or the
process's own processor time, which on the CPU backend says what the work costs
however busy the machine is. Times to the first token are always the wall's.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx

from ..events import Finished
from ..loading import Pair, make_engine
from ..request import Request, SamplingParams
from ..schedule.cost import CostModel
from ..schedule.policy import Policy
from .energy import joules, joules_since
from .gathered import Gathered
from .result import Run
from .variants import Variant

Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


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
        cost: CostModel | None = None,
    ) -> None:
        self.name = variant.label
        self._clock = clock
        self.engine = make_engine(
            pair,
            policy,
            max_rows=max_rows,
            prefill_chunk=prefill_chunk,
            reuse=False,  # every prompt is read anew
            cost=cost,
        )
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
        before = joules()
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
        return dataclasses.replace(gathered.run(), joules=joules_since(before))
