"""EAGLE-3 (arXiv 2503.01840): one draft layer over the target's low, middle and high features.

Entry j of the chain pairs the token t_{j+1} with f_j, three of the target's layer
outputs at position j, concatenated. With e = embedding of t_{j+1}:

    u   = fc(f_j)                                               (3 H_t -> H)
    h   = hidden_norm(u)
    x   = u + attention([input_layernorm(e) ; h])               (2 H -> H, causal)
    x   = x + mlp(post_attention_layernorm(x))
    p(t_{j+2}) = softmax(lm_head(norm(x)))

To draft the token after next, x takes the place of u: no fc, for that is for the target's
features only. Published checkpoints differ in a few norms, in how they name tensors and
in what their layer ids count; each difference is a key of their config, read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import DsparkError, ModelError, PairingError
from ..model.cache import RowsKV
from ..model.rows import Rows
from .chain import ChainProposer
from .dflash import embedding_scale
from .dspark.backbone import MLP, make_rope
from .dspark.config import DrafterConfig, read_config
from .dspark.layouts import bad, flag, layer_fields, maybe_whole, need, wholes
from .dspark.load_drafter import (
    check_tensors,
    default_dtype,
    draft_vocabulary,
    quantize_linears,
    read_tensors,
)
from .dspark.network import TiedHead
from .dspark.pairing import HINT, TargetLike, check_reading, take_rows

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator")
# Tokens of a draft where the config says nothing: the depth of the paper's own drafts.
BLOCK = 5
_IGNORED = ("rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")


@dataclass(frozen=True)
class Eagle3Config:
    """One EAGLE-3 drafter. ``layer`` holds the shapes of its transformer layers.

    ``taps``: the target's layers whose outputs are read, ``num_layers`` of the target
    being the output of its final norm. ``feature``: width of one of them.
    """

    layer: DrafterConfig
    taps: tuple[int, ...]
    feature: int
    block: int = BLOCK
    draft_vocab_size: int | None = None
    fc: bool = True
    fc_bias: bool = False
    norm_before_fc: bool = False
    """An RMS norm over all of f, before fc."""
    fc_norm: bool = False
    """An RMS norm over each of the layers in f, before fc."""
    norm_before_residual: bool = False
    """The residual is h instead of u."""
    norm_output: bool = False
    """norm(x) is fed back instead of x."""
    own_embedding: bool = False
    """Whether the checkpoint's embedding was trained; if not, the target's is taken."""


class Attention(nn.Module):
    """Causal attention whose input may be wider than its output; Qwen3's has q and k norms."""

    def __init__(self, config: DrafterConfig, width: int, qk_norm: bool) -> None:
        super().__init__()
        dim, bias = config.head_dim, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            dim,
        )
        self.q_proj = nn.Linear(width, self.heads * dim, bias=bias)
        self.k_proj = nn.Linear(width, self.kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(width, self.kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * dim, config.hidden_size, bias=bias)
        if qk_norm:
            self.q_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.qk_norm = qk_norm
        self.rope = make_rope(config)

    def __call__(self, x: mx.array, mask: Any, cache: RowsKV) -> mx.array:
        """``x (B, L, width)`` to ``(B, L, H)``, appended to ``cache``."""
        rows, length, _ = x.shape

        def split(y: mx.array, heads: int) -> mx.array:
            return y.reshape(rows, length, heads, self.head_dim)

        queries = split(self.q_proj(x), self.heads)
        keys = split(self.k_proj(x), self.kv_heads)
        values = split(self.v_proj(x), self.kv_heads).transpose(0, 2, 1, 3)
        if self.qk_norm:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        offset = cache.offset
        queries = self.rope(queries.transpose(0, 2, 1, 3), offset=offset)
        keys = self.rope(keys.transpose(0, 2, 1, 3), offset=offset)
        keys, values = cache.update_and_fetch(keys, values)
        out = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.head_dim**-0.5, mask=mask
        )
        merged: mx.array = self.o_proj(out.transpose(0, 2, 1, 3).reshape(rows, length, -1))
        return merged


