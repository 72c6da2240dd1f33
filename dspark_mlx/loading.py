"""From a model's name to an engine: find, load, check, pair, choose a method.

The one place that decides what ``auto`` means for a model and says why, and the
one place that makes engines to serve with. What is asked for by name and cannot
be had is refused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import psutil
from mlx_lm.utils import maybe_set_recommended_wired_limit

from . import sources
from .draft import Proposer
from .draft.copying import CopyFirst
from .draft.lookup import LookupProposer
from .draft.strategies import LOADERS, LoadedDrafter, load_for
from .engine.engine import Engine
from .errors import DsparkError, UsageError
from .events import CostTable, Loaded, Loading, Notice
from .load_probe import probe
from .model.load_target import load_target
from .model.target import Target
from .profiling import load_or_profile
from .registry import ModelEntry, Registry
from .request import Method, method_named
from .schedule import CostModel, Off, Policy, make_policy
from .schedule.device_load import LoadMonitor

Report: TypeAlias = Callable[[Loading | Notice | CostTable], None]

PRICED = ("auto", "early-stop", "lagged")  # schedules that weigh what a round costs
KV_SHARE = 0.25  # of the machine's memory, for KV caches
FROM_FILES = tuple(LOADERS)  # methods that need a drafter's files


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load. ``drafter``: a folder, Hub id or "none"; None takes the registry's.

    ``draft_model``: the same for a small language model as the drafter.
    ``dtype``: "auto" keeps a model as it is on Metal and makes it float32 on
    the CPU. ``kv_bytes`` bounds the KV caches (None: a quarter of the memory).
    ``policy`` are the options of ``make_policy``. ``profile`` measures what
    rounds cost here, unless that is stored already or the schedule needs no prices.
    ``copy``: where the text repeats itself, up to ``lookup_block`` tokens of what
    followed before are copied in place of a draft.
    """

    model: str
    drafter: str | None = None
    draft_model: str | None = None
    method: Method = "auto"
    schedule: str = "auto"
    policy: dict[str, Any] = field(default_factory=dict)
    profile: bool = True
    dtype: str = "auto"
    drafter_bits: int | None = None
    kv_bits: int | None = None
    kv_bytes: int | None = None
    context: int = 0
    max_rows: int = 8
    prefill_chunk: int = 512
    lookup_block: int = 8
    copy: bool = True
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.drafter is not None and self.draft_model is not None:
            raise UsageError("give a drafter or a draft model, not both")
        object.__setattr__(self, "method", method_named(self.method))
        if self.cache_dir is not None:  # a plain string does as well
            object.__setattr__(self, "cache_dir", Path(self.cache_dir))

    @property
    def drafter_source(self) -> str | None:
        """What was named to draft with, of either kind."""
        return self.draft_model or self.drafter


@dataclass(frozen=True, slots=True)
class Pair:
    """A loaded target with its tokenizer and, where there is one, its drafter.

    ``method`` is what ``auto`` stands for here and ``reason`` why.
    """

    target: Target
    tokenizer: Any
    drafter: LoadedDrafter | None
    method: str
    reason: str
    lookup_block: int = 8
    copy: bool = True

    def proposers(self) -> list[Proposer]:
        """Fresh proposers, for one engine."""
        if self.target.rollback == "none":
            return []
        found: list[Proposer] = [LookupProposer(self.lookup_block)]
        if self.drafter is not None:
            drafter = self.drafter.make()
            found.insert(0, CopyFirst(drafter, self.lookup_block) if self.copy else drafter)
        return found


def make_engine(pair: Pair, policy: Policy, *, tokenizer: Any = None, **options: Any) -> Engine:
    """An engine for ``pair`` with proposers of its own. ``options`` are ``Engine``'s.

    ``tokenizer`` takes the place of the pair's.
    """
    defaults: dict[str, Any] = {
        "default_method": pair.method,
        "reason": pair.reason,
        "monitor": LoadMonitor(probe, time.monotonic),
    }
    return Engine(
        pair.target,
        tokenizer or pair.tokenizer,
        pair.proposers(),
        policy,
        **{**defaults, **options},
    )


def load_engine(
    options: LoadOptions,
    report: Report = lambda event: None,
    cancel: threading.Event | None = None,
) -> tuple[Engine, Loaded]:
    """Load everything ``options`` name. Raises DsparkError; leaves nothing half-made on disk."""
    make_policy(options.schedule, **options.policy)  # refuses bad options before any download
    entry = Registry.load().resolve(options.model)
    pair = load_pair(entry, options, report, cancel)
    maybe_set_recommended_wired_limit()
    cost = measure(pair, entry, options, report, cancel)
    policy = make_policy(options.schedule, cost=cost, **options.policy)
    thinking = entry.thinking if pair.drafter is not None else None
    engine = make_engine(
        pair, policy, cost=cost, thinking=thinking, **engine_options(pair, options)
    )
    active = engine.batch.proposers.get(pair.method)
    loaded = Loaded(
        model=entry.name,
        drafter=drafter_name(entry, options) if pair.drafter is not None else None,
        method=pair.method,
        reason=pair.reason,
        schedule=engine.policy.name,
        block=active.spec.block if active else 0,
        context_limit=engine.prefiller.context_limit,
        weight_bytes=pair.target.weight_bytes,
        plain_tps=1.0 / cost.plain(1) if cost is not None else None,
        details=pair.drafter.details if pair.drafter is not None else "",
    )
    return engine, loaded


def engine_options(pair: Pair, options: LoadOptions) -> dict[str, Any]:
    """The options of an ``Engine`` that ``options`` ask for."""
    context = pair.target.context_limit
    if options.context:
        context = min(options.context, context or options.context)
    return {
        "max_rows": options.max_rows,
        "prefill_chunk": options.prefill_chunk,
        "context_limit": context,
        "kv_limit": options.kv_bytes or int(psutil.virtual_memory().total * KV_SHARE),
    }


