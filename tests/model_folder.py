"""Toy models and drafters as folders on disk, to go through the real loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from bpe import byte_tokenizer
from decoding import toy_drafter
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from toys import _lively

from dspark_mlx.draft.dspark.save import save_drafter
from dspark_mlx.model.target import Target

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 320,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


def toy_model(seed: int = 0) -> Any:
    return _lively(llama.Model(llama.ModelArgs.from_dict(CONFIG)), seed, 0.35)


def write_model(folder: Path, seed: int = 0) -> Path:
    """An MLX model folder: config, weights, byte-level tokenizer with a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    model = toy_model(seed)
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"}
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))
    byte_tokenizer()._tokenizer.save_pretrained(folder)
    return folder


def write_drafter(folder: Path, seed: int = 0, **options: Any) -> Path:
    """A DeepSpec folder with a drafter for ``write_model(seed)``."""
    drafter = toy_drafter(Target(toy_model(seed)), **options)
    save_drafter(drafter, folder)
    return folder
