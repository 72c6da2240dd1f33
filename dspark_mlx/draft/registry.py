"""Which strategy a drafter's folder holds, and how each is loaded and made a proposer.

The one table of strategies that need files: a new one is a file with its
proposer, a line in ``LOADERS`` and a rule in ``kind_of``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import PairingError
from ..model.load import load_target
from ..model.target import Target
from .draft_model import DraftModelProposer, check_vocabulary
from .dspark.load import load_drafter
from .dspark.network import Drafter
from .dspark.proposer import DSparkProposer
from .proposer import Proposer


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter that was loaded for one target.

    ``method`` is its strategy; ``network`` its weights (an nn.Module, or a
    ``Target`` for a draft model); ``taps`` the target's layers it reads; ``make``
    returns a fresh proposer, for one engine.
    """

    method: str
    network: Any
    taps: tuple[int, ...]
    make: Callable[[], Proposer]


def dspark_drafter(network: Drafter, target: Target) -> LoadedDrafter:
    """A DSpark network for ``target``."""
    taps = tuple(network.config.target_layer_ids)
    return LoadedDrafter(
        "dspark", network, taps, lambda: DSparkProposer(network, target.vocab_size)
    )


def draft_model(model: Target, tokenizer: Any, target: Target, theirs: Any) -> LoadedDrafter:
    """A small language model for ``target``, whose tokenizer is ``theirs``.

    Raises PairingError where it cannot draft for that target.
    """
    if model.rollback == "none":
        raise PairingError(
            f"the draft model cannot be used: {model.no_rollback_reason}",
            "choose a draft model without recurrent layers",
        )
    if tokenizer is not None:
        check_vocabulary(theirs, tokenizer, (target.vocab_size, model.vocab_size))
    return LoadedDrafter("draft", model, (), lambda: DraftModelProposer(model, target.vocab_size))


def load_for(
    folder: str | Path,
    target: Target,
    tokenizer: Any,
    *,
    method: str | None = None,
    quantize_bits: int | None = None,
    dtype: str = "auto",
) -> LoadedDrafter:
    """Load the drafter in ``folder`` for ``target``. ``method`` insists on its strategy.

    Raises ModelError or PairingError with what is wrong with it.
    """
    folder = Path(folder)
    kind = kind_of(folder)
    if method is not None and kind != method:
        raise PairingError(
            f"{folder} holds a {DESCRIBED[kind]}, not a {DESCRIBED[method]}",
            f"use --method {kind}, or name another folder",
        )
    return LOADERS[kind](folder, target, tokenizer, quantize_bits, dtype)


def kind_of(folder: Path) -> str:
    """The strategy a folder holds, from its config and files.

    A folder with a tokenizer whose config names a single architecture of a
    language model is a draft model; anything else is read as DSpark's, whose
    loader names what is wrong.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return "dspark"
    has_tokenizer = any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model"))
    if not isinstance(config, dict) or not has_tokenizer:
        return "dspark"
    marks = ("dflash_config", "speculators_model_type", "block_size", "markov_head_type")
    return "dspark" if any(mark in config for mark in marks) else "draft"


def _load_dspark(
    folder: Path, target: Target, tokenizer: Any, bits: int | None, dtype: str
) -> LoadedDrafter:
    return dspark_drafter(load_drafter(folder, target, quantize_bits=bits), target)


def _load_draft_model(
    folder: Path, target: Target, tokenizer: Any, bits: int | None, dtype: str
) -> LoadedDrafter:
    model, own = load_target(folder, dtype=dtype, quantize_bits=bits)
    model.check()
    mx.eval(model.model.parameters())
    return draft_model(model, own, target, tokenizer)


LOADERS: dict[str, Callable[[Path, Target, Any, int | None, str], LoadedDrafter]] = {
    "dspark": _load_dspark,
    "draft": _load_draft_model,
}
DESCRIBED = {"dspark": "DSpark drafter", "draft": "language model"}
