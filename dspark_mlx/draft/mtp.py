"""Multi-token prediction: the extra decoder layer that some targets were trained with.

Entry j of the chain pairs the token t_{j+1} with h_j, the target's hidden state of
position j after its final norm. With e = embedding of t_{j+1}:

    x = eh_proj([enorm(e) ; hnorm(h_j)])                        (2 H -> H)
    x = decoder layer(x)                                        (of the target's own kind)
    g = norm(x)
    p(t_{j+2}) = softmax(the target's lm_head(g))

To draft the token after next the one layer is used again, with g in place of h.
mlx-lm drops these tensors when it loads a target, so they are read from the files: of
the original repository, of a folder of their own, or of one beside the target's weights.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import DsparkError, ModelError, PairingError
from ..model.cache import RowsKV
from ..model.rows import Rows
from ..model.target import Target, named_tensors
from .chain import ChainProposer
from .dspark.config import read_config
from .dspark.load_drafter import check_tensors, quantize_linears
from .dspark.network import TiedHead
from .dspark.pairing import check_reading

# Tokens of a draft. The one layer was trained to see one token ahead, and acceptance falls
# fast behind the third (mlx-lm issues 872, 990).
BLOCK = 3


@dataclass(frozen=True)
class Family:
    """How a family of targets names the parts of its MTP layer, and what differs in them.

    ``prefix``: of every tensor's name, {n} being the number of target layers.
    ``parts``: names of the parts outside the decoder layer; ``layer``: what comes before
    the names inside it. ``ignored``: copies of the target's own embedding and head.
    """

    prefix: str
    parts: Mapping[str, str]
    second: str
    """What the names of a second MTP layer would contain, {m} being n + 1."""
    layer: str = ""
    ignored: tuple[str, ...] = ()
    zero_centred: bool = False
    """Norm weights are stored as w - 1 in the original files."""
    hidden_first: bool = False
    """The order of the concatenation is [hnorm(h) ; enorm(e)]."""
    skips_first_embedding: bool = False
    """e is 0 in the first entry of a text."""


_NEXTN = Family(
    prefix="model.layers.{n}.",
    parts={
        "enorm": "enorm",
        "hnorm": "hnorm",
        "eh_proj": "eh_proj",
        "shared_head.norm": "norm",
    },
    second="model.layers.{m}.",
    ignored=("embed_tokens.weight", "shared_head.head.weight"),
)
_QWEN = Family(
    prefix="mtp.",
    parts={
        "pre_fc_norm_embedding": "enorm",
        "pre_fc_norm_hidden": "hnorm",
        "fc": "eh_proj",
        "norm": "norm",
    },
    second="layers.1.",
    layer="layers.0.",
    ignored=("embed_tokens.weight", "lm_head.weight"),
    zero_centred=True,
)
_MIMO = Family(
    prefix="model.mtp_layers.0.",
    parts={
        "token_layernorm": "enorm",
        "hidden_layernorm": "hnorm",
        "input_proj": "eh_proj",
        "final_layernorm": "norm",
    },
    second="model.mtp_layers.1.",
    hidden_first=True,
    skips_first_embedding=True,
)
FAMILIES = {
    "deepseek_v3": _NEXTN,
    "glm4_moe": _NEXTN,
    "qwen3_next": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_5_moe_text": _QWEN,
    "mimo": _MIMO,
}


@dataclass(frozen=True)
class MTPConfig:
    """``feeds_normed``: whether g is fed back, or x as it leaves the decoder layer."""

    family: Family
    tap: int
    hidden_size: int
    block: int = BLOCK
    feeds_normed: bool = True
    norms: str = "as stored"


class MTP(nn.Module):
    """The MTP layer of ``target`` (``ChainNetwork``), with random weights until loaded."""

    def __init__(self, config: MTPConfig, target: Target) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, float(getattr(target.norm, "eps", 1e-6))
        self.config = config
        self.taps, self.block, self.feature_size = (config.tap,), config.block, hidden
        self.embed_tokens = target.embed_tokens
        self.lm_head = TiedHead(target.embed_tokens) if target.lm_head is None else target.lm_head
        self.enorm = nn.RMSNorm(hidden, eps=eps)
        self.hnorm = nn.RMSNorm(hidden, eps=eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer: Any = _one_layer_model(target.model).layers[0]
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self._bytes: float | None = None

    @property
    def draft_to_target(self) -> mx.array | None:
        return None

    @property
    def dtype(self) -> mx.Dtype:
        kind: mx.Dtype = self.norm.weight.dtype
        return kind

    @property
    def kv_bytes_per_token(self) -> float:
        if self._bytes is None:  # known from the shapes of one entry, which is never computed
            rows = self.make_rows()
            blank = mx.zeros((1, 1, self.feature_size), dtype=self.dtype)
            self.run(mx.array([[0]]), blank, rows)
            self._bytes = float(sum(part.nbytes / part.shape[2] for part in rows.arrays))
        return self._bytes

    def make_rows(self) -> Rows:
        return Rows([RowsKV(1)])

    def from_features(self, features: mx.array) -> mx.array:
        return features.astype(self.dtype)

    def run(self, tokens: mx.array, inputs: mx.array, rows: Rows) -> mx.array:
        """x of each entry, as the decoder layer leaves it: ``(B, L, H)``."""
        cache, length = rows.layers[0], tokens.shape[1]
        # A boolean array, for DeepSeek's attention selects by it; one token a row needs none.
        mask = cache.make_mask(length, return_array=length > 1)
        e = self.embed_tokens(tokens).astype(self.dtype)
        if self.config.family.skips_first_embedding:
            place = mx.array(cache.lengths)[:, None] + mx.arange(length)
            e = mx.where((place == 0)[..., None], 0.0, e)
        both = [self.enorm(e), self.hnorm(inputs)]
        if self.config.family.hidden_first:
            both.reverse()
        x: mx.array = self.layer(self.eh_proj(mx.concatenate(both, axis=-1)), mask, cache)
        return x

    def fed_back(self, out: mx.array) -> mx.array:
        g: mx.array = self.norm(out) if self.config.feeds_normed else out
        return g

    def logits(self, out: mx.array) -> mx.array:
        logits: mx.array = self.lm_head(self.norm(out))
        return logits


def mtp_proposer(network: MTP, vocab_size: int) -> ChainProposer:
    return ChainProposer("mtp", network, vocab_size)


def describe(network: MTP) -> str:
    """What was read, in one line."""
    c = network.config
    return (
        f"tap {c.tap} (after the final norm); block {c.block}; norms {c.norms}; "
        f"fed back {'after' if c.feeds_normed else 'before'} the norm"
    )


def _one_layer_model(model: nn.Module) -> Any:
    """A model of the same kind with one full-attention layer, MoE where the target's are."""
    wanted = {"num_hidden_layers": 1, "full_attention_interval": 1, "first_k_dense_replace": 0}
    args: Any = copy.deepcopy(model.args)
    if hasattr(args, "text_config"):
        text = {k: v for k, v in wanted.items() if k in args.text_config}
        # Layers are told apart by the interval; a list of their kinds would be too long.
        kept = {k: v for k, v in args.text_config.items() if k != "layer_types"}
        args = replace(args, text_config={**kept, "full_attention_interval": 1, **text})
    else:
        args = replace(args, **{k: v for k, v in wanted.items() if hasattr(args, k)})
    kind: Any = type(model)
    return kind(args)


