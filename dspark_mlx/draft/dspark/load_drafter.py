"""Checkpoints in: a folder of config.json and safetensors becomes a Drafter.

Strict: every tensor must be there, of the right shape, and nothing else may be.
Only JSON and safetensors are read, so no checkpoint can run code. Whether the
result fits the target is asked of ``pairing``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...errors import DsparkError, ModelError, UsageError
from ...model.target import named_tensors
from .calibration import read_calibration
from .config import DrafterConfig
from .network import Drafter
from .pairing import TargetLike, attach_target, check_pairing

_SHAREABLE = ("embed_tokens", "lm_head")
# Saved by other programs for their own training; drafting has no use for them.
_IGNORED = ("verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")
_GROUP_SIZES = (64, 32)


def load_drafter(
    path: str | Path,
    target: TargetLike | None = None,
    *,
    quantize_bits: int | None = None,
    dtype: mx.Dtype | None = None,
    share_with_target: bool = False,
    config: DrafterConfig | None = None,
    network: type[Drafter] = Drafter,
) -> Drafter:
    """Load a DSpark drafter for ``target`` from a folder, evaluated and ready to draft.

    ``quantize_bits`` (4 or 8) quantises the backbone and the drafter's own
    lm_head; sequential and confidence heads stay as they are, the latter always
    float32. ``dtype`` defaults to float32 on the CPU, where half precision is
    slow, and to the checkpoint's own type elsewhere. ``share_with_target`` uses
    the target's embedding and lm_head even where the checkpoint has copies of
    them, which saves their memory. ``config`` and ``network`` are for another kind
    of block drafter, whose config.json was read already. Without a target only a checkpoint that is
    complete in itself loads, unchecked against any.

    Raises ModelError (missing, surplus, misshapen or truncated tensors, bad
    config) or its kind PairingError (a drafter for another target).
    """
    folder = Path(path)
    config = config or DrafterConfig.from_folder(folder)
    if target is not None:
        check_pairing(config, target)
    try:
        drafter = _load(network(config), folder, target, quantize_bits, dtype, share_with_target)
    except (DsparkError, KeyboardInterrupt):
        raise
    except Exception as error:  # a config whose values are of no use to the layers
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"cannot load the drafter in {folder}: {type(error).__name__}: {why}",
            "check its config.json",
        ) from error
    own = {k: v for k, v in named_tensors(drafter).items() if k.split(".")[0] not in _SHAREABLE}
    if not mx.stack([mx.isfinite(v).all() for v in own.values()]).all().item():
        raise ModelError(
            f"the drafter in {folder} has weights that are no numbers",
            "download it again, or train it with a lower learning rate",
        )
    return drafter


def _load(
    drafter: Drafter,
    folder: Path,
    target: TargetLike | None,
    quantize_bits: int | None,
    dtype: mx.Dtype | None,
    share_with_target: bool,
) -> Drafter:
    config = drafter.config
    weights = {k.removeprefix("model."): v for k, v in read_tensors(folder).items()}
    weights = {k: v for k, v in weights.items() if k not in _IGNORED}
    target_ids = draft_vocabulary(config.draft_vocab_size, config.vocab_size, weights)
    if share_with_target:
        if target is None:
            raise UsageError("share_with_target needs a target")
        weights = {k: v for k, v in weights.items() if k.split(".")[0] not in _SHAREABLE}
    own = frozenset(name for name in _SHAREABLE if f"{name}.weight" in weights)
    if target is None and len(own) < len(_SHAREABLE):
        missing = " or ".join(name for name in _SHAREABLE if name not in own)
        raise ModelError(f"{folder} has no {missing}", "load it together with its target")

    if config.quantization is not None:
        _quantize(drafter, config.quantization, lambda name: f"{name}.scales" in weights)
    check_tensors(folder, drafter, weights, own)
    drafter.load_weights(list(_cast(weights, dtype or default_dtype(weights)).items()), False)
    if target_ids is not None:
        drafter.set_draft_vocabulary(target_ids)
    if target is not None:
        attach_target(drafter, target, own)
    if quantize_bits is not None:
        quantize_drafter(drafter, quantize_bits)
    drafter.calibration = read_calibration(folder, config.block_size)
    drafter.eval()
    mx.eval(drafter.parameters(), target_ids if target_ids is not None else [])
    return drafter


def quantize_drafter(drafter: Drafter, bits: int) -> None:
    """Quantise backbone and own lm_head in place to 4 or 8 bits; heads are left alone."""
    if drafter.config.quantization is not None:
        raise UsageError("this drafter is quantised already")
    quantization = quantize_linears(drafter, bits, lambda n, m: _is_backbone(drafter, n, m))
    drafter.config = dataclasses.replace(drafter.config, quantization=quantization)


def quantize_linears(
    drafter: nn.Module, bits: int, chosen: Callable[[str, nn.Module], bool]
) -> dict[str, int]:
    """Quantise the modules ``chosen(name, module)`` in place; returns bits and group size."""
    if bits not in (4, 8):
        raise UsageError(f"a drafter can be quantised to 4 or 8 bits, not {bits}")
    widths = [m.weight.shape[-1] for n, m in drafter.named_modules() if chosen(n, m)]
    group = next((g for g in _GROUP_SIZES if all(w % g == 0 for w in widths)), None)
    if group is None:
        raise ModelError(
            f"cannot quantise a drafter whose layer widths {sorted(set(widths))} "
            f"are not multiples of {_GROUP_SIZES[-1]}",
            "load it without quantisation",
        )
    quantization = {"bits": bits, "group_size": group}
    modules = dict(drafter.named_modules())
    _quantize(drafter, quantization, lambda name: chosen(name, modules[name]))
    return quantization


def read_tensors(folder: Path) -> dict[str, mx.array]:
    """All tensors of ``model.safetensors`` or of the shards its index names (lazily read)."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if not index.exists():
        if not single.exists():
            raise ModelError(f"{folder} has no model.safetensors", "the download may be incomplete")
        return _read_file(single)
    try:
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(placed.values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(f"cannot read {index}: {error!r}") from None
    tensors: dict[str, mx.array] = {}
    for name in files:
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index} names {name!r}, which is not a file beside it")
        if not (folder / name).exists():
            raise ModelError(f"{folder} has no {name}", "the download may be incomplete")
        tensors |= _read_file(folder / name)
    absent = [name for name in placed if name not in tensors]
    if absent:
        raise ModelError(f"{folder}: {_names(absent)} listed in the index but in no shard")
    return tensors


