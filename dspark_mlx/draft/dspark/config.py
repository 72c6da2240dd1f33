"""What a drafter is made of: one frozen record, read from a checkpoint's config.json.

DeepSpec's and speculators' layouts are read (``layouts``); ``to_dict`` always
writes DeepSpec's. This module refuses numbers that make no drafter; whether one
fits a given target is ``pairing``'s question.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...errors import ModelError
from .layouts import ACTIVATIONS, ARCHITECTURES, bad, read_fields

MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Shapes and constants of one block drafter: DSpark, or DFlash without its heads.

    ``head_dim`` and ``num_key_value_heads`` are those of the draft layers, which
    in Gemma 4 terms are the *global* (full attention) ones. ``block_size`` is the
    number of tokens one block predicts. ``target_layer_ids`` are the tapped
    decoder layers of the target, -1 being the input of its first layer.
    """

    architecture: str = "qwen3"
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    draft_vocab_size: int | None = None
    """Size of the reduced vocabulary the logits are over; None: all of it."""
    markov_head_type: str | None = None
    markov_rank: int = 0
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    rms_norm_eps: float = 1e-6
    rope_parameters: Mapping[str, Any] = field(default_factory=lambda: {"rope_theta": 10000.0})
    """``rope_theta``, ``rope_type`` and what that type needs, as in Hugging Face configs."""
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    attention_k_eq_v: bool = False
    final_logit_softcapping: float | None = None
    sample_from_anchor: bool = True
    """Whether the anchor's own slot predicts. False (a speculators habit): the block holds one
    more slot than it predicts, and slot k predicts the token at its own position."""
    windows: tuple[int | None, ...] = ()
    """Per layer the sliding window, None for full attention; () for full attention everywhere."""
    window_causal: bool = True
    """Whether a slot of a sliding layer sees only the slots before it, beside itself."""
    window_from_anchor: bool = False
    """Whether a window reaches back from the anchor, equally for all slots, or from each slot."""
    target_hidden_size: int | None = None
    """Width of one tapped layer; None: ``hidden_size``."""
    num_target_layers: int | None = None
    target_model_type: str | None = None
    num_anchors: int | None = None
    quantization: Mapping[str, int] | None = None
    """``bits`` and ``group_size`` where the checkpoint itself is quantised."""

    @property
    def logit_size(self) -> int:
        """Ids the draft logits are over (before padding rows are cut to the target's)."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def feature_size(self) -> int:
        """Width of one position's features: taps x the target's hidden size."""
        return len(self.target_layer_ids) * (self.target_hidden_size or self.hidden_size)

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def from_folder(cls, folder: str | Path) -> DrafterConfig:
        """Read ``folder/config.json``. Raises ModelError saying what is missing or wrong."""
        data = read_config(folder)
        try:
            return cls.from_dict(data)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            path = Path(folder) / "config.json"
            raise ModelError(f"{path} is no drafter's config: {error!r}") from None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DrafterConfig:
        """From a DeepSpec or a speculators config. Raises ModelError naming the bad key."""
        return cls(**read_fields(data))

    def to_dict(self) -> dict[str, Any]:
        """DeepSpec's layout; ``from_dict`` of it gives an equal config."""
        gemma = self.architecture == "gemma4"
        name = next(k for k, v in ARCHITECTURES.items() if v == self.architecture)
        out: dict[str, Any] = {
            "architectures": [name],
            "model_type": "gemma4_text" if gemma else "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "markov_rank": self.markov_rank,
            "enable_confidence_head": self.enable_confidence_head,
            "confidence_head_with_markov": self.confidence_head_with_markov,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "num_anchors": self.num_anchors or 0,
        }
        rope = dict(self.rope_parameters)
        if gemma:
            out |= {
                "hidden_activation": "gelu_pytorch_tanh",
                "rope_parameters": {"full_attention": rope},
                "global_head_dim": self.head_dim,
                "num_global_key_value_heads": self.num_key_value_heads,
                "attention_k_eq_v": self.attention_k_eq_v,
                "final_logit_softcapping": self.final_logit_softcapping,
                "enable_moe_block": False,
                "hidden_size_per_layer_input": 0,
            }
        else:
            out |= {"hidden_act": "silu", "rope_parameters": rope}
        if self.markov_head_type is not None:
            out["markov_head_type"] = self.markov_head_type
        if not self.sample_from_anchor:
            # DeepSpec's block counts every slot, the anchor's too.
            out |= {"sample_from_anchor": False, "block_size": self.block_size + 1}
        for key in (
            "draft_vocab_size",
            "target_hidden_size",
            "num_target_layers",
            "target_model_type",
        ):
            if getattr(self, key) is not None:
                out[key] = getattr(self, key)
        if self.quantization is not None:
            out["quantization"] = dict(self.quantization)
        return out