class FirstLayer(nn.Module):
    """The layer that joins embedding and feature."""

    def __init__(self, config: Eagle3Config, qk_norm: bool) -> None:
        super().__init__()
        hidden, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        self.self_attn = Attention(config.layer, 2 * hidden, qk_norm)
        self.mlp = MLP(config.layer)
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.norm_before_residual = config.norm_before_residual

    def __call__(self, e: mx.array, u: mx.array, mask: Any, cache: RowsKV) -> mx.array:
        """Embeddings ``e (B, L, H)`` and inputs ``u (B, L, H)`` to ``(B, L, H)``."""
        h = self.hidden_norm(u)
        residual = h if self.norm_before_residual else u
        joined = mx.concatenate([self.input_layernorm(e), h], axis=-1)
        x = residual + self.self_attn(joined, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class LaterLayer(nn.Module):
    """An ordinary layer, in drafters that have more than one."""

    def __init__(self, config: DrafterConfig, qk_norm: bool) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, hidden, qk_norm)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)

    def __call__(self, x: mx.array, mask: Any, cache: RowsKV) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3(nn.Module):
    """An EAGLE-3 network (``ChainNetwork``), with random weights until some are loaded."""

    def __init__(self, config: Eagle3Config, *, qk_norm: bool = False) -> None:
        super().__init__()
        layer = config.layer
        hidden, eps = layer.hidden_size, layer.rms_norm_eps
        self.config = config
        self.taps, self.block = config.taps, config.block
        self.feature_size = config.feature * len(config.taps)
        self.embed_scale = 1.0
        self.embed_tokens = nn.Embedding(layer.vocab_size, hidden)
        if config.fc:
            self.fc = nn.Linear(self.feature_size, hidden, bias=config.fc_bias)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(self.feature_size, eps=eps)
        if config.fc_norm:
            self.fc_norm = [nn.RMSNorm(config.feature, eps=eps) for _ in config.taps]
        self.layers: list[Any] = [
            FirstLayer(config, qk_norm),
            *(LaterLayer(layer, qk_norm) for _ in range(layer.num_hidden_layers - 1)),
        ]
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self.lm_head: nn.Module = nn.Linear(
            hidden, config.draft_vocab_size or layer.vocab_size, bias=False
        )
        self._draft_to_target: mx.array | None = None

    @property
    def draft_to_target(self) -> mx.array | None:
        return self._draft_to_target

    def set_draft_vocabulary(self, target_ids: mx.array) -> None:
        """``(Vd,)``: the target id that each draft id stands for."""
        self._draft_to_target = target_ids

    @property
    def dtype(self) -> mx.Dtype:
        kind: mx.Dtype = self.norm.weight.dtype
        return kind

    @property
    def kv_bytes_per_token(self) -> float:
        c = self.config.layer
        numbers = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
        return float(numbers * self.dtype.size)

    def make_rows(self) -> Rows:
        return Rows([RowsKV(1) for _ in self.layers])

    def from_features(self, features: mx.array) -> mx.array:
        """u = fc(f): ``(B, L, 3 H_t)`` to ``(B, L, H)``."""
        f = features.astype(self.dtype)
        if self.config.norm_before_fc:
            f = self.input_norm(f)
        if self.config.fc_norm:
            parts = mx.split(f, len(self.fc_norm), axis=-1)
            f = mx.concatenate(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], axis=-1
            )
        u: mx.array = self.fc(f) if self.config.fc else f
        return u

    def run(self, tokens: mx.array, inputs: mx.array, rows: Rows) -> mx.array:
        """x of each entry, before ``norm``: ``(B, L, H)``."""
        length = tokens.shape[1]
        # One token a row needs no mask where all rows are equally long.
        mask = rows.layers[0].make_mask(length, return_array=length > 1)
        last = self.embed_tokens.weight.shape[0] - 1
        e = self.embed_tokens(mx.minimum(tokens, last)) * self.embed_scale
        x: mx.array = self.layers[0](e.astype(self.dtype), inputs, mask, rows.layers[0])
        for layer, cache in zip(self.layers[1:], rows.layers[1:], strict=True):
            x = layer(x, mask, cache)
        return x

    def fed_back(self, out: mx.array) -> mx.array:
        x: mx.array = self.norm(out) if self.config.norm_output else out
        return x

    def logits(self, out: mx.array) -> mx.array:
        logits: mx.array = self.lm_head(self.norm(out))
        return logits