# -- reading a checkpoint ------------------------------------------------------------------


def is_mtp(config: Mapping[str, Any], tensors: set[str]) -> bool:
    """Whether a folder with this config and these tensors holds an MTP layer."""
    return str(config.get("model_type", "")).endswith("_mtp") or any(
        name.endswith(("mtp.fc.weight", ".eh_proj.weight")) or name.startswith("model.mtp_layers.")
        for name in tensors
    )


def load_mtp(folder: Path, target: Target, *, quantize_bits: int | None = None) -> MTP:
    """The MTP layer in ``folder`` for ``target``. Raises ModelError or PairingError."""
    data = read_config(folder)
    kind = _model_type(target.config)
    family = FAMILIES.get(kind)
    if family is None:
        raise PairingError(
            f"MTP layers of {kind or 'this'!r} targets are not supported",
            f"supported are {', '.join(FAMILIES)}",
        )
    text = data.get("text_config", data)
    check_reading(
        target,
        taps=(target.num_layers,),
        width=int(text.get("hidden_size", target.hidden_size)),
        vocab_size=int(text.get("vocab_size", target.vocab_size)),
        made_for=None if str(data.get("model_type", "")).endswith("_mtp") else _layers(text),
    )
    try:
        return _load(folder, data, family, target, quantize_bits)
    except DsparkError:
        raise
    except Exception as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"cannot load the MTP layer in {folder}: {why}", "check its config.json"
        ) from error