def measure(
    pair: Pair,
    entry: ModelEntry,
    options: LoadOptions,
    report: Report = lambda event: None,
    cancel: threading.Event | None = None,
) -> CostModel | None:
    """What rounds cost here, from the store or measured now; None where nothing needs it."""
    engine = make_engine(pair, Off(), **engine_options(pair, options))
    active = engine.batch.proposers.get(pair.method)
    if not options.profile or options.schedule not in PRICED or active is None:
        return None
    cost = load_or_profile(
        engine,
        entry.name,
        drafter_name(entry, options),
        report=report,
        cancel=cancel,
        cache_dir=options.cache_dir,
    )
    report(cost.to_event(range(1, engine.max_rows + 1), active.spec.block, active.spec.name))
    return cost


def drafter_name(entry: ModelEntry, options: LoadOptions) -> str | None:
    """What the drafter was named by: the options, or the registry."""
    return options.drafter_source or entry.drafter


def ensure_on_disk(
    options: LoadOptions,
    report: Report = lambda event: None,
    cancel: threading.Event | None = None,
) -> None:
    """Fetch what ``options`` name. Raises DsparkError as ``load_engine`` would.

    For a caller that drops one model for another: not before the other can be had.
    """
    make_policy(options.schedule, **options.policy)
    entry = Registry.load().resolve(options.model)
    _fetch_target(entry, options, report, cancel)
    if options.draft_model is not None:
        _fetch_target(Registry.load().resolve(options.draft_model), options, report, cancel)
    elif options.drafter not in (None, "none"):
        _fetch_drafter(sources.parse(str(options.drafter)), options, report, cancel)


def load_pair(
    entry: ModelEntry,
    options: LoadOptions,
    report: Report = lambda event: None,
    cancel: threading.Event | None = None,
) -> Pair:
    """Fetch and load target and drafter of ``entry``."""
    folder = _fetch_target(entry, options, report, cancel)
    report(Loading("load", 0, 1, entry.name))
    target, tokenizer = load_target(folder, dtype=options.dtype, kv_bits=options.kv_bits)
    drafter, why = _find_drafter(entry, target, tokenizer, options, report, cancel)
    method, reason = choose_method(target, drafter, options.method, why)
    report(Loading("check", 0, 1, entry.name))
    target.check(drafter.taps if drafter else ())
    report(Loading("check", 1, 1, entry.name))
    return Pair(target, tokenizer, drafter, method, reason, options.lookup_block, options.copy)


def choose_method(
    target: Target, drafter: LoadedDrafter | None, asked: Method, why_no_drafter: str
) -> tuple[str, str]:
    """What ``asked`` means for this pair, and why. Raises UsageError where it cannot be had."""
    asked = method_named(asked)
    blocked = target.no_rollback_reason
    if blocked and asked not in ("auto", "none"):
        raise UsageError(
            f"--method {asked} is not possible: {blocked}",
            "use --method none",
        )
    if asked in FROM_FILES and (drafter is None or drafter.method != asked):
        why = f"the drafter here is for --method {drafter.method}" if drafter else why_no_drafter
        flag = "--draft-model" if asked == "draft" else "--drafter"
        raise UsageError(
            f"--method {asked} needs a drafter of that kind: {why}",
            f"name one with {flag}, or use --method lookup",
        )
    if asked != "auto":
        return asked, "asked for"
    if blocked:
        return "none", blocked
    if drafter is not None:
        return drafter.method, "a drafter for this model is available"
    return "lookup", why_no_drafter


def _find_drafter(
    entry: ModelEntry,
    target: Target,
    tokenizer: Any,
    options: LoadOptions,
    report: Report,
    cancel: threading.Event | None,
) -> tuple[LoadedDrafter | None, str]:
    """The drafter, or None and why not. A drafter named by the user must load."""
    named = options.drafter_source
    if named == "none" or options.method in ("lookup", "none"):
        return None, "no drafter was asked for"
    if options.draft_model is not None:  # any model, by a name of the registry too
        source: sources.Source | None = Registry.load().resolve(options.draft_model).target_source
    else:
        source = sources.parse(named) if named else entry.drafter_source
    if source is None:
        return None, f"no drafter is known for {entry.name}"
    if target.rollback == "none":
        return None, target.no_rollback_reason
    wanted = "draft" if options.draft_model is not None else None
    if options.method in FROM_FILES:
        wanted = options.method
    try:
        role = "target" if options.draft_model is not None else "drafter"
        folder = _fetch_drafter(source, options, report, cancel, role)
        drafter = load_for(
            folder,
            target,
            tokenizer,
            method=wanted,
            quantize_bits=options.drafter_bits,
            dtype=options.dtype,
        )
        return drafter, ""
    except sources.Cancelled:
        raise
    except DsparkError as error:
        if named or options.method in FROM_FILES:
            raise
        return None, f"its drafter is not usable: {error.message}"


def _fetch_target(
    entry: ModelEntry, options: LoadOptions, report: Report, cancel: threading.Event | None
) -> Path:
    return sources.fetch(
        entry.target_source,
        cache_dir=options.cache_dir,
        report=report,
        cancel=cancel,
        expected_bytes=entry.target_bytes,
    )


def _fetch_drafter(
    source: Any,
    options: LoadOptions,
    report: Report,
    cancel: threading.Event | None,
    role: Any = "drafter",
) -> Path:
    return sources.fetch(
        source, role=role, cache_dir=options.cache_dir, report=report, cancel=cancel
    )
