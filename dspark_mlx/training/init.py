"""A new drafter for a target: its shape, and first weights from the target's own last layers.

A draft layer that starts as a target layer already turns features into the
next token; from random weights it has to be learned. Every step that would not
fit (other shapes, norms of another kind) is left out and the weight stays random.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..draft.dspark.config import DrafterConfig
from ..draft.dspark.network import Drafter
from ..draft.dspark.pairing import attach_target
from ..draft.dspark.save import dense_weight
from ..errors import UsageError
from ..model.target import Target
from .recency import look_back

_FIRST_VOICE = 0.1


def spread_taps(layers: int, count: int) -> tuple[int, ...]:
    """``count`` layers from the second to the third last, evenly: DeepSpec's habit."""
    if count < 1 or count > layers:
        raise UsageError(f"{count} taps do not fit a target of {layers} layers")
    first, last = min(1, layers - 1), max(layers - 3, 0)
    if count == 1:
        return (last,)
    taps = sorted({round(first + i * (last - first) / (count - 1)) for i in range(count)})
    if len(taps) < count:
        taps = list(range(layers - count, layers))
    return tuple(taps)


def new_config(
    target: Target,
    *,
    layers: int,
    taps: Sequence[int],
    block: int,
    head: str,
    rank: int,
    mask_token_id: int,
    draft_vocab_size: int | None = None,
    attention_bias: bool = False,
) -> DrafterConfig:
    """A Qwen3-type drafter of the target's own widths."""
    text = target.config.get("text_config", target.config)
    heads = text["num_attention_heads"]
    rope = dict(text.get("rope_scaling") or text.get("rope_parameters") or {})
    rope["rope_theta"] = float(text.get("rope_theta") or rope.get("rope_theta") or 10000.0)
    rope.setdefault("rope_type", rope.pop("type", "default"))
    return DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=text["intermediate_size"],
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or target.hidden_size // heads,
        vocab_size=target.vocab_size,
        block_size=block,
        mask_token_id=mask_token_id,
        target_layer_ids=tuple(taps),
        draft_vocab_size=draft_vocab_size,
        markov_head_type=head if rank else None,
        markov_rank=rank,
        enable_confidence_head=True,
        confidence_head_with_markov=rank > 0,
        rms_norm_eps=float(text.get("rms_norm_eps") or 1e-6),
        rope_parameters=rope,
        max_position_embeddings=int(text.get("max_position_embeddings") or 32768),
        attention_bias=attention_bias,
        num_target_layers=target.num_layers,
        target_model_type=text.get("model_type"),
    )


def choose_mask_token(tokenizer: Any, counts: np.ndarray, vocab_size: int) -> int:
    """The tokenizer's mask token, or a special id that no answer uses, or the last id."""
    own = getattr(tokenizer, "mask_token_id", None)
    if own is not None:
        return int(own)
    special = sorted(getattr(tokenizer, "all_special_ids", None) or [])
    unused = [i for i in special if i < vocab_size and counts[i] == 0]
    return unused[-1] if unused else vocab_size - 1


def build_drafter(
    config: DrafterConfig,
    target: Target,
    hot_ids: np.ndarray | None,
    *,
    seed: int,
    init: str,
    sample: mx.array | None = None,
    factors: tuple[np.ndarray, np.ndarray] | None = None,
) -> Drafter:
    """A drafter borrowing the target's embedding and head, ready to train.

    ``init``: ``recency`` (see there), ``target`` (the target's last layers) or
    ``random``. ``sample (B, L)`` is text of the target's to measure features on,
    needed by the first and useful to the second. ``factors`` are
    first weights of the sequential head (see ``bigrams``).
    """
    mx.random.seed(seed)
    drafter = Drafter(config)
    if hot_ids is not None:
        drafter.set_draft_vocabulary(mx.array(hot_ids))
    attach_target(drafter, target)
    if drafter.markov_head is not None:
        # Better no bias at first than that of a random table.
        weight = drafter.markov_head.markov_w2.weight
        drafter.markov_head.markov_w2.weight = mx.zeros_like(weight)
        if factors is not None:
            drafter.markov_head.markov_w1.weight = mx.array(factors[0])
            drafter.markov_head.markov_w2.weight = mx.array(factors[1])
    if drafter.confidence_head is not None:
        drafter.confidence_head.proj.weight = mx.zeros_like(drafter.confidence_head.proj.weight)
        drafter.confidence_head.proj.bias = mx.zeros_like(drafter.confidence_head.proj.bias)
    if init == "target":
        copy_layers(drafter, target, sample)
    elif init == "recency":
        if sample is None:
            raise UsageError("init recency needs a sample of text")
        _, taps, _ = target.forward_training(sample, list(config.target_layer_ids))
        # The first positions are unlike all others in most models.
        seen = taps[:, 4:].reshape(-1, taps.shape[-1]).astype(mx.float32)
        look_back(drafter, np.array(seen), seed)
        if isinstance(target.norm, nn.RMSNorm):
            drafter.norm.weight = target.norm.weight.astype(mx.float32)
    if init != "random" and factors is not None:
        # The layers have nothing to say yet: they whisper, and the table is heard.
        drafter.norm.weight = drafter.norm.weight * _FIRST_VOICE
    mx.eval(drafter.parameters())
    return drafter


