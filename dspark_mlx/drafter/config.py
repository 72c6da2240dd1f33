"""What a drafter is made of: one frozen record, read from a checkpoint's config.json.

Two layouts are understood: DeepSpec's own (flat, named after the Hugging Face
Qwen3 and Gemma 4 configs) and the one vLLM's speculators library writes (the
layer's fields nested under ``transformer_layer_config``). ``to_dict`` always
writes DeepSpec's. This module reads numbers and refuses bad ones by the name of
their key; whether a drafter fits a given target is ``pairing``'s question.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..errors import ModelError

ARCHITECTURES = {"Qwen3DSparkModel": "qwen3", "Gemma4DSparkModel": "gemma4"}
MARKOV_HEADS = ("vanilla", "gated", "rnn")
_ACTIVATIONS = {"qwen3": ("silu",), "gemma4": ("gelu_pytorch_tanh",)}

_ROPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Shapes and constants of one DSpark drafter.

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
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read {path}: {error}") from None
        if not isinstance(data, dict):
            raise ModelError(f"{path} does not hold a JSON object")
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DrafterConfig:
        """From a DeepSpec or a speculators config. Raises ModelError naming the bad key."""
        if "speculators_model_type" in data or "transformer_layer_config" in data:
            return cls(**_from_speculators(data))
        return cls(**_from_deepspec(data))

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


# -- reading ---------------------------------------------------------------------------


def _bad(key: str, problem: str) -> ModelError:
    return ModelError(f"drafter config: {key!r} {problem}")


def _need(data: Mapping[str, Any], key: str) -> Any:
    if data.get(key) is None:
        raise _bad(key, "is missing")
    return data[key]


def _whole(data: Mapping[str, Any], key: str) -> int:
    value = _need(data, key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _bad(key, f"must be a whole number, got {value!r}")
    return value


def _maybe_whole(data: Mapping[str, Any], key: str) -> int | None:
    return None if data.get(key) is None else _whole(data, key)


def _number(data: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = data.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _bad(key, f"must be a number, got {value!r}")
    return float(value)


def _flag(data: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = data.get(key, default)
    if not isinstance(value, bool):
        raise _bad(key, f"must be true or false, got {value!r}")
    return value


def _wholes(data: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = _need(data, key)
    if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
        raise _bad(key, f"must be a list of whole numbers, got {value!r}")
    return tuple(value)


def _rope(data: Mapping[str, Any], gemma: bool) -> dict[str, Any]:
    """The rope of full attention, whichever of the three Hugging Face spellings is used."""
    rope = data.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise _bad("rope_parameters", f"must be an object, got {rope!r}")
    if gemma and "full_attention" in rope:
        rope = rope["full_attention"]
    rope = {key: value for key, value in rope.items() if value is not None}
    if "rope_theta" not in rope and data.get("rope_theta") is not None:
        rope["rope_theta"] = data["rope_theta"]
    rope.update(data.get("rope_scaling") or {})
    rope["rope_theta"] = _number(rope, "rope_theta", 10000.0)
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if rope["rope_type"] not in _ROPES:
        raise _bad("rope_type", f"{rope['rope_type']!r} is unknown")
    return rope


def _layer_fields(data: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The fields of the transformer layers, common to both layouts."""
    gemma = architecture == "gemma4"
    layers = _whole(data, "num_hidden_layers")
    kinds = data.get("layer_types") or ["full_attention"] * layers
    if any(kind != "full_attention" for kind in kinds[:layers]):
        raise _bad("layer_types", "asks for sliding layers, which DSpark drafters do not have here")
    activation = data.get("hidden_activation" if gemma else "hidden_act")
    if activation is not None and activation not in _ACTIVATIONS[architecture]:
        raise _bad("hidden_activation" if gemma else "hidden_act", f"{activation!r} is unknown")
    if data.get("enable_moe_block"):
        raise _bad("enable_moe_block", "is set, but draft layers are dense")
    if data.get("hidden_size_per_layer_input"):
        raise _bad("hidden_size_per_layer_input", "is set, but draft layers have no such input")
    hidden, heads = _whole(data, "hidden_size"), _whole(data, "num_attention_heads")
    k_eq_v = gemma and _flag(data, "attention_k_eq_v")
    kv_key = "num_global_key_value_heads" if k_eq_v else "num_key_value_heads"
    dim_key = "global_head_dim" if gemma else "head_dim"
    return {
        "architecture": architecture,
        "hidden_size": hidden,
        "intermediate_size": _whole(data, "intermediate_size"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _whole(data, kv_key),
        "head_dim": _maybe_whole(data, dim_key) or hidden // max(heads, 1),
        "vocab_size": _whole(data, "vocab_size"),
        "rms_norm_eps": _number(data, "rms_norm_eps", 1e-6),
        "rope_parameters": _rope(data, gemma),
        "max_position_embeddings": _maybe_whole(data, "max_position_embeddings") or 32768,
        "attention_bias": _flag(data, "attention_bias"),
        "attention_k_eq_v": k_eq_v,
        "final_logit_softcapping": (
            _number(data, "final_logit_softcapping")
            if gemma and data.get("final_logit_softcapping") is not None
            else None
        ),
    }


def _draft_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of DSpark itself, common to both layouts."""
    rank = _maybe_whole(data, "markov_rank") or 0
    confidence = _flag(data, "enable_confidence_head")
    anchored = _flag(data, "sample_from_anchor", True)
    quantization = data.get("quantization")
    if quantization is not None:
        if not isinstance(quantization, Mapping):
            raise _bad("quantization", f"must be an object, got {quantization!r}")
        quantization = {key: _whole(quantization, key) for key in ("bits", "group_size")}
    return {
        "block_size": _whole(data, "block_size") - (0 if anchored else 1),
        "sample_from_anchor": anchored,
        "mask_token_id": _whole(data, "mask_token_id"),
        "draft_vocab_size": _maybe_whole(data, "draft_vocab_size"),
        "markov_rank": rank,
        "markov_head_type": _need(data, "markov_head_type") if rank else None,
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": confidence and _flag(data, "confidence_head_with_markov"),
        "target_hidden_size": _maybe_whole(data, "target_hidden_size"),
        "num_target_layers": _maybe_whole(data, "num_target_layers"),
        "target_model_type": data.get("target_model_type"),
        "num_anchors": _maybe_whole(data, "num_anchors") or None,
        "quantization": quantization,
    }


def _from_deepspec(data: Mapping[str, Any]) -> dict[str, Any]:
    names = data.get("architectures") or []
    architecture = next((ARCHITECTURES[n] for n in names if n in ARCHITECTURES), None)
    if architecture is None:
        raise ModelError(
            f"not a DSpark drafter: 'architectures' is {names!r}",
            f"known are {', '.join(ARCHITECTURES)}",
        )
    taps = {"target_layer_ids": _wholes(data, "target_layer_ids")}
    return _layer_fields(data, architecture) | _draft_fields(data) | taps


def _from_speculators(data: Mapping[str, Any]) -> dict[str, Any]:
    kind = data.get("speculators_model_type")
    if kind != "dspark":
        raise ModelError(
            f"not a DSpark drafter: 'speculators_model_type' is {kind!r}", "only 'dspark' is known"
        )
    if data.get("causal"):
        raise _bad("causal", "is set, but a DSpark block sees all of itself")
    layer = _need(data, "transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise _bad("transformer_layer_config", "must be an object")
    data = dict(data)
    data.setdefault("markov_head_type", "vanilla")
    if data.get("sample_from_anchor") is None:
        data["sample_from_anchor"] = _anchor_slot_predicts(data)
    # Their ids count hidden states: 0 is the embedding, j the output of layer j - 1.
    taps = tuple(i - 1 for i in _wholes(data, "aux_hidden_state_layer_ids"))
    return _layer_fields(layer, "qwen3") | _draft_fields(data) | {"target_layer_ids": taps}


def _anchor_slot_predicts(data: Mapping[str, Any]) -> bool:
    """Older speculators configs say it only through the number of tokens they propose."""
    try:
        return bool(
            data["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
            >= data["block_size"]
        )
    except (KeyError, IndexError, TypeError):
        return True


# -- checking --------------------------------------------------------------------------


def _check(c: DrafterConfig) -> None:
    if c.architecture not in _ACTIVATIONS:
        raise _bad("architecture", f"{c.architecture!r} is unknown")
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
            raise _bad(key, f"must be at least 1, got {getattr(c, key)}")
    if c.num_attention_heads % c.num_key_value_heads:
        raise _bad(
            "num_attention_heads",
            f"{c.num_attention_heads} is no multiple of {c.num_key_value_heads} key/value heads",
        )
    if c.head_dim % 2:
        raise _bad("head_dim", f"must be even to be rotated, got {c.head_dim}")
    if not 0 <= c.mask_token_id < c.vocab_size:
        raise _bad(
            "mask_token_id", f"{c.mask_token_id} is outside the vocabulary of {c.vocab_size}"
        )
    if c.draft_vocab_size is not None and not 1 <= c.draft_vocab_size <= c.vocab_size:
        raise _bad("draft_vocab_size", f"{c.draft_vocab_size} is not within 1..{c.vocab_size}")
    taps = c.target_layer_ids
    if not taps or min(taps) < -1 or any(a >= b for a, b in pairwise(taps)):
        raise _bad("target_layer_ids", f"must rise strictly from -1 or more, got {list(taps)}")
    if c.markov_rank < 0:
        raise _bad("markov_rank", f"must not be negative, got {c.markov_rank}")
    if (c.markov_head_type is None) != (c.markov_rank == 0):
        raise _bad("markov_head_type", f"{c.markov_head_type!r} with rank {c.markov_rank}")
    if c.markov_head_type is not None and c.markov_head_type not in MARKOV_HEADS:
        raise _bad(
            "markov_head_type",
            f"{c.markov_head_type!r} is unknown; known are {', '.join(MARKOV_HEADS)}",
        )
    if c.confidence_head_with_markov and c.markov_rank == 0:
        raise _bad("confidence_head_with_markov", "needs a Markov head")
    if c.final_logit_softcapping is not None and c.final_logit_softcapping <= 0:
        raise _bad("final_logit_softcapping", "must be positive")
    if c.rms_norm_eps <= 0:
        raise _bad("rms_norm_eps", "must be positive")