def eagle3_proposer(network: Eagle3, vocab_size: int) -> ChainProposer:
    return ChainProposer("eagle3", network, vocab_size)


# -- reading a checkpoint ------------------------------------------------------------------


def load_eagle3(folder: Path, target: TargetLike, *, quantize_bits: int | None = None) -> Eagle3:
    """The EAGLE-3 drafter in ``folder`` for ``target``. Raises ModelError or PairingError."""
    data = read_config(folder)
    try:
        config = eagle3_config(data, target)
        check_reading(
            target, taps=config.taps, width=config.feature, vocab_size=config.layer.vocab_size
        )
        return _load(folder, config, target, quantize_bits)
    except DsparkError:
        raise
    except Exception as error:  # a config whose values are of no use to the layers
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"cannot load the drafter in {folder}: {why}", "check its config.json"
        ) from error


def _load(
    folder: Path, config: Eagle3Config, target: TargetLike, quantize_bits: int | None
) -> Eagle3:
    weights = _named_as_here(read_tensors(folder))
    ids = draft_vocabulary(config.draft_vocab_size, config.layer.vocab_size, weights)
    own = {name for name in ("embed_tokens", "lm_head") if f"{name}.weight" in weights}
    if "embed_tokens" in own and not config.own_embedding and _fits(target, config):
        # Exporters write one even where it was never trained, sometimes a random one.
        own.remove("embed_tokens")
        weights = {k: v for k, v in weights.items() if not k.startswith("embed_tokens.")}
    if len(own) < 2 and not _fits(target, config):
        missing = "lm_head" if "embed_tokens" in own else "embed_tokens"
        raise ModelError(
            f"{folder} has no {missing}, and the target's is {target.hidden_size} wide "
            f"where the drafter is {config.layer.hidden_size}",
            "use a checkpoint that contains it",
        )
    network = Eagle3(config, qk_norm="layers.0.self_attn.q_norm.weight" in weights)
    check_tensors(folder, network, weights, frozenset(own))
    dtype = default_dtype(weights)
    network.load_weights(
        [
            (k, v.astype(dtype) if mx.issubdtype(v.dtype, mx.floating) else v)
            for k, v in weights.items()
        ],
        strict=False,
    )
    if not mx.stack([mx.isfinite(v).all() for v in weights.values()]).all().item():
        raise ModelError(
            f"the drafter in {folder} has weights that are no numbers", "download it again"
        )
    if quantize_bits is not None:
        quantize_linears(
            network,
            quantize_bits,
            lambda name, module: (
                isinstance(module, nn.Linear) and name.split(".")[0] in ("layers", "fc", *own)
            ),
        )
    attach(network, target, frozenset(own), ids)
    network.eval()
    mx.eval(network.parameters())
    return network


def attach(
    network: Eagle3, target: TargetLike, own: frozenset[str], ids: mx.array | None = None
) -> None:
    """Borrow the target's embedding and head where they are not its ``own``."""
    if "embed_tokens" not in own:
        network.embed_tokens = target.embed_tokens
        network.embed_scale = embedding_scale(target)
    if "lm_head" not in own:
        head = TiedHead(target.embed_tokens) if target.lm_head is None else target.lm_head
        network.lm_head = head if ids is None else take_rows(head, ids)
    if ids is not None and int(mx.max(ids)) >= target.vocab_size:
        raise PairingError(
            f"the draft vocabulary has ids outside the target's {target.vocab_size}", HINT
        )
    if ids is not None:
        network.set_draft_vocabulary(ids)


def _fits(target: TargetLike, config: Eagle3Config) -> bool:
    return target.hidden_size == config.layer.hidden_size