def read_config(folder: str | Path) -> dict[str, Any]:
    """The object in ``folder/config.json``. Raises ModelError."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"no drafter folder at {folder}", "check the path")
    path = folder / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{folder} has no config.json", "a drafter is a folder in DeepSpec's layout"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return data


# -- checking --------------------------------------------------------------------------


# Far above any drafter there is: with more, one would load without end or crash MLX.
_MOST = {"block_size": 1024, "num_hidden_layers": 256, "head_dim": 1 << 14}


def _check(c: DrafterConfig) -> None:
    if c.architecture not in ACTIVATIONS:
        raise bad("architecture", f"{c.architecture!r} is unknown")
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "block_size",
        "max_position_embeddings",
    ):
        if getattr(c, key) < 1:
            raise bad(key, f"must be at least 1, got {getattr(c, key)}")
        if getattr(c, key) > _MOST.get(key, 10**7):
            raise bad(key, f"must be at most {_MOST.get(key, 10**7)}, got {getattr(c, key)}")
    if c.num_attention_heads % c.num_key_value_heads:
        raise bad(
            "num_attention_heads",
            f"{c.num_attention_heads} is no multiple of {c.num_key_value_heads} key/value heads",
        )
    if c.head_dim % 2:
        raise bad("head_dim", f"must be even to be rotated, got {c.head_dim}")
    if not 0 <= c.mask_token_id < c.vocab_size:
        raise bad("mask_token_id", f"{c.mask_token_id} is outside the vocabulary of {c.vocab_size}")
    if c.draft_vocab_size is not None and not 1 <= c.draft_vocab_size <= c.vocab_size:
        raise bad("draft_vocab_size", f"{c.draft_vocab_size} is not within 1..{c.vocab_size}")
    taps = c.target_layer_ids
    if not taps or min(taps) < -1 or any(a >= b for a, b in pairwise(taps)):
        raise bad("target_layer_ids", f"must rise strictly from -1 or more, got {list(taps)}")
    if c.markov_rank < 0:
        raise bad("markov_rank", f"must not be negative, got {c.markov_rank}")
    if (c.markov_head_type is None) != (c.markov_rank == 0):
        raise bad("markov_head_type", f"{c.markov_head_type!r} with rank {c.markov_rank}")
    if c.markov_head_type is not None and c.markov_head_type not in MARKOV_HEADS:
        raise bad(
            "markov_head_type",
            f"{c.markov_head_type!r} is unknown; known are {', '.join(MARKOV_HEADS)}",
        )
    if c.confidence_head_with_markov and c.markov_rank == 0:
        raise bad("confidence_head_with_markov", "needs a Markov head")
    if c.final_logit_softcapping is not None and c.final_logit_softcapping <= 0:
        raise bad("final_logit_softcapping", "must be positive")
    if c.windows and len(c.windows) != c.num_hidden_layers:
        raise bad("layer_types", f"names {len(c.windows)} of {c.num_hidden_layers} layers")
    if any(w is not None and w < 1 for w in c.windows):
        raise bad("sliding_window", "must be at least 1")
    if not 0 < c.rms_norm_eps < 1:
        raise bad("rms_norm_eps", f"must be positive and below 1, got {c.rms_norm_eps}")