# -- inside ----------------------------------------------------------------------------


def _read_file(path: Path) -> dict[str, mx.array]:
    try:
        tensors = mx.load(str(path), format="safetensors")
    except (RuntimeError, ValueError) as error:
        raise ModelError(
            f"{path} is damaged or cut short: {error}", "delete it and download it again"
        ) from None
    assert isinstance(tensors, dict)
    return tensors


def draft_vocabulary(
    size: int | None, vocab_size: int, weights: dict[str, mx.array]
) -> mx.array | None:
    """Take ``d2t`` and ``t2d`` out of ``weights``; return target ids of ``size`` draft columns.

    ``d2t[i]`` is an offset: draft id i stands for target id ``i + d2t[i]``.
    """
    offsets, member = weights.pop("d2t", None), weights.pop("t2d", None)
    if size is None or (offsets is None and size == vocab_size):
        return None
    if offsets is None:
        raise ModelError(f"a draft vocabulary of {size} ids, but no d2t tensor to read them by")
    if offsets.shape != (size,):
        raise ModelError(f"tensor d2t has shape {offsets.shape}, expected {(size,)}")
    if not mx.issubdtype(offsets.dtype, mx.integer):
        raise ModelError(f"tensor d2t holds {offsets.dtype}, no whole numbers")
    ids = np.arange(size) + np.array(offsets).astype(np.int64)
    if ids.min() < 0 or ids.max() >= vocab_size or len(np.unique(ids)) != size:
        raise ModelError(f"tensor d2t does not map to {size} different ids below the vocabulary")
    if member is not None:
        mask = np.array(member).astype(bool)
        if mask.shape != (vocab_size,) or set(np.flatnonzero(mask)) != set(ids.tolist()):
            raise ModelError("tensors d2t and t2d disagree on which ids are drafted")
    if size == vocab_size and np.array_equal(ids, np.arange(size)):
        return None
    return mx.array(ids.astype(np.int32))


def check_tensors(
    folder: Path, drafter: nn.Module, weights: dict[str, mx.array], own: frozenset[str]
) -> None:
    """Raise ModelError unless ``weights`` are exactly those of ``drafter``.

    Of embedding and lm_head only those in ``own`` must be there.
    """
    expected = {
        name: value
        for name, value in named_tensors(drafter).items()
        if name.split(".")[0] not in _SHAREABLE or name.split(".")[0] in own
    }
    missing = [name for name in expected if name not in weights]
    if missing:
        raise ModelError(
            f"{folder}: {_names(missing)} missing", "the checkpoint does not match its config"
        )
    surplus = [name for name in weights if name not in expected]
    if surplus:
        raise ModelError(
            f"{folder}: {_names(surplus)} not known to this drafter",
            "the checkpoint does not match its config",
        )
    for name, value in expected.items():
        if weights[name].shape != value.shape:
            raise ModelError(
                f"{folder}: tensor {name} has shape {weights[name].shape}, expected {value.shape}",
                "the checkpoint does not match its config",
            )
        if mx.issubdtype(weights[name].dtype, mx.floating) != mx.issubdtype(
            value.dtype, mx.floating
        ):
            raise ModelError(
                f"{folder}: tensor {name} holds {weights[name].dtype}",
                "the checkpoint does not match its config",
            )


def _names(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"


def default_dtype(weights: dict[str, mx.array]) -> mx.Dtype:
    if mx.default_device().type == mx.DeviceType.cpu:
        return mx.float32
    return weights["norm.weight"].dtype


def _cast(weights: dict[str, mx.array], dtype: mx.Dtype) -> dict[str, mx.array]:
    return {
        name: value.astype(mx.float32 if name.startswith("confidence_head.") else dtype)
        if mx.issubdtype(value.dtype, mx.floating)
        else value
        for name, value in weights.items()
    }


def _is_backbone(drafter: Drafter, name: str, module: nn.Module) -> bool:
    if name == "lm_head" and name in drafter.borrowed:
        return False
    return isinstance(module, nn.Linear) and name.split(".")[0] in ("layers", "fc", "lm_head")


def _quantize(drafter: nn.Module, quantization: Any, chosen: Any) -> None:
    nn.quantize(
        drafter,
        group_size=quantization["group_size"],
        bits=quantization["bits"],
        class_predicate=lambda name, module: hasattr(module, "to_quantized") and chosen(name),
    )
