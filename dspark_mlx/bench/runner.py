"""Runs every side on every prompt, interleaved, and checks each reply against the reference.

All sides see the same prompt before any sees the next, and who goes first
rotates, so that heat, other programs and clock speed meet all of them alike.
The reference at temperature 0 is mlx-lm's own greedy text on the same weights,
and above it plain decoding with the same seed. Knows no command line.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import mlx.nn as nn

from .. import __version__
from ..engine.text import encode_chat, encode_text
from ..errors import DsparkError, UsageError
from ..loading import Pair
from ..profiling import mlx_version
from ..request import SamplingParams
from ..schedule import make_policy
from .lossless import fork_at, margin, near_tie
from .mlx_lm_side import BASELINE, MlxLmSide
from .prompts import Prompt
from .result import CellName, Fork, Results, Run
from .sides import CLOCKS, EngineSide, Side
from .tables import plural
from .variants import Variant

_Job = tuple[int, float, int, list[int]]  # repeat, temperature, concurrency, prompt numbers
Progress = Callable[[int, int, str], None]
WARM_TOKENS = 8
WAVES = 4  # prompts of a group for each that is served at once


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. ``peers`` take part at concurrency 1 only. ``clock``: one of ``CLOCKS``."""

    prompts: Sequence[Prompt]
    sides: Sequence[Side]
    peers: Sequence[Side] = ()
    concurrency: Sequence[int] = (1,)
    temperatures: Sequence[float] = (0.0,)
    tokens: int = 64
    repeats: int = 1
    seed: int = 0
    clock: str = "wall"
    about: dict[str, Any] = field(default_factory=dict)


