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

from ..errors import ModelError, PairingError
from ..model.load_target import load_target
from ..model.target import Target
from . import dflash, eagle3, mtp
from .dflash import describe
from .draft_model import BLOCK, DraftModelProposer, check_vocabulary
from .dspark.layouts import ARCHITECTURES as DSPARK_ARCHITECTURES
from .dspark.load_drafter import load_drafter
from .dspark.network import Drafter
from .dspark.proposer import DSparkProposer
from .proposer import Proposer


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter that was loaded for one target.

    ``method`` is its strategy; ``network`` its weights (an nn.Module, or a
    ``Target`` for a draft model); ``taps`` the target's layers it reads; ``make``
    returns a fresh proposer, for one engine. ``details`` says in one line how its
    checkpoint was read.
    """

    method: str
    network: Any
    taps: tuple[int, ...]
    make: Callable[[], Proposer]
    details: str = ""


def dspark_drafter(network: Drafter, target: Target) -> LoadedDrafter:
    """A DSpark network for ``target``."""
    return _block_drafter("dspark", DSparkProposer, network, target)


def _block_drafter(
    method: str, proposer: type[DSparkProposer], network: Drafter, target: Target
) -> LoadedDrafter:
    taps = tuple(network.config.target_layer_ids)
    return LoadedDrafter(
        method, network, taps, lambda: proposer(network, target.vocab_size), describe(network)
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
    return LoadedDrafter(
        "draft",
        model,
        (),
        lambda: DraftModelProposer(model, target.vocab_size),
        f"a language model of {model.num_layers} layers; block {BLOCK}",
    )


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
    if kind == "mtp" and method == "draft" and has_tokenizer(folder):
        kind = "draft"  # a whole model that was trained with an MTP layer
    if method is not None and kind != method:
        raise PairingError(
            f"{folder} holds {DESCRIBED[kind]}, not {DESCRIBED[method]}",
            f"use --method {kind}, or name another folder",
        )
    return LOADERS[kind](folder, target, tokenizer, quantize_bits, dtype)


def kind_of(folder: Path) -> str:
    """The strategy a folder holds, from its config and the names of its files.

    Raises ModelError for a layout that is known by name but not read here. What no
    rule knows is read as DSpark's, whose loader names what is wrong.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return "dspark"
    if not isinstance(config, dict):
        return "dspark"
    if any(folder.glob("*.bin")) and not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{folder} has its weights in *.bin files, which may run code and are never read",
            "use a checkpoint in safetensors",
        )
    kind = config.get("speculators_model_type")
    if kind is not None:
        if kind not in SPECULATORS:
            raise ModelError(
                f"a drafter with 'speculators_model_type' {kind!r} is not supported",
                f"known are {', '.join(SPECULATORS)}",
            )
        return str(kind)
    listed = config.get("architectures")
    names = set(map(str, listed)) if isinstance(listed, list) else set()
    nested = config.get("dflash_config")
    projector = nested.get("projector_type") if isinstance(nested, dict) else None
    if names & set(dflash.ARCHITECTURES):
        return "dflash"
    if nested is not None and not names & set(DSPARK_ARCHITECTURES) and projector != "dspark":
        return "dflash"
    if any(mark in config for mark in ("block_size", "markov_head_type")):
        return "dspark"
    if names & set(eagle3.ARCHITECTURES) or "eagle_config" in config:
        return "eagle3"
    tensors = tensor_names(folder)
    if "fc.weight" in tensors and any(name.startswith("midlayer.") for name in tensors):
        return "eagle3"  # the official layout, whose config is a plain Llama's
    if mtp.is_mtp(config, tensors):
        return "mtp"
    return "draft" if has_tokenizer(folder) else "dspark"


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder can be a language model of its own."""
    return any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model"))


def tensor_names(folder: Path) -> set[str]:
    """The names in the headers of all safetensors files; none of a file that has no header."""
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(size, MOST_HEADER)))
        except (OSError, ValueError, RecursionError):
            continue
        names |= set(header) if isinstance(header, dict) else set()
    return names - {"__metadata__"}


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


def _load_dflash(
    folder: Path, target: Target, tokenizer: Any, bits: int | None, dtype: str
) -> LoadedDrafter:
    network = dflash.load_dflash(folder, target, quantize_bits=bits)
    return _block_drafter("dflash", dflash.DFlashProposer, network, target)


def _load_eagle3(
    folder: Path, target: Target, tokenizer: Any, bits: int | None, dtype: str
) -> LoadedDrafter:
    network = eagle3.load_eagle3(folder, target, quantize_bits=bits)
    return LoadedDrafter(
        "eagle3",
        network,
        network.taps,
        lambda: eagle3.eagle3_proposer(network, target.vocab_size),
        eagle3.describe(network),
    )


def _load_mtp(
    folder: Path, target: Target, tokenizer: Any, bits: int | None, dtype: str
) -> LoadedDrafter:
    network = mtp.load_mtp(folder, target, quantize_bits=bits)
    return LoadedDrafter(
        "mtp",
        network,
        network.taps,
        lambda: mtp.mtp_proposer(network, target.vocab_size),
        mtp.describe(network),
    )


LOADERS: dict[str, Callable[[Path, Target, Any, int | None, str], LoadedDrafter]] = {
    "dspark": _load_dspark,
    "dflash": _load_dflash,
    "eagle3": _load_eagle3,
    "mtp": _load_mtp,
    "draft": _load_draft_model,
}
DESCRIBED = {
    "dspark": "a DSpark drafter",
    "dflash": "a DFlash drafter",
    "eagle3": "an EAGLE-3 drafter",
    "mtp": "an MTP layer",
    "draft": "a language model",
}
MOST_HEADER = 100_000_000  # bytes, the limit of the safetensors format itself
# Layouts of vLLM's speculators library that are read.
SPECULATORS = ("dspark", "dflash", "eagle3")
