"""DFlash: reference numbers, the same text as without it, and folders that are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import laws
import mlx.core as mx
import mlx.nn as nn
import pytest
from decoding import make_engine, plain_text, request, run_one, toy_drafter, toy_target
from drafter_toys import DRAFTERS, ToyTarget
from mlx.utils import tree_map
from toys import prompt

from dspark_mlx.draft import DraftRow
from dspark_mlx.draft.dflash import DFlashProposer, describe, dflash_config, load_dflash
from dspark_mlx.draft.dflash2 import DFlash2, DFlash2Config
from dspark_mlx.draft.dspark.config import DrafterConfig
from dspark_mlx.draft.dspark.network import Drafter
from dspark_mlx.draft.dspark.pairing import attach_target
from dspark_mlx.draft.strategies import kind_of
from dspark_mlx.errors import ModelError
from dspark_mlx.request import SamplingParams

TOLERANCE = 1e-4
NAMES = ("dflash_zlab", "dflash_zlab_sliding", "dflash_2")


def stand_in(name: str) -> ToyTarget:
    """The target's embedding and head as the reference has them."""
    borrowed = laws.tensors(DRAFTERS / name / "target.safetensors")
    embed, head = nn.Embedding(96, 32), nn.Linear(32, 96, bias=False)
    embed.weight = borrowed["model.embed_tokens.weight"]
    head.weight = borrowed["lm_head.weight"]
    return ToyTarget(embed, head)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_reproduce_the_reference(name: str) -> None:
    drafter = load_dflash(DRAFTERS / name, stand_in(name))
    reference = laws.tensors(DRAFTERS / name / "reference.safetensors")
    context, done = drafter.make_context(), 0
    for number in range(3):
        expected = {
            key.split(".")[1]: value
            for key, value in reference.items()
            if key.startswith(f"round{number}.")
        }
        end = int(expected["context"])
        drafter.extend(reference["features"][:, done:end], context, start=[done])
        done = end
        out = drafter.draft(expected["anchor"].reshape(1), context)
        assert mx.abs(out.hidden[0] - expected["hidden"]).max() < TOLERANCE
        if "scores" in expected:  # the logits are those before the selector
            ids = mx.argsort(-drafter.base_logits(out.hidden)[0], axis=-1)[:, :4]
            assert ids.tolist() == expected["candidates"].tolist()
            scores = mx.take_along_axis(out.logits[0], ids, axis=-1)
            assert mx.abs(scores - expected["scores"]).max() < TOLERANCE
            assert mx.isfinite(out.logits).sum().item() == 4 * 5
            out = replace(out, logits=drafter.base_logits(out.hidden))
        assert mx.abs(out.logits[0] - expected["logits"]).max() < TOLERANCE
        assert out.tokens[0].tolist() == expected["tokens"].tolist()


def test_two_ragged_rows_draft_as_each_alone() -> None:
    for name in NAMES:
        drafter = load_dflash(DRAFTERS / name, stand_in(name))
        reference = laws.tensors(DRAFTERS / name / "reference.safetensors")
        proposer = DFlashProposer(drafter, 96)
        ends = [int(reference[f"round{n}.context"]) for n in (0, 2)]
        for end in ends:
            row = proposer.new_row()
            proposer.prefill(row, [2] * end, reference["features"][:, :end])
            proposer.extend(row)
        anchors = [int(reference[f"round{n}.anchor"]) for n in (0, 2)]
        rows = [DraftRow(a, n + 1, SamplingParams(), 5) for a, n in zip(anchors, ends, strict=True)]
        tokens = proposer.propose(rows).token_rows()
        assert tokens == [reference[f"round{n}.tokens"].tolist() for n in (0, 2)]


# -- on toys ----------------------------------------------------------------------------------


SECOND: dict[str, Any] = {
    "conv_kernel_size": 2,
    "conv_group_size": 8,
    "selector_rank": 8,
    "selector_top_k": 5,
}


def toy(
    windows: tuple[int | None, ...] = (), second: bool = False, **changes: Any
) -> Callable[[], DFlashProposer]:
    """Proposers of a random DFlash or DFlash 2 network for the llama toy."""
    target = toy_target("llama")
    plain = toy_drafter(target, head=None, confidence=False, calibrated=False).config
    config = replace(plain, sample_from_anchor=False, windows=windows, **changes)
    mx.random.seed(3)
    drafter = Drafter(config)
    if second:
        values = {f.name: getattr(config, f.name) for f in fields(config)}
        drafter = DFlash2(DFlash2Config(**values, **SECOND))
        parts = [drafter.candidate_selector, *(layer.mlp_conv for layer in drafter.layers)]
        for part in parts:
            part.update(tree_map(lambda v: mx.random.normal(v.shape), part.parameters()))
    attach_target(drafter, target)
    mx.eval(drafter.parameters())
    return lambda: DFlashProposer(drafter, target.vocab_size)


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"windows": (6, None)},
    "both ways": {"windows": (6, 6), "window_causal": False},
    "second": {"second": True},
    "from the anchor": {"windows": (6, None), "window_from_anchor": True},
}


