"""Reading a drafter's config.json: both layouts, and every bad key named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drafter_toys import DRAFTERS, NAMES, toy_config
from hypothesis import given
from hypothesis import strategies as st

from dspark_mlx.draft.dspark.config import DrafterConfig
from dspark_mlx.errors import ModelError


def reference(name: str = "qwen3_vanilla") -> dict[str, Any]:
    return json.loads((DRAFTERS / name / "config.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_reference_configs_survive_a_round_trip(name: str) -> None:
    config = DrafterConfig.from_folder(DRAFTERS / name)
    assert DrafterConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    theirs, ours = reference(name), config.to_dict()
    for key in ("architectures", "block_size", "mask_token_id", "target_layer_ids", "markov_rank"):
        assert ours[key] == theirs[key]


@given(
    architecture=st.sampled_from(["qwen3", "gemma4"]),
    block=st.integers(1, 16),
    taps=st.lists(st.integers(-1, 40), min_size=1, max_size=5, unique=True).map(sorted),
    head=st.sampled_from([None, "vanilla", "gated", "rnn"]),
    draft_vocab=st.one_of(st.none(), st.integers(1, 96)),
    anchored=st.booleans(),
    k_eq_v=st.booleans(),
    layers=st.one_of(st.none(), st.integers(41, 60)),
    quantization=st.one_of(st.none(), st.just({"bits": 8, "group_size": 32})),
)
def test_any_config_survives_a_round_trip(
    architecture, block, taps, head, draft_vocab, anchored, k_eq_v, layers, quantization
) -> None:
    config = toy_config(
        architecture=architecture,
        block_size=block,
        target_layer_ids=tuple(taps),
        markov_head_type=head,
        markov_rank=8 if head else 0,
        confidence_head_with_markov=head is not None,
        draft_vocab_size=draft_vocab,
        sample_from_anchor=anchored,
        attention_k_eq_v=k_eq_v and architecture == "gemma4",
        final_logit_softcapping=30.0 if architecture == "gemma4" else None,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
        num_target_layers=layers,
        quantization=quantization,
    )
    assert DrafterConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "not a DSpark drafter"),
        ({"architectures": None}, "not a DSpark drafter"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "32"}, "'hidden_size' must be a whole number"),
        ({"num_attention_heads": True}, "'num_attention_heads' must be a whole number"),
        ({"num_attention_heads": 3}, "'num_attention_heads' 3 is no multiple of 2"),
        ({"head_dim": 15}, "'head_dim' must be even"),
        ({"block_size": 0}, "'block_size' must be at least 1, got 0"),
        ({"block_size": None}, "'block_size' is missing"),
        ({"mask_token_id": 96}, "'mask_token_id' 96 is outside the vocabulary of 96"),
        ({"mask_token_id": -1}, "'mask_token_id' -1 is outside"),
        ({"target_layer_ids": []}, "'target_layer_ids' must rise strictly"),
        ({"target_layer_ids": [4, 2]}, "'target_layer_ids' must rise strictly"),
        ({"target_layer_ids": [-2, 2]}, "'target_layer_ids' must rise strictly"),
        ({"target_layer_ids": 3}, "'target_layer_ids' must be a list"),
        ({"markov_rank": -1}, "'markov_rank' must not be negative"),
        ({"markov_head_type": "transformer"}, "'markov_head_type' 'transformer' is unknown"),
        ({"markov_head_type": None}, "'markov_head_type' is missing"),
        ({"markov_rank": 0}, "'confidence_head_with_markov' needs a Markov head"),
        ({"enable_confidence_head": "yes"}, "'enable_confidence_head' must be true or false"),
        ({"draft_vocab_size": 97}, r"'draft_vocab_size' 97 is not within 1\.\.96"),
        ({"layer_types": ["sliding_attention"] * 2}, "'layer_types' asks for sliding layers"),
        ({"hidden_act": "relu"}, "'hidden_act' 'relu' is unknown"),
        ({"rms_norm_eps": 0}, "'rms_norm_eps' must be positive"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' must be positive"),
        ({"rope_parameters": {"rope_theta": 0}}, "'rope_theta' must be positive"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "'rope_theta' must be positive"),
        ({"block_size": 100_000}, "'block_size' must be at most 1024"),
        ({"num_hidden_layers": 10**7}, "'num_hidden_layers' must be at most 256"),
        ({"head_dim": 10**12}, "'head_dim' must be at most"),
        ({"intermediate_size": 10**15}, "'intermediate_size' must be at most"),
        ({"rope_parameters": {"rope_theta": "big"}}, "'rope_theta' must be a number"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "'rope_type' 'spiral' is unknown"),
        ({"quantization": {"bits": 8}}, "'group_size' is missing"),
    ],
)
def test_bad_key_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        DrafterConfig.from_dict(reference() | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"enable_moe_block": True}, "'enable_moe_block' is set"),
        ({"hidden_size_per_layer_input": 256}, "'hidden_size_per_layer_input' is set"),
        ({"final_logit_softcapping": -1.0}, "'final_logit_softcapping' must be positive"),
        ({"num_global_key_value_heads": None}, "'num_global_key_value_heads' is missing"),
    ],
)
def test_bad_gemma_key_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        DrafterConfig.from_dict(reference("gemma4_vanilla") | changes)


def test_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no drafter folder at"):
        DrafterConfig.from_folder(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        DrafterConfig.from_folder(tmp_path)
    for text, said in (("{", "cannot read"), ("[]", "does not hold a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=said):
            DrafterConfig.from_folder(tmp_path)


def speculators(**changes: Any) -> dict[str, Any]:
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    keys += ("num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps")
    layer = {key: reference()[key] for key in keys}
    return {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": layer | {"model_type": "qwen3", "rope_theta": 5000.0},
        "aux_hidden_state_layer_ids": [0, 3, 5],
        "block_size": 5,
        "mask_token_id": 95,
        "draft_vocab_size": 40,
        "markov_rank": 8,
        "sample_from_anchor": True,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    } | changes


def test_speculators_layout_is_understood() -> None:
    config = DrafterConfig.from_dict(speculators())
    assert config.target_layer_ids == (-1, 2, 4)
    assert (config.draft_vocab_size, config.logit_size, config.block_size) == (40, 40, 5)
    assert config.rope_parameters["rope_theta"] == 5000.0
    assert config.markov_head_type == "vanilla"


def test_speculators_bonus_anchor_is_not_a_draft_slot() -> None:
    config = DrafterConfig.from_dict(speculators(sample_from_anchor=False))
    assert (config.block_size, config.sample_from_anchor) == (4, False)
    proposals = {"proposal_methods": [{"speculative_tokens": 4}]}
    older = speculators(speculators_config=proposals)
    del older["sample_from_anchor"]
    assert DrafterConfig.from_dict(older) == config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speculators_model_type": "eagle3"}, "'speculators_model_type' is 'eagle3'"),
        ({"transformer_layer_config": None}, "'transformer_layer_config' is missing"),
        ({"aux_hidden_state_layer_ids": None}, "'aux_hidden_state_layer_ids' is missing"),
        ({"causal": True}, "'causal' is set"),
    ],
)
def test_bad_speculators_key_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        DrafterConfig.from_dict(speculators(**changes))