def _load(
    folder: Path, data: dict[str, Any], family: Family, target: Target, bits: int | None
) -> MTP:
    tensors, mlx_layout = _read_all(folder)
    parts = _of_layer(folder, tensors, family, target.num_layers)
    raw = family.zero_centred and _is_raw(tensors, mlx_layout)
    network = MTP(
        MTPConfig(
            family,
            target.num_layers,
            target.hidden_size,
            norms="zero-centred, 1 added" if raw else "as stored",
        ),
        target,
    )
    weights = _named_as_here(parts, family, target.model)
    if raw:
        norms = {n for n, m in network.named_modules() if isinstance(m, nn.RMSNorm)}
        weights = {k: v + 1 if k.rpartition(".")[0] in norms else v for k, v in weights.items()}
    packed = data.get("quantization")
    if packed is not None and any(name.endswith(".scales") for name in weights):
        nn.quantize(
            network,
            group_size=packed["group_size"],
            bits=packed["bits"],
            class_predicate=lambda name, module: f"{name}.scales" in weights,
        )
    check_tensors(folder, network, weights, frozenset())
    network.load_weights([(k, _cast(k, v, target.dtype)) for k, v in weights.items()], False)
    own = [v for k, v in named_tensors(network).items() if not k.startswith(_BORROWED)]
    if not mx.stack([mx.isfinite(v).all() for v in own]).all().item():
        raise ModelError(
            f"the MTP layer in {folder} has weights that are no numbers", "download it again"
        )
    if bits is not None and packed is None:
        quantize_linears(
            network,
            bits,
            lambda name, module: (
                hasattr(module, "to_quantized")
                and not name.startswith(_BORROWED)
                and not name.endswith(_ROUTERS)
            ),
        )
    network.eval()
    mx.eval(network.parameters())
    return network


_BORROWED = ("embed_tokens", "lm_head")
_ROUTERS = ("mlp.gate", "shared_expert_gate")  # small, and which experts run hangs on them


def _read_all(folder: Path) -> tuple[dict[str, mx.array], bool]:
    """All tensors of a folder, lazily, whatever its files are called; and whether mlx wrote them.

    A side file such as ``mtp.safetensors`` is in no index.
    """
    tensors: dict[str, mx.array] = {}
    formats = set()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            found: Any = mx.load(str(path), return_metadata=True)
        except (RuntimeError, ValueError) as error:
            raise ModelError(
                f"{path} is damaged or cut short: {error}", "delete it and download it again"
            ) from None
        tensors |= found[0]
        formats.add(found[1].get("format"))
    return tensors, "mlx" in formats


def _of_layer(
    folder: Path, tensors: dict[str, mx.array], family: Family, layers: int
) -> dict[str, mx.array]:
    """The tensors of the MTP layer, without what stands before their names."""
    prefix = family.prefix.format(n=layers)
    found = {}
    for name, value in tensors.items():
        _, here, rest = name.partition(prefix)
        if here:
            found[rest] = value
    if not found and f"{_part(family, 'eh_proj')}.weight" in tensors:
        found = dict(tensors)  # a folder of nothing else
    if not found:
        raise ModelError(
            f"{folder} has no tensors named {prefix}*",
            "converted checkpoints have none: name the original repository with --drafter",
        )
    second = family.second.format(m=layers + 1)
    # Qwen's are counted behind the prefix, all others in the whole name.
    if any(second in name for name in (found if family.layer else tensors)):
        raise ModelError(
            f"{folder} has more than one MTP layer", "only checkpoints with one are supported"
        )
    return {k: v for k, v in found.items() if k not in family.ignored}


def _part(family: Family, ours: str) -> str:
    return next(theirs for theirs, name in family.parts.items() if name == ours)


def _is_raw(tensors: dict[str, mx.array], mlx_layout: bool) -> bool:
    """Whether zero-centred norms are stored as they were trained, so that 1 must be added.

    mlx-lm adds it together with turning the convolutions' weights; where a folder has
    neither, what wrote its files tells.
    """
    convolutions = [v for k, v in tensors.items() if k.endswith("conv1d.weight")]
    if convolutions:
        return any(v.shape[-1] != 1 for v in convolutions)
    return not mlx_layout


def _named_as_here(
    parts: dict[str, mx.array], family: Family, model: nn.Module
) -> dict[str, mx.array]:
    """Our names. What is inside the decoder layer goes through the target's own ``sanitize``,
    which stacks experts and splits projections, as in any layer of the target."""
    named, inside = {}, {}
    for name, value in parts.items():
        part, _, kind = name.rpartition(".")
        if part in family.parts:
            named[f"{family.parts[part]}.{kind}"] = value
        else:
            inside[f"model.layers.0.{name.removeprefix(family.layer)}"] = value
    one = _one_layer_model(model)
    clean = one.sanitize(inside) if hasattr(one, "sanitize") else inside
    for name, value in clean.items():
        named[f"layer.{name.partition('layers.0.')[2] or name}"] = value
    return named


def _cast(name: str, value: mx.array, dtype: mx.Dtype) -> mx.array:
    exact = name.endswith("e_score_correction_bias") or not mx.issubdtype(value.dtype, mx.floating)
    return value if exact else value.astype(dtype)


def _model_type(config: Mapping[str, Any]) -> str:
    return str(config.get("text_config", config).get("model_type") or config.get("model_type", ""))


def _layers(text: Mapping[str, Any]) -> int | None:
    value = text.get("num_hidden_layers")
    return value if isinstance(value, int) else None