def _named_as_here(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The official layout calls its one layer ``midlayer``; some put all under ``model``."""
    named = {}
    for name, value in weights.items():
        name = name.removeprefix("model.")
        if name.startswith("midlayer."):
            name = "layers.0." + name.removeprefix("midlayer.")
        if name not in _IGNORED:
            named[name] = value
    return named


def eagle3_config(data: Mapping[str, Any], target: TargetLike) -> Eagle3Config:
    """From any of the layouts. Raises ModelError naming the bad key."""
    layer: Any = data
    if "transformer_layer_config" in data:
        layer = need(data, "transformer_layer_config")
        if not isinstance(layer, Mapping):
            raise bad("transformer_layer_config", "must be an object")
        if layer.get("model_type") not in (None, "llama", "qwen3"):
            raise bad("model_type", f"{layer['model_type']!r} is unknown")
    nested = _nested(data)
    taps = eagle3_taps(data, target)
    one = nested.get("use_aux_hidden_state") is False
    block = data.get("speculators_config") or {}
    methods = block.get("proposal_methods") or [{}]
    shapes = layer_fields(layer, "qwen3")
    # What a block drafter's record asks for beside the layers means nothing here.
    shapes |= {"block_size": 1, "mask_token_id": 0, "target_layer_ids": (0,)}
    return Eagle3Config(
        layer=DrafterConfig(**shapes),
        taps=taps,
        feature=maybe_whole(data, "target_hidden_size") or target.hidden_size,
        block=maybe_whole(methods[0], "speculative_tokens") or BLOCK,
        draft_vocab_size=maybe_whole(data, "draft_vocab_size"),
        fc=not one,
        fc_bias=flag(data, "bias"),
        norm_before_fc=flag(data, "norm_before_fc", flag(nested, "norm_before_fc")),
        fc_norm=bool(data.get("fc_norm")),
        # speculators trained the first drafters with it and wrote the key only later.
        norm_before_residual=flag(data, "norm_before_residual", "speculators_model_type" in data),
        norm_output=flag(data, "norm_output"),
        own_embedding=flag(data, "embed_requires_grad"),
    )


def _nested(data: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = data.get("eagle_config") or {}
    if not isinstance(nested, Mapping):
        raise bad("eagle_config", f"must be an object, got {nested!r}")
    return nested


def eagle3_taps(data: Mapping[str, Any], target: TargetLike) -> tuple[int, ...]:
    """The layers whose outputs are read; what an id counts depends on where it stands.

    A key ``taps`` overrides everything: outputs of layers, counted from 0. Ids at the
    top level count hidden states, of which 0 is the embedding and j the output of
    layer j - 1. In ``eagle_config`` the same ids name layer outputs, except where one
    names the last hidden state, and for DeepSeek and GLM-4.7-Flash. A checkpoint without
    ids reads what enters layers 2, n // 2 and n - 3, as the official code does.
    """
    key, n = "eagle_aux_hidden_state_layer_ids", target.num_layers
    if data.get("taps") is not None:
        return wholes(data, "taps")
    nested = _nested(data)
    if nested.get("use_aux_hidden_state") is False:
        return (n,)  # after the final norm
    if data.get(key) is not None:
        return tuple(i - 1 for i in wholes(data, key))
    if nested.get(key) is not None:
        ids = wholes(nested, key)
        config = getattr(target, "config", {})
        kind = str(config.get("text_config", config).get("model_type", ""))
        shifted = kind.startswith(("deepseek", "glm4_moe_lite")) and ids[0] != 1
        return tuple(i - 1 for i in ids) if n in ids or shifted else ids
    return (1, n // 2 - 1, n - 4)


def describe(network: Eagle3) -> str:
    """What was read, in one line."""
    c = network.config
    norms = [
        name
        for name in ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
        if getattr(c, name)
    ]
    return (
        f"taps {', '.join(map(str, c.taps))}; block {c.block}; "
        f"norms {', '.join(norms) or 'as in the paper'}; "
        f"fed back {'after' if c.norm_output else 'before'} the norm"
    )
