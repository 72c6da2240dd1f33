"""The two layouts of a drafter's config.json, read into the fields of ``DrafterConfig``.

DeepSpec's own is flat, named after the Hugging Face Qwen3 and Gemma 4 configs;
vLLM's speculators library nests the layers' fields under
``transformer_layer_config``. Values of a wrong kind are refused by the name of
their key; whether the numbers make sense together is ``config``'s question.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import ModelError

ARCHITECTURES = {"Qwen3DSparkModel": "qwen3", "Gemma4DSparkModel": "gemma4"}
_SPECFORGE = "DSparkDraftModel"
ACTIVATIONS = {"qwen3": ("silu",), "gemma4": ("gelu_pytorch_tanh",)}

_ROPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


def read_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of either layout. Raises ModelError naming the bad key."""
    if "speculators_model_type" in data or "transformer_layer_config" in data:
        return _from_speculators(data)
    return _from_deepspec(data)


def bad(key: str, problem: str) -> ModelError:
    return ModelError(f"drafter config: {key!r} {problem}")


def need(data: Mapping[str, Any], key: str) -> Any:
    if data.get(key) is None:
        raise bad(key, "is missing")
    return data[key]


def whole(data: Mapping[str, Any], key: str) -> int:
    value = need(data, key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad(key, f"must be a whole number, got {value!r}")
    return value


def maybe_whole(data: Mapping[str, Any], key: str) -> int | None:
    return None if data.get(key) is None else whole(data, key)


def number(data: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = data.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad(key, f"must be a number, got {value!r}")
    return float(value)


def flag(data: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = data.get(key, default)
    if not isinstance(value, bool):
        raise bad(key, f"must be true or false, got {value!r}")
    return value


def wholes(data: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = need(data, key)
    if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
        raise bad(key, f"must be a list of whole numbers, got {value!r}")
    return tuple(value)


def rope(data: Mapping[str, Any], gemma: bool) -> dict[str, Any]:
    """The rope of full attention, whichever of the three Hugging Face spellings is used."""
    rope = data.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise bad("rope_parameters", f"must be an object, got {rope!r}")
    if gemma and "full_attention" in rope:
        rope = rope["full_attention"]
    rope = {key: value for key, value in rope.items() if value is not None}
    if "rope_theta" not in rope and data.get("rope_theta") is not None:
        rope["rope_theta"] = data["rope_theta"]
    rope.update(data.get("rope_scaling") or {})
    rope["rope_theta"] = number(rope, "rope_theta", 10000.0)
    if not 0 < rope["rope_theta"] < 1e30:
        raise bad("rope_theta", f"must be positive, got {rope['rope_theta']}")
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if rope["rope_type"] not in _ROPES:
        raise bad("rope_type", f"{rope['rope_type']!r} is unknown")
    return rope


def layer_fields(
    data: Mapping[str, Any], architecture: str, *, sliding: bool = False
) -> dict[str, Any]:
    """The fields of the transformer layers, common to all layouts.

    ``sliding`` says whether layers with a window can be read.
    """
    gemma = architecture == "gemma4"
    layers = whole(data, "num_hidden_layers")
    kinds = data.get("layer_types") or ["full_attention"] * layers
    windows: tuple[int | None, ...] = ()
    if sliding and "sliding_attention" in kinds:
        window = whole(data, "sliding_window")
        windows = tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers])
        kinds = [kind for kind in kinds if kind != "sliding_attention"]
    if any(kind != "full_attention" for kind in kinds[:layers]):
        raise bad("layer_types", "asks for sliding layers, which DSpark drafters do not have here")
    activation = data.get("hidden_activation" if gemma else "hidden_act")
    if activation is not None and activation not in ACTIVATIONS[architecture]:
        raise bad("hidden_activation" if gemma else "hidden_act", f"{activation!r} is unknown")
    if data.get("enable_moe_block"):
        raise bad("enable_moe_block", "is set, but draft layers are dense")
    if data.get("hidden_size_per_layer_input"):
        raise bad("hidden_size_per_layer_input", "is set, but draft layers have no such input")
    hidden, heads = whole(data, "hidden_size"), whole(data, "num_attention_heads")
    k_eq_v = gemma and flag(data, "attention_k_eq_v")
    kv_key = "num_global_key_value_heads" if k_eq_v else "num_key_value_heads"
    dim_key = "global_head_dim" if gemma else "head_dim"
    return {
        "architecture": architecture,
        "hidden_size": hidden,
        "intermediate_size": whole(data, "intermediate_size"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": whole(data, kv_key),
        "head_dim": maybe_whole(data, dim_key) or hidden // max(heads, 1),
        "vocab_size": whole(data, "vocab_size"),
        "rms_norm_eps": number(data, "rms_norm_eps", 1e-6),
        "rope_parameters": rope(data, gemma),
        "max_position_embeddings": maybe_whole(data, "max_position_embeddings") or 32768,
        "attention_bias": flag(data, "attention_bias"),
        "attention_k_eq_v": k_eq_v,
        "windows": windows,
        "final_logit_softcapping": (
            number(data, "final_logit_softcapping")
            if gemma and data.get("final_logit_softcapping") is not None
            else None
        ),
    }


def _draft_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of DSpark itself, common to both layouts."""
    rank = maybe_whole(data, "markov_rank") or 0
    confidence = flag(data, "enable_confidence_head")
    anchored = flag(data, "sample_from_anchor", True)
    quantization = data.get("quantization")
    if quantization is not None:
        if not isinstance(quantization, Mapping):
            raise bad("quantization", f"must be an object, got {quantization!r}")
        quantization = {key: whole(quantization, key) for key in ("bits", "group_size")}
    return {
        "block_size": whole(data, "block_size") - (0 if anchored else 1),
        "sample_from_anchor": anchored,
        "mask_token_id": whole(data, "mask_token_id"),
        "draft_vocab_size": maybe_whole(data, "draft_vocab_size"),
        "markov_rank": rank,
        "markov_head_type": need(data, "markov_head_type") if rank else None,
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": confidence and flag(data, "confidence_head_with_markov"),
        "target_hidden_size": maybe_whole(data, "target_hidden_size"),
        "num_target_layers": maybe_whole(data, "num_target_layers"),
        "target_model_type": data.get("target_model_type"),
        "num_anchors": maybe_whole(data, "num_anchors") or None,
        "quantization": quantization,
    }


def _from_deepspec(data: Mapping[str, Any]) -> dict[str, Any]:
    names = data.get("architectures") or []
    nested = data.get("dflash_config")
    if isinstance(nested, Mapping) and nested.get("projector_type") == "dspark":
        # SpecForge's export: DSpark's own keys stand in here, some of them at the top as well.
        data = {**data, **{key: value for key, value in nested.items() if value is not None}}
        if _SPECFORGE in names:
            names = ["Qwen3DSparkModel"]
    architecture = next((ARCHITECTURES[n] for n in names if n in ARCHITECTURES), None)
    if architecture is None:
        raise ModelError(
            f"not a DSpark drafter: 'architectures' is {names!r}",
            f"known are {', '.join(ARCHITECTURES)}",
        )
    taps = {"target_layer_ids": wholes(data, "target_layer_ids")}
    return layer_fields(data, architecture) | _draft_fields(data) | taps


def _from_speculators(data: Mapping[str, Any]) -> dict[str, Any]:
    kind = data.get("speculators_model_type")
    if kind != "dspark":
        raise ModelError(
            f"not a DSpark drafter: 'speculators_model_type' is {kind!r}", "only 'dspark' is known"
        )
    if data.get("causal"):
        raise bad("causal", "is set, but a DSpark block sees all of itself")
    layer = need(data, "transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise bad("transformer_layer_config", "must be an object")
    data = dict(data)
    data.setdefault("markov_head_type", "vanilla")
    if data.get("sample_from_anchor") is None:
        data["sample_from_anchor"] = _anchor_slot_predicts(data)
    # Their ids count hidden states: 0 is the embedding, j the output of layer j - 1.
    taps = tuple(i - 1 for i in wholes(data, "aux_hidden_state_layer_ids"))
    return layer_fields(layer, "qwen3") | _draft_fields(data) | {"target_layer_ids": taps}


def _anchor_slot_predicts(data: Mapping[str, Any]) -> bool:
    """Older speculators configs say it only through the number of tokens they propose."""
    try:
        return bool(
            data["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
            >= data["block_size"]
        )
    except (KeyError, IndexError, TypeError):
        return True
