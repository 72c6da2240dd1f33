"""DFlash: a block of masked slots, predicted at once, without sequential or confidence heads.

The network is DSpark's backbone with one difference: the anchor's own slot predicts
nothing, and slot k predicts the token at its own position, so a block of G slots
drafts G - 1 tokens. Newer drafters have sliding layers, in which a slot sees the last
W positions before it. z-lab's layout and speculators' are read; what this file does
not know is refused by its key, its name or its tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import ModelError
from .dflash2 import DFlash2, DFlash2Config
from .dspark.config import DrafterConfig, read_config
from .dspark.layouts import bad, flag, layer_fields, maybe_whole, need, whole, wholes
from .dspark.load_drafter import load_drafter
from .dspark.network import Drafter
from .dspark.pairing import TargetLike
from .dspark.proposer import DSparkProposer
from .proposer import DraftRow
from .rates import PeakRate

ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel")
# Keys of ``dflash_config`` that are read, or that say nothing about inference.
_KNOWN = {
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "causal",
    "use_swa",
    "swa_window_size",
    "projector_type",
    "attention_mode",
    "num_anchors",
}
_SECOND = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def load_dflash(folder: Path, target: TargetLike, *, quantize_bits: int | None = None) -> Drafter:
    """The DFlash drafter in ``folder`` for ``target``. Raises ModelError or PairingError."""
    config = dflash_config(read_config(folder))
    drafter = load_drafter(
        folder,
        target,
        quantize_bits=quantize_bits,
        config=config,
        network=DFlash2 if isinstance(config, DFlash2Config) else Drafter,
    )
    if "embed_tokens" in drafter.borrowed:
        drafter.embed_scale = embedding_scale(target)
    return drafter


def embedding_scale(target: TargetLike) -> float:
    """By what a target multiplies the rows of its embedding table: sqrt(H) in Gemma, else 1."""
    config = getattr(target, "config", {})
    kind = str(config.get("text_config", config).get("model_type", ""))
    return float(target.hidden_size) ** 0.5 if kind.startswith("gemma") else 1.0


def dflash_config(data: Mapping[str, Any]) -> DrafterConfig:
    """From z-lab's config or speculators'. Raises ModelError naming the bad key."""
    if "speculators_model_type" in data:
        return _from_speculators(data)
    return _from_zlab(data)


def _from_zlab(data: Mapping[str, Any]) -> DrafterConfig:
    names = data.get("architectures") or []
    nested = data.get("dflash_config") or {}
    if not isinstance(nested, Mapping):
        raise bad("dflash_config", f"must be an object, got {nested!r}")
    if names and not set(names) & set(ARCHITECTURES):
        raise ModelError(
            f"not a DFlash drafter: 'architectures' is {names!r}",
            f"known are {', '.join(ARCHITECTURES)}",
        )
    second = "DFlash2DraftModel" in names
    unknown = sorted(set(nested) - _KNOWN - set(_SECOND if second else ()))
    if unknown:
        raise bad(f"dflash_config.{unknown[0]}", "is unknown")
    if nested.get("projector_type") not in (None, "dflash"):
        raise bad("projector_type", f"{nested['projector_type']!r} is not DFlash")
    for key in ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers"):
        both = data.get(key), nested.get(key)
        if None not in both and both[0] != both[1]:
            raise bad(key, f"is {both[0]!r} at the top and {both[1]!r} in dflash_config")
    data = {**data, **{key: value for key, value in nested.items() if value is not None}}
    if data.get("rope_is_neox_style") is False:
        raise bad("rope_is_neox_style", "is false, and DFlash's rope is read as neox only")
    fields = layer_fields(_windowed(data), "qwen3", sliding=True)
    if data.get("causal") and not fields["windows"]:
        raise bad("causal", "is set, but only sliding layers can be causal here")
    taps = wholes(data, "target_layer_ids")  # outputs of these layers, counted from 0
    causal = flag(data, "causal", flag(data, "is_causal", True))
    if second:
        fields |= {key: whole(data, key) for key in _SECOND}
    return _config(data, fields, taps, anchored=False, window_causal=causal)


def _windowed(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """``layer_types`` and ``sliding_window``, also where only ``use_swa`` tells of a window."""
    if not flag(data, "use_swa"):
        return data
    layers = whole(data, "num_hidden_layers")
    window = whole(data, "swa_window_size")
    return {**data, "layer_types": ["sliding_attention"] * layers, "sliding_window": window}


def _from_speculators(data: Mapping[str, Any]) -> DrafterConfig:
    kind = data.get("speculators_model_type")
    if kind != "dflash":
        raise ModelError(f"not a DFlash drafter: 'speculators_model_type' is {kind!r}")
    layer = need(data, "transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise bad("transformer_layer_config", "must be an object")
    fields = layer_fields(layer, "qwen3", sliding=True)
    # Their ids count hidden states: 0 is the embedding, j the output of layer j - 1.
    taps = tuple(i - 1 for i in wholes(data, "aux_hidden_state_layer_ids"))
    config = _config(
        data,
        fields,
        taps,
        anchored=flag(data, "sample_from_anchor"),
        window_causal=not flag(data, "sliding_window_non_causal"),
    )
    return replace(config, window_from_anchor=True)


def _config(
    data: Mapping[str, Any],
    fields: dict[str, Any],
    taps: tuple[int, ...],
    *,
    anchored: bool,
    window_causal: bool,
) -> DrafterConfig:
    if data.get("markov_rank"):
        raise bad("markov_rank", "is set, but DFlash has no Markov head")
    kind = DFlash2Config if "selector_rank" in fields else DrafterConfig
    return kind(
        **fields,
        block_size=whole(data, "block_size") - (0 if anchored else 1),
        sample_from_anchor=anchored,
        mask_token_id=whole(data, "mask_token_id"),
        target_layer_ids=taps,
        draft_vocab_size=maybe_whole(data, "draft_vocab_size"),
        target_hidden_size=maybe_whole(data, "target_hidden_size"),
        num_target_layers=maybe_whole(data, "num_target_layers"),
        window_causal=window_causal,
    )


def describe(drafter: Drafter) -> str:
    """What was read of a block drafter, in one line."""
    c = drafter.config
    windows = sorted({w for w in c.windows if w is not None})
    parts = [
        f"taps {', '.join(map(str, c.target_layer_ids))}",
        f"block {c.block_size}",
        f"the anchor's slot {'predicts' if c.sample_from_anchor else 'is silent'}",
    ]
    if windows:
        kind = "causal" if c.window_causal else "both ways"
        parts.append(f"window {', '.join(map(str, windows))} in {_count(c)} layers, {kind}")
    if isinstance(c, DFlash2Config):
        parts.append(f"the best {c.selector_top_k} of each slot are selected in turn")
    return "; ".join(parts)


def _count(config: DrafterConfig) -> str:
    sliding = sum(w is not None for w in config.windows)
    return f"{sliding} of {config.num_hidden_layers}"


class DFlashProposer(DSparkProposer):
    """DSpark's proposer; confidences come from how peaked each slot is (``PeakRate``).

    Slots do not see each other's tokens, so the later a slot, the less its peak is worth:
    a calibration, online or from ``calibration.json``, learns that slot by slot.
    """

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        super().__init__(drafter, vocab_size)
        self.spec = replace(self.spec, name="dflash", confidence="peak")
        self._peaks = PeakRate()

    def filter(self, rows: Sequence[int]) -> None:
        super().filter(rows)
        self._peaks.forget()

    def append_features(self, features: mx.array | None) -> list[mx.array]:
        return [*super().append_features(features), *self._peaks.arrays]

    def commit(
        self,
        context: Sequence[Sequence[int]],
        verified: Sequence[int],
        accepted: Sequence[int],
    ) -> None:
        super().commit(context, verified, accepted)
        self._peaks.commit(verified, accepted)

    def _confidence(
        self, logits: mx.array | None, peaks: mx.array, rows: Sequence[DraftRow], width: int
    ) -> mx.array:
        greedy = [row.params.greedy for row in rows]
        if self.drafter.calibration is not None:
            return mx.sigmoid(self.drafter.calibration.apply(mx.zeros_like(peaks), greedy, peaks))
        return self._peaks.of_draft(peaks, greedy)
