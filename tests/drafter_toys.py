"""What the drafter tests share: reference checkpoints, a stand-in target, edited copies."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dspark_mlx.draft.dspark.config import DrafterConfig
from dspark_mlx.draft.dspark.network import Drafter

DRAFTERS = Path(__file__).parent / "data" / "drafters"
NAMES = ("qwen3_vanilla", "qwen3_gated", "qwen3_rnn", "qwen3_nomarkov", "gemma4_vanilla")


@dataclass
class ToyTarget:
    """Only what a drafter asks of its target."""

    embed_tokens: Any
    lm_head: Any
    vocab_size: int = 96
    hidden_size: int = 32
    num_layers: int = 6


def toy_target(vocab: int = 96, hidden: int = 32, layers: int = 6, tied: bool = False) -> ToyTarget:
    mx.random.seed(7)
    head = None if tied else nn.Linear(hidden, vocab, bias=False)
    return ToyTarget(nn.Embedding(vocab, hidden), head, vocab, hidden, layers)


def toy_config(**changes: Any) -> DrafterConfig:
    values: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 96,
        "block_size": 5,
        "mask_token_id": 95,
        "target_layer_ids": (0, 2, 4),
        "markov_head_type": "vanilla",
        "markov_rank": 8,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return DrafterConfig(**(values | changes))


def toy_drafter(seed: int = 0, **changes: Any) -> Drafter:
    mx.random.seed(seed)
    drafter = Drafter(toy_config(**changes))
    mx.eval(drafter.parameters())
    return drafter


def edited_copy(
    name: str,
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    replace: dict[str, mx.array] | None = None,
) -> Path:
    """A copy of a reference checkpoint with some config keys and tensors changed or left out."""
    folder.mkdir(parents=True, exist_ok=True)
    data = json.loads((DRAFTERS / name / "config.json").read_text())
    data.update(config or {})
    (folder / "config.json").write_text(json.dumps(data))
    if drop or replace:
        tensors = mx.load(str(DRAFTERS / name / "model.safetensors"))
        tensors = {k: v for k, v in tensors.items() if k not in drop} | (replace or {})
        mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    else:
        shutil.copy(DRAFTERS / name / "model.safetensors", folder / "model.safetensors")
    return folder
