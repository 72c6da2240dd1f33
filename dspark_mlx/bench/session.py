"""One loaded model for everything a benchmark does with it: compare, and respond to load.

Turns names (methods, schedules, peers) into sides. Raises UsageError for what
cannot be had before anything is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .. import sources
from ..errors import UsageError
from ..loading import PRICED, LoadOptions, Pair, Report, choose_method, load_pair, make_engine
from ..profiling import device_name, load_or_profile
from ..registry import ModelEntry, Registry
from ..schedule import make_policy
from ..schedule.cost import CostModel
from .load import CompetingLoad, LoadSpec
from .peer import Setup
from .peers import Peers
from .prompts import Prompt
from .response import Response, respond
from .result import Results
from .runner import Plan, Progress, Runner, encode
from .sides import CLOCKS, EngineSide
from .variants import Variant, variants


class Session:
    """A pair loaded as ``options`` say. ``progress`` follows the runs."""

    def __init__(
        self,
        pair: Pair,
        entry: ModelEntry,
        options: LoadOptions,
        report: Report = lambda event: None,
        progress: Progress = lambda done, total, what: None,
    ) -> None:
        self.pair, self.entry, self.options = pair, entry, options
        self.report, self.progress = report, progress
        self._cost: CostModel | None = None

    @classmethod
    def load(cls, options: LoadOptions, report: Report, progress: Progress) -> Session:
        entry = Registry.load().resolve(options.model)
        return cls(load_pair(entry, options, report), entry, options, report, progress)

    def methods(self, asked: Sequence[str] | None) -> list[str]:
        """``asked``, if all of them can be had; None: all that can."""
        if asked is None:
            return ["none", *(p.spec.name for p in self.pair.proposers())]
        for method in asked:
            choose_method(self.pair.target, self.pair.drafter, method, self.pair.reason)  # type: ignore[arg-type]
        return list(asked)

    def compare(
        self,
        prompts: Sequence[Prompt],
        *,
        methods: Sequence[str] | None,
        schedules: Sequence[str],
        against: Sequence[str] = (),
        draft_model: str | None = None,
        concurrency: Sequence[int] = (1,),
        temperatures: Sequence[float] = (0.0,),
        tokens: int = 64,
        repeats: int = 1,
        seed: int = 0,
        clock: str = "wall",
    ) -> Results:
        """Every method under every schedule, mlx-lm and the peers, on all prompts."""
        if against and clock != "wall":
            raise UsageError("peers are timed by the wall's clock", "leave --clock out")
        rows = max(concurrency)
        if rows > 1 and self.pair.target.rollback == "none":
            raise UsageError("this model serves one request at a time", "use --concurrency 1")
        chosen = variants(self.methods(methods), schedules)
        if any(variant.schedule in PRICED for variant in chosen):
            self.cost(rows)  # before any side is made: all are to know what a round costs
        sides = [self.side(variant, rows, clock) for variant in chosen]
        with Peers(against, self._setup(draft_model, against), self._say) as peers:
            plan = Plan(
                prompts=prompts,
                sides=sides,
                peers=peers.sides(),
                concurrency=concurrency,
                temperatures=temperatures,
                tokens=tokens,
                repeats=repeats,
                seed=seed,
                clock=clock,
                about=self.about(),
            )
            results = Runner(self.pair, plan, self.progress).run()
        results.notes += peers.absent
        if peers.peers:
            results.notes += _about_peers(peers, draft_model, rows, max(temperatures))
        return results

    def respond(
        self,
        prompts: Sequence[Prompt],
        spec: LoadSpec,
        *,
        method: str | None = None,
        schedule: str = "auto",
        rounds: int = 40,
        tokens: int = 128,
    ) -> Response:
        """How ``schedule`` responds while the load comes and goes."""
        [name] = self.methods([method or self.pair.method])
        if name == "none":
            raise UsageError("plain decoding has no draft that could respond to load")
        side = self.side(variants([name], [schedule])[0], 1)
        encoded = [encode(self.pair, prompt) for prompt in prompts]
        side.run(encoded[:1], 8, 0.0, 0)  # warm up
        with CompetingLoad(spec) as load:
            return respond(
                side, encoded, load, rounds=rounds, max_tokens=tokens, progress=self.progress
            )

    def side(self, variant: Variant, rows: int, clock: str = "wall") -> EngineSide:
        options = dict(variant.options)
        if variant.schedule in PRICED:
            options["cost"] = self.cost(rows)
        policy = make_policy(variant.schedule, **options)
        return EngineSide(self.pair, variant, policy, rows, clock=CLOCKS[clock], cost=self._cost)

    def cost(self, rows: int) -> CostModel:
        """What rounds cost here, measured if that was not done yet."""
        if self._cost is None:
            self._cost = load_or_profile(
                make_engine(self.pair, make_policy("off"), max_rows=max(8, rows), reuse=False),
                self.entry.name,
                self.drafter,
                report=self.report,
                cache_dir=self.options.cache_dir,
            )
        return self._cost

    @property
    def drafter(self) -> str | None:
        """The name the drafter was found by, if there is one."""
        if self.pair.drafter is None:
            return None
        return self.options.drafter_source or self.entry.drafter

    def about(self) -> dict[str, Any]:
        return {"model": self.entry.name, "drafter": self.drafter, "device": device_name()}

    def _setup(self, draft_model: str | None, against: Sequence[str]) -> Setup:
        """What the peers load: the same folders, cast as the target here was."""
        if not against:
            return Setup("")
        folder = sources.on_disk(self.entry.target_source, cache_dir=self.options.cache_dir)
        cast = mx.default_device().type == mx.DeviceType.cpu or self.options.dtype != "auto"
        return Setup(
            folder=str(folder),
            drafter=self._drafter_folder(),
            draft_model=draft_model or "",
            dtype=str(self.pair.target.dtype).removeprefix("mlx.core.") if cast else "",
        )

    def _drafter_folder(self) -> str:
        if self.pair.drafter is None:
            return ""
        named = self.options.drafter_source
        source = sources.parse(named) if named else self.entry.drafter_source
        folder = sources.on_disk(source, cache_dir=self.options.cache_dir) if source else None
        return str(folder or "")

    def _say(self, what: str) -> None:
        self.progress(0, 0, what)


def _about_peers(peers: Peers, draft_model: str | None, rows: int, hottest: float) -> list[str]:
    """Where the peers that run are not compared all the same."""
    notes = []
    if rows > 1:
        notes.append("peers serve one request at a time: they are in no other table")
    if hottest > 0:
        notes.append("above temperature 0 peers draw numbers of their own: their text is unchecked")
    if draft_model is None and any(peer.name == "mlx-lm" for peer in peers.peers):
        notes.append("mlx-lm's own speculation needs a small model: name one, --peer-draft-model")
    return notes