@pytest.mark.parametrize("kind", ["full", "sliding", "second"])
def test_lossless_greedy(kind: str) -> None:
    laws.lossless_greedy("llama", toy(**KINDS[kind]))
    laws.ragged_rows_equal_each_alone("llama", toy(**KINDS[kind]))


@pytest.mark.parametrize("policy", ["auto", "lagged", "early-stop"])
def test_lossless_greedy_in_a_batch(policy: str) -> None:
    laws.ragged_rows_equal_each_alone("llama", toy(**KINDS["sliding"]), policy)


def test_ends() -> None:
    laws.ends("llama", toy(**KINDS["sliding"]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_row_drafts_the_same(kind: str) -> None:
    for width, accepted in ((1, 1), (5, 0), (5, 3)):
        laws.fresh_row("llama", toy(**KINDS[kind]), width, accepted)


@pytest.mark.parametrize(
    ("kind", "draft_sampling"),
    [("full", "greedy"), ("full", "coupled"), ("second", "coupled"), ("second", "probabilistic")],
)
def test_lossless_sampling(kind: str, draft_sampling: str) -> None:
    laws.lossless_sampling("llama", toy(**KINDS[kind]), draft_sampling)


@pytest.mark.parametrize("kind", ["full", "second"])
def test_non_anticipating(kind: str) -> None:
    laws.non_anticipating("llama", toy(**KINDS[kind]))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("from_anchor", [True, False])
def test_a_window_hides_what_the_definition_hides(causal: bool, from_anchor: bool) -> None:
    """Slot q of a block behind n positions: its keys, counted off one by one."""
    proposer = toy((6, None), window_causal=causal, window_from_anchor=from_anchor)()
    attention = proposer.drafter.layers[0].self_attn
    context = proposer.drafter.make_context(2)[0]
    blank = mx.zeros((2, 1, 9, 16))
    context.update_and_fetch(blank, blank)
    context.trim_to([9, 4])
    mask = attention._block_mask(context, 3)
    assert mask is not None
    mask = mx.broadcast_to(mask, (2, 1, 3, mask.shape[-1]))
    first = 0 if context.window is None else max(0, 4 - context.window + 1)
    for r, held in enumerate((9, 4)):
        for i, q in enumerate(range(held, held + 3)):
            low = held - 6 if from_anchor else q - 5
            high = q if causal else held + 2
            row: Any = mask[r, 0, i].tolist()
            seen = {k + first for k, visible in enumerate(row) if visible}
            assert seen == set(range(max(low, 0), high + 1))


def test_a_prefix_whose_window_is_gone_is_not_reused() -> None:
    """A sliding layer forgets; a prompt that parts from an old one far back starts anew."""
    target = toy_target("llama")
    engine = make_engine(target, [toy((6, None))()], prefill_chunk=64)
    long = prompt(700)
    run_one(engine, request("a", tokens=tuple(long), max_tokens=3, ignore_eos=True))
    turn = (*long[:300], *prompt(20, 5))
    ran = run_one(engine, request("b", tokens=turn, max_tokens=12, ignore_eos=True))
    assert ran.finished is not None and ran.finished.reused_tokens == 0
    assert tuple(ran.tokens) == plain_text("llama", turn, 12)
    again = run_one(engine, request("c", tokens=(*turn, *ran.tokens, 5, 6), max_tokens=4))
    assert again.finished is not None and again.finished.reused_tokens > 300


# -- configs ----------------------------------------------------------------------------------

ZLAB = json.loads((DRAFTERS / "dflash_zlab" / "config.json").read_text())


def edited(folder: Path, name: str = "dflash_zlab", **changes: Any) -> Path:
    """A copy of a reference folder whose config differs; None removes a key."""
    shutil.copytree(DRAFTERS / name, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def test_block_size_and_rope_are_read_wherever_they_stand() -> None:
    plain = dflash_config(ZLAB)
    assert plain.block_size == 5 and not plain.sample_from_anchor
    nested = {**ZLAB["dflash_config"], "block_size": 6}
    without = {k: v for k, v in ZLAB.items() if k not in ("block_size", "rope_theta")}
    for rope in (
        {"rope_theta": 5e6, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 5e6, "rope_type": "yarn", "factor": 4.0}},
        {"rope_theta": 5e6, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    ):
        config = dflash_config({**without, "dflash_config": nested, **rope})
        assert config.block_size == 5
        assert config.rope_parameters == {"rope_theta": 5e6, "rope_type": "yarn", "factor": 4.0}


def test_the_layout_of_speculators() -> None:
    layer = {k: v for k, v in ZLAB.items() if k not in ("dflash_config", "block_size")}
    layer |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64}
    config = dflash_config(
        {
            "speculators_model_type": "dflash",
            "transformer_layer_config": layer,
            "aux_hidden_state_layer_ids": [1, 3, 5],
            "block_size": 8,
            "mask_token_id": 95,
            "draft_vocab_size": 64,
        }
    )
    assert config.target_layer_ids == (0, 2, 4)
    assert config.block_size == 7 and config.draft_vocab_size == 64
    assert config.windows == (64, 64) and config.window_from_anchor and config.window_causal


def test_a_window_that_only_use_swa_tells_of() -> None:
    nested = {**ZLAB["dflash_config"], "use_swa": True, "swa_window_size": 32, "causal": False}
    config = dflash_config({**ZLAB, "dflash_config": nested})
    assert config.windows == (32, 32) and not config.window_causal


def test_specforge_keeps_the_keys_of_dspark_in_dflash_config() -> None:
    """Its drafters are DSpark's, and are told from DFlash's by their projector."""
    plain = json.loads((DRAFTERS / "qwen3_vanilla" / "config.json").read_text())
    inside = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
    nested = {"projector_type": "dspark", **{key: plain[key] for key in inside}}
    outside = {key: value for key, value in plain.items() if key not in inside}
    exported = {**outside, "architectures": ["DSparkDraftModel"], "dflash_config": nested}
    assert DrafterConfig.from_dict(exported) == DrafterConfig.from_dict(plain)
    with pytest.raises(ModelError, match="not a DSpark drafter"):
        DrafterConfig.from_dict({**plain, "architectures": ["DSparkDraftModel"]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": None}, "'block_size' is missing"),
        ({"dflash_config": {"target_layer_ids": [0, 2, 4]}}, "'mask_token_id' is missing"),
        ({"dflash_config": {**ZLAB["dflash_config"], "block_size": 8}}, "is 6 at the top and 8"),
        ({"dflash_config": {**ZLAB["dflash_config"], "gate": 1}}, "'dflash_config.gate' is unk"),
        ({"dflash_config": {**ZLAB["dflash_config"], "projector_type": "domino"}}, "'domino'"),
        ({"architectures": ["DFlash2DraftModel"]}, "'conv_kernel_size' is missing"),
        ({"rope_is_neox_style": False}, "'rope_is_neox_style' is false"),
        ({"dflash_config": {**ZLAB["dflash_config"], "causal": True}}, "'causal' is set"),
        ({"dflash_config": [1]}, "'dflash_config' must be an object"),
        ({"num_target_layers": 9}, "trained on a target of 9 layers"),
        ({"vocab_size": 4000}, "another tokenizer"),
        ({"num_hidden_layers": 3}, "layers\\.2.* missing"),
        ({"architectures": ["DFlashLagunaModel"]}, "DFlashLagunaModel"),
        ({"layer_types": ["linear_attention"] * 2}, "'layer_types'"),
    ],
)
def test_other_folders_are_refused_by_what_is_unknown(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = edited(tmp_path / "drafter", **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load_dflash(folder, stand_in("dflash_zlab"))
    assert "\n" not in str(caught.value)


def test_damaged_tensors_are_refused(tmp_path: Path) -> None:
    folder = edited(tmp_path / "drafter")
    weights = folder / "model.safetensors"
    tensors = laws.tensors(weights)
    mx.save_safetensors(str(weights), tensors | {"layers.0.g_proj.weight": mx.zeros((2, 2))})
    with pytest.raises(ModelError, match=r"layers\.0\.g_proj\.weight not known"):
        load_dflash(folder, stand_in("dflash_zlab"))
    mx.save_safetensors(str(weights), {f"model.{k}": v for k, v in tensors.items()})
    load_dflash(folder, stand_in("dflash_zlab"))
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(ModelError, match="damaged or cut short"):
        load_dflash(folder, stand_in("dflash_zlab"))


def test_what_a_folder_holds(tmp_path: Path) -> None:
    assert kind_of(DRAFTERS / "dflash_zlab") == "dflash"
    assert kind_of(DRAFTERS / "qwen3_vanilla") == "dspark"
    assert kind_of(edited(tmp_path / "a", architectures=None)) == "dflash"
    with pytest.raises(ModelError, match="'peagle'"):
        kind_of(edited(tmp_path / "b", speculators_model_type="peagle"))
    folder = edited(tmp_path / "c")
    for path in folder.glob("*.safetensors"):
        path.rename(path.with_suffix(".bin"))
    with pytest.raises(ModelError, match="never read"):
        kind_of(folder)


def test_what_was_read_is_told() -> None:
    drafter = load_dflash(DRAFTERS / "dflash_zlab_sliding", stand_in("dflash_zlab_sliding"))
    told = describe(drafter)
    assert told == (
        "taps 0, 2, 4; block 5; the anchor's slot is silent; window 8 in 1 of 2 layers, causal"
    )
