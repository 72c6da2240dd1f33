"""From a model's name to an engine: find, load, check, pair, choose a method.

The one place that decides what ``auto`` means for a model and says why. What is
asked for by name and cannot be had is refused.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import psutil
from mlx_lm.utils import load_model, load_tokenizer, maybe_set_recommended_wired_limit

from . import sources
from .draft import CopyingProposer, DSparkProposer, LookupProposer, Proposer
from .draft.dspark.load import load_drafter
from .draft.dspark.network import Drafter
from .engine.engine import Engine
from .errors import DsparkError, ModelError, UsageError
from .events import CostTable, Loaded, Loading, Notice
from .model.target import Target, to_float
from .profiling import load_or_profile
from .registry import ModelEntry, Registry
from .request import METHODS, Method
from .schedule import CostModel, Off, make_policy
from .schedule.load import LoadMonitor
from .schedule.load_probe import probe

Report: TypeAlias = Callable[[Loading | Notice | CostTable], None]

PRICED = ("auto", "early-stop", "lagged")  # schedules that weigh what a round costs
KV_SHARE = 0.25  # of the machine's memory, for KV caches
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load. ``drafter``: a folder, Hub id or "none"; None takes the registry's.

    ``dtype``: "auto" keeps a model as it is on Metal and makes it float32 on
    the CPU. ``kv_bytes`` bounds the KV caches (None: a quarter of the memory).
    ``policy`` are the options of ``make_policy``. ``profile`` measures what
    rounds cost here, unless that is stored already or the schedule needs no prices.
    ``copy``: where the text repeats itself the drafter's place is taken by a copy of up to
    ``lookup_block`` tokens of what followed before.
    """

    model: str
    drafter: str | None = None
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
        if self.cache_dir is not None:  # a plain string does as well
            object.__setattr__(self, "cache_dir", Path(self.cache_dir))


@dataclass(frozen=True, slots=True)
class Pair:
    """A loaded target with its tokenizer and, where there is one, its drafter.

    ``method`` is what ``auto`` stands for here and ``reason`` why.
    """

    target: Target
    tokenizer: Any
    drafter: Drafter | None
    method: str
    reason: str
    lookup_block: int = 8
    copy: bool = True

    def proposers(self) -> list[Proposer]:
        """Fresh proposers, for one engine."""
        if self.target.factory.unsupported:
            return []
        found: list[Proposer] = [LookupProposer(self.lookup_block)]
        if self.drafter is not None:
            drafter = DSparkProposer(self.drafter, self.target.vocab_size)
            found.insert(0, CopyingProposer(drafter, self.lookup_block) if self.copy else drafter)
        return found


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
    engine = new_engine(pair, options, entry.thinking if pair.drafter is not None else None)
    cost = measure(engine, entry, options, report, cancel)
    engine.cost = cost
    engine.policy = make_policy(options.schedule, cost=cost, **options.policy)
    active = engine.batch.proposers.get(pair.method)
    loaded = Loaded(
        model=entry.name,
        drafter=drafter_name(entry, options) if pair.drafter is not None else None,
        method=pair.method,
        reason=pair.reason,
        schedule=engine.policy.name,
        block=active.block if active else 0,
        context_limit=engine.intake.context_limit,
        weight_bytes=pair.target.weight_bytes,
        plain_tps=1.0 / cost.plain(1) if cost is not None else None,
    )
    return engine, loaded


def ensure_here(
    options: LoadOptions,
    report: Report = lambda event: None,
    cancel: threading.Event | None = None,
) -> None:
    """Have what ``options`` name on disk. Raises DsparkError as ``load_engine`` would.

    For those who drop one model for another: not before the other can be had.
    """
    make_policy(options.schedule, **options.policy)
    entry = Registry.load().resolve(options.model)
    _fetch_target(entry, options, report, cancel)
    if options.drafter not in (None, "none"):
        source = sources.parse(str(options.drafter))
        sources.fetch(
            source, role="drafter", cache_dir=options.cache_dir, report=report, cancel=cancel
        )


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


def new_engine(pair: Pair, options: LoadOptions, thinking: bool | None = None) -> Engine:
    """An engine for ``pair`` that does not speculate yet: it has no policy but ``off``."""
    context = pair.target.context_limit
    if options.context:
        context = min(options.context, context or options.context)
    return Engine(
        pair.target,
        pair.tokenizer,
        pair.proposers(),
        Off(),
        default_method=pair.method,
        reason=pair.reason,
        max_rows=options.max_rows,
        prefill_chunk=options.prefill_chunk,
        context_limit=context,
        kv_limit=options.kv_bytes or int(psutil.virtual_memory().total * KV_SHARE),
        thinking=thinking,
        monitor=LoadMonitor(probe, time.monotonic),
    )


def measure(
    engine: Engine,
    entry: ModelEntry,
    options: LoadOptions,
    report: Report = lambda event: None,
    cancel: threading.Event | None = None,
) -> CostModel | None:
    """What rounds cost here, from the store or measured now; None where nothing needs it."""
    active = engine.batch.proposers.get(engine.intake.default_method)
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
    report(cost.to_event(range(1, engine.max_rows + 1), active.block, active.name))
    return cost