class Runner:
    """One benchmark on one loaded pair."""

    def __init__(
        self, pair: Pair, plan: Plan, progress: Progress = lambda done, total, what: None
    ) -> None:
        self.pair, self.plan = pair, plan
        self._progress = progress
        self._peers = list(plan.peers)
        self._eos = tuple(pair.tokenizer.eos_token_ids)
        self._baseline = MlxLmSide(
            pair.target.model, self._eos, kv_bits=pair.target.kv_bits, clock=CLOCKS[plan.clock]
        )
        self._plain = EngineSide(pair, Variant("none", "off", "plain"), make_policy("off"), 1)
        self._encoded = [encode(pair, prompt) for prompt in plan.prompts]
        self._checked: Counter[str] = Counter()  # replies of each side
        self._references: dict[tuple[int, float, int], tuple[int, ...]] = {}
        self.results = Results(self._about(), BASELINE)
        if pair.target.kv_bits and max(plan.concurrency) > 1:
            self.results.notes.append(
                "mlx-lm does not quantise the KV cache of batches: its batched rates are without"
            )

    def run(self) -> Results:
        """Measure everything. Ctrl+C ends it with what was measured so far."""
        plan = self.plan
        self._warm()
        jobs = [
            (repeat, temperature, count, group)
            for repeat in range(plan.repeats)
            for temperature in plan.temperatures
            for count in plan.concurrency
            for group in self._groups(count)
        ]
        total = sum(len(self._sides(count)) for _, _, count, _ in jobs)
        self.results.sides = [side.name for side in (self._baseline, *plan.sides, *plan.peers)]
        try:
            self._all(jobs, total)
        except KeyboardInterrupt:
            if not self.results.runs:
                raise
            self.results.stopped = True
            self.results.notes.append("stopped early: what was measured until then is shown")
        forks = Counter(fork.side for fork in self.results.forks)
        self.results.notes += [
            f"{peer.name}: {n - forks[peer.name]} of {plural(n, 'reply', 'replies')} agree, "
            "token by token"
            for peer in plan.peers
            if (n := self._checked[peer.name])
        ]
        self.results.about["load_average_after"] = _load_average()
        return self.results

    def _all(self, jobs: Sequence[_Job], total: int) -> None:
        plan, done = self.plan, 0
        for turn, (repeat, temperature, count, group) in enumerate(jobs):
            sides = self._sides(count)
            first = turn % len(sides)
            for side in [*sides[first:], *sides[:first]]:
                domain = plan.prompts[group[0]].domain
                self._progress(done, total, f"{side.name}, {domain}")
                prompts = [self._encoded[i] for i in group]
                run = self._ask(side, prompts, temperature, plan.seed + group[0], at_once=count)
                done += 1
                if run is None:
                    continue
                self.results.add(CellName(side.name, domain, temperature, count), repeat, run)
                if side is not self._baseline or temperature == 0:
                    self._check(side, group, temperature, count, run.tokens)
        self._progress(total, total, "")

    def _sides(self, count: int) -> list[Side]:
        peers = self._peers if count == 1 else []
        return [self._baseline, *self.plan.sides, *peers]

    def _groups(self, count: int) -> list[list[int]]:
        """Prompt numbers by domain, the domains in turn.

        Where several are served at once a few wait for each that is: as one ends the next
        joins, else most of a group's time would be that of its last replies, alone.
        """
        size = count * WAVES if count > 1 else 1
        by_domain: dict[str, list[int]] = {}
        for i, prompt in enumerate(self.plan.prompts):
            by_domain.setdefault(prompt.domain, []).append(i)
        split = [
            [numbers[k : k + size] for k in range(0, len(numbers), size)]
            for numbers in by_domain.values()
        ]
        longest = max(map(len, split))
        return [groups[k] for k in range(longest) for groups in split if k < len(groups)]

    def _warm(self) -> None:
        """Every side once at every place, so that kernels are compiled and caches allocated."""
        plan = self.plan
        for count in plan.concurrency:
            group = [self._encoded[i % len(self._encoded)] for i in range(count)]
            for temperature in plan.temperatures:
                for side in self._sides(count):
                    self._progress(0, 0, f"warming up {side.name}")
                    self._ask(side, group, temperature, plan.seed, min(WARM_TOKENS, plan.tokens))

    def _ask(
        self,
        side: Side,
        prompts: Sequence[Sequence[int]],
        temperature: float,
        seed: int,
        tokens: int | None = None,
        at_once: int = 0,
    ) -> Run | None:
        """None when ``side`` is a peer that failed: it is named and takes no further part."""
        try:
            return side.run(prompts, tokens or self.plan.tokens, temperature, seed, at_once)
        except DsparkError as error:
            if side not in self._peers:
                raise
            self._peers.remove(side)
            self.results.notes.append(f"not compared further: {error}")
            return None

    # -- losslessness -------------------------------------------------------------------

    def _check(
        self,
        side: Side,
        group: Sequence[int],
        temperature: float,
        count: int,
        replies: Sequence[Sequence[int]],
    ) -> None:
        if temperature > 0 and side in self.plan.peers:
            return  # a peer draws its own random numbers
        for i, reply in zip(group, replies, strict=True):
            reference = self._reference(i, temperature, group[0])
            self.results.compared += 1
            self._checked[side.name] += 1
            at = fork_at(reply, reference, self._eos)
            if at is None:
                continue
            params = SamplingParams(temperature=temperature, seed=self.plan.seed + group[0])
            gap, top = margin(self.pair.target.model, [*self._encoded[i], *reference[:at]], params)
            self.results.forks.append(
                Fork(
                    side=side.name,
                    prompt=self.plan.prompts[i].title,
                    position=at,
                    margin=gap,
                    near_tie=self._tie(gap, top),
                    temperature=temperature,
                    concurrency=count,
                )
            )

    def _reference(self, i: int, temperature: float, first: int) -> tuple[int, ...]:
        """What prompt ``i`` must be answered with; ``first`` names its group's seed."""
        key = (i, temperature, first if temperature else 0)
        found = self._references.get(key)
        if found is None:
            side = self._plain if temperature else self._baseline
            run = side.run(
                [self._encoded[i]], self.plan.tokens, temperature, self.plan.seed + first
            )
            found = self._references[key] = run.tokens[0]
        return found

    def _tie(self, gap: float, top: float) -> bool:
        target = self.pair.target
        quantised = bool(target.kv_bits) or any(
            isinstance(m, nn.QuantizedLinear) for m in target.model.modules()
        )
        return near_tie(gap, top, target.dtype, quantised)

    def _about(self) -> dict[str, Any]:
        plan = self.plan
        return {
            **plan.about,
            "dspark_mlx": __version__,
            "mlx": mlx_version(),
            "machine": f"{platform.system()} {platform.machine()}",
            "started": datetime.now().astimezone().isoformat(timespec="seconds"),
            "dtype": str(self.pair.target.dtype).removeprefix("mlx.core."),
            "prompts": len(plan.prompts),
            "tokens": plan.tokens,
            "repeats": plan.repeats,
            "clock": plan.clock,
            "load_average_before": _load_average(),
        }


def encode(pair: Pair, prompt: Prompt) -> list[int]:
    """The prompt's ids; a model without a chat template continues the text as it is."""
    if prompt.text is None and getattr(pair.tokenizer, "has_chat_template", True):
        ids = encode_chat(pair.tokenizer, prompt.messages)
    else:
        text = prompt.text or prompt.messages[-1]["content"]
        ids = encode_text(pair.tokenizer, text)
    limit = pair.target.context_limit
    if limit and len(ids) >= limit:
        raise UsageError(
            f"the prompt {prompt.title!r} is longer than the context of {limit} tokens"
        )
    return list(ids)


def _load_average() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
