"""Converts a llama-type GGUF file to an MLX model folder that mlx-lm loads.

The quantisation of the file is kept bit for bit: mlx reads Q4_0, Q4_1 and Q8_0
as its own affine triples (weight, scales, biases) with groups of 32. Whether
to run them so or dequantised is decided where the model is loaded. Writes into
a folder that the caller makes and moves into place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ModelError
from .gguf import GGUF, read
from .gguf_tokenizer import write_tokenizer

# Counts up whenever the written folder changes, so that older ones are made again.
CONVERTER_VERSION = 1

GROUP_SIZE = 32
_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Tables derived from the metadata; mlx computes its own.
_DERIVED = {"rope_freqs"}


def convert(path: Path, folder: Path) -> None:
    """Write ``path`` as an MLX model into the existing, empty ``folder``.

    Raises ModelError for a file that is damaged or of a kind not supported.
    """
    gguf = read(path)
    config = model_config(gguf)
    _write_weights(gguf, config, folder / "model.safetensors")
    write_tokenizer(gguf, folder)
    generation = {
        key: config[key]
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        if key in config
    }
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(value, indent=2), encoding="utf-8")


def mlx_module(gguf_name: str) -> str | None:
    """The module of mlx-lm's llama that holds ``gguf_name``'s tensors; None: not needed.

    >>> mlx_module("blk.3.attn_q")
    'model.layers.3.self_attn.q_proj'
    """
    if gguf_name in _DERIVED:
        return None
    if gguf_name in _TOP:
        return _TOP[gguf_name]
    block, _, rest = gguf_name.removeprefix("blk.").partition(".")
    if block.isdigit() and rest in _IN_BLOCK:
        return f"model.layers.{block}.{_IN_BLOCK[rest]}"
    raise ModelError(f"the GGUF tensor {gguf_name} has no place in a llama-type model")


def model_config(gguf: GGUF) -> dict[str, Any]:
    """mlx-lm's ``config.json`` for the file, with the quantisation of each module."""
    arch = gguf.need("general.architecture")
    if arch != "llama":
        raise ModelError(
            f"{gguf.path.name} holds a model of type {arch}",
            "only llama-type GGUF files can be converted; use the model's MLX folder",
        )
    heads = gguf.need("llama.attention.head_count")
    hidden = gguf.need("llama.embedding_length")
    head_dim = gguf.metadata.get("llama.attention.key_length", hidden // heads)
    unsupported = [
        key
        for key in (
            "llama.rope.scaling.type",
            "llama.expert_count",
            "llama.attention.sliding_window",
        )
        if gguf.metadata.get(key) not in (None, 0, "none")
    ]
    if gguf.metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
        unsupported.append("llama.rope.dimension_count")
    if unsupported:
        raise ModelError(
            f"{gguf.path.name} uses {', '.join(unsupported)}, which cannot be converted",
            "use the model's MLX folder instead",
        )
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{gguf.path.name} has no token_embd.weight")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": gguf.need("llama.block_count"),
        "intermediate_size": gguf.need("llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": round(gguf.need("llama.attention.layer_norm_rms_epsilon"), 12),
        "rope_theta": gguf.metadata.get("llama.rope.freq_base", 10000.0),
        "max_position_embeddings": gguf.need("llama.context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "torch_dtype": "float16",
    }
    for role in ("bos", "eos", "padding"):
        if (index := gguf.metadata.get(f"tokenizer.ggml.{role}_token_id")) is not None:
            config[f"{role.replace('padding', 'pad')}_token_id"] = index
    if quantisation := _quantisation(gguf):
        config["quantization"] = quantisation
    return config


def _quantisation(gguf: GGUF) -> dict[str, Any]:
    """The most common width as the default, every other module by name (False: none)."""
    bits: dict[str, int] = {}
    for tensor in gguf.tensors.values():
        base, _, leaf = tensor.name.rpartition(".")
        module = mlx_module(base)
        if module is not None and leaf == "weight" and len(tensor.shape) == 2:
            bits[module] = _BITS.get(tensor.type, 0)
    used = [b for b in bits.values() if b]
    if not used:
        return {}
    common = max(set(used), key=used.count)
    settings: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": common, "mode": "affine"}
    for module, b in sorted(bits.items()):
        if b == 0:
            settings[module] = False
        elif b != common:
            settings[module] = {"group_size": GROUP_SIZE, "bits": b, "mode": "affine"}
    return settings


def _write_weights(gguf: GGUF, config: Mapping[str, Any], path: Path) -> None:
    import mlx.core as mx

    try:
        tensors: Any = mx.load(str(gguf.path), format="gguf")
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"mlx cannot read {gguf.path.name}: {error}") from None
    rotated = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    weights = {}
    for name, tensor in tensors.items():
        base, _, leaf = name.rpartition(".")
        module = mlx_module(base)
        if module is None:
            continue
        if heads := rotated.get(base.rpartition(".")[2]):
            tensor = unpermute(tensor, config[heads])
        if tensor.dtype == mx.float32:
            # Norms; the type of the quantisation scales, or they would widen every activation.
            tensor = tensor.astype(mx.float16)
        weights[f"{module}.{leaf}"] = tensor
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})


def unpermute(tensor: Any, heads: int) -> Any:
    """Undo GGUF's row order of q and k: ``(heads * d, ...)`` in, the same shape out.

    GGUF interleaves the two halves of each head's rows because llama.cpp rotates
    neighbouring pairs; mlx rotates row i with row i + d/2. Rows move whole, so
    packed weights, scales and biases are treated alike.
    """
    rows, *rest = tensor.shape
    return tensor.reshape(heads, rows // heads // 2, 2, *rest).swapaxes(1, 2).reshape(rows, *rest)
