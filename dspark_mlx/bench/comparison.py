"""Every system on every prompt, interleaved, and each reply checked against the reference.

``Benchmark`` holds one loaded pair and turns names (methods, schedules, peers) into systems;
``Comparison`` measures them. All systems see the same prompt before any sees the next, and who
goes first rotates, so that heat, other programs and clock speed meet all of them alike. The
reference at temperature 0 is mlx-lm's own greedy text on the same weights, and above it plain
decoding with the same seed.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import __version__, sources
from ..engine.text import encode_chat, encode_text
from ..errors import DsparkError, UsageError
from ..loading import (
    PRICED,
    LoadOptions,
    Pair,
    Report,
    choose_method,
    drafter_name,
    load_pair,
    make_engine,
)
from ..profiling import device_name, load_or_profile, mlx_version
from ..registry import ModelEntry, Registry
from ..request import SamplingParams
from ..schedule import make_policy
from ..schedule.cost import CostModel
from .competing_load import CompetingLoad, LoadSpec
from .load_response import LoadResponse, follow_load
from .lossless import fork_at, margin, near_tie
from .peers import PeerSetup, PeerSystem, start_peers
from .results import CellName, Fork, Results, Run
from .systems import BASELINE, CLOCKS, EngineSystem, MlxLmSystem, System, TokenIds
from .text_tables import plural
from .workload import BenchPrompt, Variant, Workload, variants

Progress = Callable[[int, int, str], None]  # runs done, runs in all (0: not yet known), which
WARM_TOKENS = 8  # of a reply that is not counted: enough for a round of every kind
PROFILED_ROWS = 8  # rows that rounds are priced for at least, as `dspark profile` does
# Prompts of a group for each that is served at once. Most of a group's time is then that of
# full batches, not that of its last replies, which are decoded alone.
WAVES = 4


def ignore_progress(done: int, total: int, what: str) -> None:
    """The progress that nobody follows."""


class Benchmark:
    """A pair loaded as ``options`` say. ``progress`` follows the runs."""

    def __init__(
        self,
        pair: Pair,
        entry: ModelEntry,
        options: LoadOptions,
        report: Report = lambda event: None,
        progress: Progress = ignore_progress,
    ) -> None:
        self.pair, self.entry, self.options = pair, entry, options
        self.report, self.progress = report, progress
        self._cost: CostModel | None = None

    @classmethod
    def load(cls, options: LoadOptions, report: Report, progress: Progress) -> Benchmark:
        entry = Registry.load().resolve(options.model)
        return cls(load_pair(entry, options, report), entry, options, report, progress)

    def methods(self, asked: Sequence[str] | None) -> list[str]:
        """``asked`` (None: all that this pair has). Raises UsageError for one it has not."""
        if asked is None:
            return ["none", *(p.spec.name for p in self.pair.proposers())]
        for method in asked:
            choose_method(self.pair.target, self.pair.drafter, method, self.pair.reason)  # type: ignore[arg-type]
        return list(asked)

    def compare(
        self,
        workload: Workload,
        *,
        methods: Sequence[str] | None,
        schedules: Sequence[str],
        against: Sequence[str] = (),
        draft_model: str | None = None,
    ) -> Results:
        """Every method under every schedule, mlx-lm and the peers, on the whole ``workload``.

        ``draft_model`` is a small model's folder or Hub id, for mlx-lm's own speculation.

        Raises UsageError for what cannot be had before anything is measured.
        """
        if against and workload.clock != "wall":
            raise UsageError("peers are timed by the wall's clock", "leave --clock out")
        rows = max(workload.concurrency)
        if rows > 1 and self.pair.target.rollback == "none":
            raise UsageError("this model serves one request at a time", "use --concurrency 1")
        chosen = variants(self.methods(methods), schedules)
        if any(variant.schedule in PRICED for variant in chosen):
            self.cost(rows)  # before any system is made: all are to know what a round costs
        setup = self._peer_setup(draft_model) if against else PeerSetup("")
        with start_peers(against, setup, lambda text: self.progress(0, 0, text)) as (peers, absent):
            comparison = Comparison(
                self.pair,
                workload,
                [self.system(variant, rows, workload.clock) for variant in chosen],
                peers=[PeerSystem(peer, mode) for peer in peers for mode in peer.modes],
                about=self.about(),
                progress=self.progress,
            )
            results = comparison.run()
        results.notes += absent
        if peers and rows > 1:
            results.notes.append("peers serve one request at a time: they are in no other table")
        if peers and max(workload.temperatures) > 0:
            results.notes.append(
                "above temperature 0 peers draw numbers of their own: their text is unchecked"
            )
        if draft_model is None and any(peer.name == "mlx-lm" for peer in peers):
            results.notes.append(
                "mlx-lm's own speculation needs a small model: name one, --peer-draft-model"
            )
        return results

    def respond(
        self,
        prompts: Sequence[BenchPrompt],
        spec: LoadSpec,
        *,
        method: str | None = None,
        schedule: str = "auto",
        rounds: int = 40,
        tokens: int = 128,
    ) -> LoadResponse:
        """How ``schedule`` responds while another program comes and goes."""
        [name] = self.methods([method or self.pair.method])
        if name == "none":
            raise UsageError("plain decoding has no draft that could respond to load")
        system = self.system(variants([name], [schedule])[0], 1)
        encoded = [encode(self.pair, prompt) for prompt in prompts]
        system.run(encoded[:1], WARM_TOKENS, 0.0, 0)
        with CompetingLoad(spec) as load:
            return follow_load(
                system, encoded, load, rounds=rounds, max_tokens=tokens, progress=self.progress
            )

    def system(self, variant: Variant, rows: int, clock: str = "wall") -> EngineSystem:
        """Our engine with the method and the schedule of ``variant``."""
        options = dict(variant.options)
        if variant.schedule in PRICED:
            options["cost"] = self.cost(rows)
        policy = make_policy(variant.schedule, **options)
        return EngineSystem(self.pair, variant, policy, rows, clock=CLOCKS[clock], cost=self._cost)

    def cost(self, rows: int) -> CostModel:
        """What rounds of ``rows`` rows cost here: stored, or measured now."""
        if self._cost is None:
            self._cost = load_or_profile(
                make_engine(
                    self.pair,
                    make_policy("off"),
                    max_rows=max(PROFILED_ROWS, rows),
                    reuse=False,
                ),
                self.entry.name,
                self.drafter,
                report=self.report,
                cache_dir=self.options.cache_dir,
            )
        return self._cost

    @property
    def drafter(self) -> str | None:
        """The name the drafter was found by; None where none is loaded."""
        return drafter_name(self.entry, self.options) if self.pair.drafter is not None else None

    def about(self) -> dict[str, Any]:
        return {"model": self.entry.name, "drafter": self.drafter, "device": device_name()}

    def _peer_setup(self, draft_model: str | None) -> PeerSetup:
        """The same folders, cast as the target here was."""
        options = self.options
        folder = sources.on_disk(self.entry.target_source, cache_dir=options.cache_dir)
        source = sources.parse(options.drafter) if options.drafter else self.entry.drafter_source
        drafter = None
        # A small draft model is none that mlx-dspark could load.
        if self.pair.drafter is not None and source is not None and not options.draft_model:
            drafter = sources.on_disk(source, cache_dir=options.cache_dir)
        cast = mx.default_device().type == mx.DeviceType.cpu or options.dtype != "auto"
        return PeerSetup(
            folder=str(folder),
            drafter=str(drafter or ""),
            draft_model=draft_model or "",
            dtype=_name(self.pair.target.dtype) if cast else "",
        )


@dataclass
class Comparison:
    """One measurement of ``systems``, mlx-lm and ``peers`` on one loaded pair.

    Peers take part at concurrency 1 only.
    """

    pair: Pair
    workload: Workload
    systems: Sequence[System]
    peers: Sequence[System] = ()
    about: dict[str, Any] = field(default_factory=dict)
    progress: Progress = ignore_progress

    def __post_init__(self) -> None:
        target = self.pair.target
        self._eos = tuple(self.pair.tokenizer.eos_token_ids)
        self._baseline = MlxLmSystem(
            target.model, self._eos, kv_bits=target.kv_bits, clock=CLOCKS[self.workload.clock]
        )
        self._plain = EngineSystem(
            self.pair, Variant("none", "off", "plain"), make_policy("off"), 1
        )
        self._running_peers = list(self.peers)
        self._encoded = [encode(self.pair, prompt) for prompt in self.workload.prompts]
        self._checked: Counter[str] = Counter()  # replies of each system
        self._references: dict[tuple[int, float, int], tuple[int, ...]] = {}
        self._results = Results(self._about(), BASELINE)
        every = (self._baseline, *self.systems, *self.peers)
        self._results.systems = [system.name for system in every]
        if target.kv_bits and max(self.workload.concurrency) > 1:
            self._results.notes.append(
                "mlx-lm does not quantise the KV cache of batches: its batched rates are without"
            )

    def run(self) -> Results:
        """Measure everything. Ctrl+C ends it with what was measured so far."""
        results = self._results
        self._warm_up()
        try:
            self._measure()
        except KeyboardInterrupt:
            if not results.runs:
                raise
            results.stopped = True
            results.notes.append("stopped early: what was measured until then is shown")
        forks = Counter(fork.system for fork in results.forks)
        for peer in self.peers:
            if replies := self._checked[peer.name]:
                agree = replies - forks[peer.name]
                results.notes.append(
                    f"{peer.name}: {agree} of {plural(replies, 'reply', 'replies')} agree, "
                    "token by token"
                )
        results.about["load_average_after"] = _load_average()
        return results

    def _measure(self) -> None:
        work = self.workload
        groups = [
            (repeat, temperature, count, group)
            for repeat in range(work.repeats)
            for temperature in work.temperatures
            for count in work.concurrency
            for group in self._groups(count)
        ]
        done, total = 0, sum(len(self._taking_part(count)) for _, _, count, _ in groups)
        for turn, (repeat, temperature, count, group) in enumerate(groups):
            systems = self._taking_part(count)
            first = turn % len(systems)
            domain = work.prompts[group[0]].domain
            prompts = [self._encoded[i] for i in group]
            for system in [*systems[first:], *systems[:first]]:
                self.progress(done, total, f"{system.name}, {domain}")
                seed = work.seed + group[0]
                run = self._ask(system, prompts, work.tokens, temperature, seed, count)
                done += 1
                if run is None:
                    continue
                name = CellName(system.name, domain, temperature, count)
                self._results.add(name, repeat, run)
                # Above temperature 0 mlx-lm and the peers draw random numbers of their own.
                if temperature == 0 or system in self.systems:
                    self._check(name, group, run.tokens)
        self.progress(total, total, "")

    def _taking_part(self, count: int) -> list[System]:
        """The systems that answer ``count`` requests at a time."""
        return [self._baseline, *self.systems, *(self._running_peers if count == 1 else [])]

    def _groups(self, count: int) -> list[list[int]]:
        """Groups of prompt numbers, each of one domain, the domains taking turns."""
        size = count * WAVES if count > 1 else 1
        by_domain: dict[str, list[int]] = {}
        for i, prompt in enumerate(self.workload.prompts):
            by_domain.setdefault(prompt.domain, []).append(i)
        longest = max(map(len, by_domain.values()))
        return [
            numbers[k : k + size]
            for k in range(0, longest, size)
            for numbers in by_domain.values()
            if k < len(numbers)
        ]

    def _warm_up(self) -> None:
        """Every system once at every place, so that kernels are compiled and caches allocated."""
        work = self.workload
        tokens = min(WARM_TOKENS, work.tokens)
        for count in work.concurrency:
            group = [self._encoded[i % len(self._encoded)] for i in range(count)]
            for temperature in work.temperatures:
                for system in self._taking_part(count):
                    self.progress(0, 0, f"warming up {system.name}")
                    self._ask(system, group, tokens, temperature, work.seed)

    def _ask(
        self,
        system: System,
        prompts: TokenIds,
        tokens: int,
        temperature: float,
        seed: int,
        concurrency: int = 0,
    ) -> Run | None:
        """None where ``system`` is a peer that failed: it is named and takes no further part."""
        try:
            return system.run(prompts, tokens, temperature, seed, concurrency)
        except DsparkError as error:
            if system not in self._running_peers:
                raise
            self._running_peers.remove(system)
            self._results.notes.append(f"not compared further: {error}")
            return None

    # -- losslessness -------------------------------------------------------------------

    def _check(
        self, name: CellName, group: Sequence[int], replies: Sequence[Sequence[int]]
    ) -> None:
        params = SamplingParams(temperature=name.temperature, seed=self.workload.seed + group[0])
        for i, reply in zip(group, replies, strict=True):
            reference = self._reference(i, params)
            self._results.compared += 1
            self._checked[name.system] += 1
            at = fork_at(reply, reference, self._eos)
            if at is None:
                continue
            target = self.pair.target
            gap, top = margin(target.model, [*self._encoded[i], *reference[:at]], params)
            self._results.forks.append(
                Fork(
                    system=name.system,
                    prompt=self.workload.prompts[i].title,
                    position=at,
                    margin=gap,
                    near_tie=near_tie(gap, top, target.dtype, self._quantised),
                    temperature=name.temperature,
                    concurrency=name.concurrency,
                )
            )

    def _reference(self, i: int, params: SamplingParams) -> tuple[int, ...]:
        """What prompt ``i`` must be answered with."""
        seed = params.seed or 0
        key = (i, params.temperature, 0 if params.greedy else seed)
        if key not in self._references:
            system = self._baseline if params.greedy else self._plain
            tokens = self.workload.tokens
            run = system.run([self._encoded[i]], tokens, params.temperature, seed)
            self._references[key] = run.tokens[0]
        return self._references[key]

    @property
    def _quantised(self) -> bool:
        target = self.pair.target
        return bool(target.kv_bits) or any(
            isinstance(m, nn.QuantizedLinear) for m in target.model.modules()
        )

    def _about(self) -> dict[str, Any]:
        return {
            **self.about,
            "dspark_mlx": __version__,
            "mlx": mlx_version(),
            "machine": f"{platform.system()} {platform.machine()}",
            "started": datetime.now().astimezone().isoformat(timespec="seconds"),
            "dtype": _name(self.pair.target.dtype),
            "prompts": len(self.workload.prompts),
            "tokens": self.workload.tokens,
            "repeats": self.workload.repeats,
            "clock": self.workload.clock,
            "load_average_before": _load_average(),
        }


def encode(pair: Pair, prompt: BenchPrompt) -> list[int]:
    """The ids of the prompt; a model without a chat template continues the plain text.

    Raises UsageError for a prompt that does not fit into the model's context.
    """
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


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _load_average() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
