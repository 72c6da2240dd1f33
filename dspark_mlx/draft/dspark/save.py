"""Checkpoints out: a Drafter becomes a folder in DeepSpec's layout.

A reduced vocabulary is saved as vLLM's speculators library does: ``d2t`` (offset
from draft id to target id) and ``t2d`` (which target ids are drafted). Files
appear whole or not at all.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ...model.target import named_tensors
from .network import Drafter, TiedHead


def save_drafter(drafter: Drafter, folder: str | Path, *, embeddings: bool = False) -> None:
    """Write ``config.json`` and ``model.safetensors`` into ``folder``, replacing old ones.

    What the drafter borrows from its target is left out, unless ``embeddings``
    asks for a checkpoint that other programs load without the target: then
    embedding and lm_head are written dense.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value
        for name, value in named_tensors(drafter).items()
        if name.split(".")[0] not in drafter.borrowed
    }
    if embeddings:
        for name in drafter.borrowed:
            tensors[f"{name}.weight"] = dense_weight(getattr(drafter, name))
    ids = drafter.draft_to_target
    if ids is not None:
        tensors["d2t"] = ids.astype(mx.int64) - mx.arange(ids.shape[0], dtype=mx.int64)
        member = mx.zeros((drafter.config.vocab_size,), dtype=mx.bool_)
        member[ids] = True
        tensors["t2d"] = member
    scratch = folder / f".saving-{os.getpid()}.safetensors"
    try:
        # "pt" is what Hugging Face's loaders expect to read here.
        mx.save_safetensors(str(scratch), tensors, metadata={"format": "pt"})
        os.replace(scratch, folder / "model.safetensors")
    finally:
        scratch.unlink(missing_ok=True)
    text = json.dumps(drafter.config.to_dict(), indent=2) + "\n"
    scratch = folder / f".saving-{os.getpid()}.json"
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, folder / "config.json")
    finally:
        scratch.unlink(missing_ok=True)


def dense_weight(module: nn.Module) -> mx.array:
    """The weight ``(V, H)`` of an embedding or head, dequantised where it is quantised."""
    source = module.embedding if isinstance(module, TiedHead) else module
    if not isinstance(source, nn.QuantizedLinear | nn.QuantizedEmbedding):
        return source.weight
    return mx.dequantize(
        source.weight,
        source.scales,
        source.get("biases"),
        group_size=source.group_size,
        bits=source.bits,
        mode=source.mode,
    )