def copy_layers(drafter: Drafter, target: Target, sample: mx.array | None = None) -> list[str]:
    """Start draft layers as the target's last ones; returns the names that were copied."""
    config, count = drafter.config, drafter.config.num_hidden_layers
    copied: list[str] = []
    first = max(target.num_layers - count, 0)
    sources = [target.layers[min(first + i, target.num_layers - 1)] for i in range(count)]
    for i, (layer, source) in enumerate(zip(drafter.layers, sources, strict=True)):
        norm = _norm_weight(source, "input_layernorm", config.hidden_size)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weight = _weight(source, f"self_attn.{name}")
            goal = getattr(layer.self_attn, name)
            if weight is None or weight.shape != goal.weight.shape:
                continue
            # The context passes one shared norm, not this layer's: its weight moves into the
            # projections, so that context and block meet them alike.
            if name != "o_proj" and norm is not None:
                weight = weight * norm
            goal.weight = weight.astype(goal.weight.dtype)
            copied.append(f"layers.{i}.self_attn.{name}")
        for name in ("gate_proj", "up_proj", "down_proj"):
            weight = _weight(source, f"mlp.{name}")
            goal = getattr(layer.mlp, name)
            if weight is not None and weight.shape == goal.weight.shape:
                goal.weight = weight.astype(goal.weight.dtype)
                copied.append(f"layers.{i}.mlp.{name}")
        after = _norm_weight(source, "post_attention_layernorm", config.hidden_size)
        if after is not None:
            layer.post_attention_layernorm.weight = after
            copied.append(f"layers.{i}.post_attention_layernorm")
    if sample is not None:
        copied += _fit_head_norms(drafter, target, first, sample)
    if (
        isinstance(target.norm, nn.RMSNorm)
        and target.norm.weight.shape == drafter.norm.weight.shape
    ):
        drafter.norm.weight = target.norm.weight.astype(drafter.norm.weight.dtype)
        copied.append("norm")
    if (config.target_hidden_size or config.hidden_size) == config.hidden_size:
        # Identity on the last tap, silence on the others.
        zeros = mx.zeros((config.hidden_size, config.feature_size - config.hidden_size))
        drafter.fc.weight = mx.concatenate([zeros, mx.eye(config.hidden_size)], axis=1)
        copied.append("fc")
    return copied


def _fit_head_norms(drafter: Drafter, target: Target, first: int, sample: mx.array) -> list[str]:
    """Give q_norm and k_norm the target's own weights or the mean size of its queries and keys."""
    dim, fitted = drafter.config.head_dim, []
    for i, layer in enumerate(drafter.layers):
        index = min(first + i, target.num_layers - 1)
        source = target.layers[index]
        _, seen, _ = target.forward_training(sample, [index - 1])
        normed = source.input_layernorm(seen)
        for name in ("q", "k"):
            own = _norm_weight(source.self_attn, f"{name}_norm", dim)
            goal = getattr(layer.self_attn, f"{name}_norm")
            if own is not None:
                goal.weight = own
            else:
                heads = getattr(source.self_attn, f"{name}_proj")(normed)
                heads = heads.reshape(*heads.shape[:-1], -1, dim).astype(mx.float32)
                size = mx.sqrt(mx.square(heads).mean(-1)).mean()
                goal.weight = mx.full((dim,), size.item(), dtype=goal.weight.dtype)
            fitted.append(f"layers.{i}.self_attn.{name}_norm")
    return fitted


def _module(root: Any, path: str) -> Any:
    for part in path.split("."):
        root = getattr(root, part, None)
        if root is None:
            return None
    return root


def _weight(layer: nn.Module, path: str) -> mx.array | None:
    module = _module(layer, path)
    return None if module is None else dense_weight(module)


def _norm_weight(layer: nn.Module, name: str, size: int) -> mx.array | None:
    """The weight of a plain RMSNorm; None for other kinds, whose weight means something else."""
    module = _module(layer, name)
    if type(module) is not nn.RMSNorm or module.weight.shape != (size,):
        return None
    return module.weight.astype(mx.float32)