def drafter_name(entry: ModelEntry, options: LoadOptions) -> str | None:
    return options.drafter or entry.drafter


def load_pair(
    entry: ModelEntry,
    options: LoadOptions,
    report: Report = lambda event: None,
    cancel: threading.Event | None = None,
) -> Pair:
    """Fetch and load target and drafter of ``entry``."""
    folder = _fetch_target(entry, options, report, cancel)
    report(Loading("load", 0, 1, entry.name))
    target, tokenizer = load_target(folder, options)
    drafter, why = _find_drafter(entry, target, options, report, cancel)
    method, reason = choose_method(target, drafter, options.method, why)
    report(Loading("check", 0, 1, entry.name))
    target.check(tuple(drafter.config.target_layer_ids) if drafter else ())
    report(Loading("check", 1, 1, entry.name))
    return Pair(target, tokenizer, drafter, method, reason, options.lookup_block, options.copy)


def load_target(folder: Path, options: LoadOptions) -> tuple[Target, Any]:
    """The model of a whole folder, and its tokenizer."""
    size = sources.weight_bytes(folder)
    memory = psutil.virtual_memory().total
    if size > 0.9 * memory:
        raise ModelError(
            f"the weights in {folder} are {size / 1e9:.1f} GB; "
            f"this machine has {memory / 1e9:.1f} GB of memory",
            "choose a smaller or more strongly quantised model; see `dspark models`",
        )
    _check_json(folder / "generation_config.json")
    try:
        model, config = load_model(folder)
        # Left unset, transformers asks, and runs a checkpoint's code on a yes.
        never = {"trust_remote_code": False}
        tokenizer = load_tokenizer(folder, never, eos_token_ids=config.get("eos_token_id"))
    except DsparkError:
        raise
    except Exception as error:
        raise ModelError(
            f"cannot load the model in {folder}: {_first_line(error)}",
            "check that it is a text model mlx-lm knows and that its files are whole",
        ) from error
    # The context is checked when a prompt comes; transformers would warn of it besides.
    once = getattr(tokenizer, "deprecation_warnings", {})
    once["sequence-length-is-longer-than-the-specified-maximum"] = True
    cpu = mx.default_device().type == mx.DeviceType.cpu
    if cpu and shutil.which("g++") is None:
        mx.disable_compile()  # on the CPU backend it calls a C++ compiler
    name = options.dtype if options.dtype != "auto" else ("float32" if cpu else "")
    if name:
        if name not in DTYPES:
            raise UsageError(f"no dtype named {name!r}", f"choose auto or {', '.join(DTYPES)}")
        to_float(model, DTYPES[name])
        mx.eval(model.parameters())
    return Target(model, config, kv_bits=options.kv_bits), tokenizer


def choose_method(
    target: Target, drafter: Drafter | None, asked: Method, why_no_drafter: str
) -> tuple[str, str]:
    """What ``asked`` means for this pair, and why. Raises UsageError where it cannot be had."""
    if asked not in METHODS:
        raise UsageError(f"no method named {asked!r}", f"choose one of {', '.join(METHODS)}")
    unsupported = ", ".join(target.factory.unsupported)
    if unsupported and asked in ("dspark", "lookup"):
        raise UsageError(
            f"this model's cache ({unsupported}) cannot be rolled back, "
            f"so --method {asked} is not possible",
            "use --method none",
        )
    if asked == "dspark" and drafter is None:
        raise UsageError(
            f"--method dspark needs a drafter: {why_no_drafter}",
            "name one with --drafter, or use --method lookup",
        )
    if asked != "auto":
        return asked, "asked for"
    if unsupported:
        return "none", f"the model's cache ({unsupported}) cannot be rolled back"
    if drafter is not None:
        return "dspark", "a drafter for this model is available"
    return "lookup", why_no_drafter


def _find_drafter(
    entry: ModelEntry,
    target: Target,
    options: LoadOptions,
    report: Report,
    cancel: threading.Event | None,
) -> tuple[Drafter | None, str]:
    """The drafter, or None and why not. A drafter named by the user must load."""
    if options.drafter == "none" or options.method in ("lookup", "none"):
        return None, "no drafter was asked for"
    named = options.drafter is not None
    source = sources.parse(options.drafter) if options.drafter else entry.drafter_source
    if source is None:
        return None, f"no drafter is known for {entry.name}"
    if target.factory.unsupported:
        return None, "the model's cache cannot be rolled back"
    try:
        folder = sources.fetch(
            source, role="drafter", cache_dir=options.cache_dir, report=report, cancel=cancel
        )
        return load_drafter(folder, target, quantize_bits=options.drafter_bits), ""
    except sources.Cancelled:
        raise
    except DsparkError as error:
        if named or options.method == "dspark":
            raise
        return None, f"its drafter is not usable: {error.message}"


def _check_json(path: Path) -> None:
    """A file mlx-lm would pass over in silence when damaged: without it replies may never end."""
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: {error}", "download the model again") from None


def _first_line(error: BaseException) -> str:
    if isinstance(error, KeyError):  # its text is the bare key
        return f"{error} is missing in its files"
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(": ")
