"""Loading and saving: strict, exact, and every refusal says which tensor or number is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from drafter_toys import DRAFTERS, NAMES, ToyTarget, edited_copy, toy_drafter, toy_target
from mlx.utils import tree_flatten

from dspark_mlx.draft.dspark.calibration import DraftCalibration, Scale
from dspark_mlx.draft.dspark.load_drafter import load_drafter, quantize_drafter
from dspark_mlx.draft.dspark.network import Drafter
from dspark_mlx.draft.dspark.pairing import attach_target
from dspark_mlx.draft.dspark.save import save_drafter
from dspark_mlx.errors import ModelError, PairingError, UsageError

NAME = "qwen3_vanilla"
IDS = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71]


def tensors_of(name: str = NAME) -> dict[str, mx.array]:
    return mx.load(str(DRAFTERS / name / "model.safetensors"))


def draft(drafter: Drafter, length: int = 6):
    context = drafter.make_context()
    shape = (1, length, drafter.config.feature_size)
    drafter.extend(mx.random.normal(shape, key=mx.random.key(3)), context)
    return drafter.draft(mx.array([3]), context)


def same_draft(a: Drafter, b: Drafter, tolerance: float = 1e-6) -> bool:
    ours, theirs = draft(a), draft(b)
    gap = float(mx.abs(ours.logits.astype(mx.float32) - theirs.logits.astype(mx.float32)).max())
    return gap < tolerance


def overlap(a: Drafter, b: Drafter) -> float:
    """Mean of sum(min(p_a, p_b)) over teacher-forced slots: the chance, at temperature 1,
    that a token b drafts would be accepted if a were the target."""
    rng = np.random.default_rng(0)
    features = mx.array(rng.normal(size=(2, 40, a.config.feature_size)).astype(np.float32))
    anchors = mx.array(rng.integers(0, 40, (2, 16)))
    previous = mx.array(rng.integers(0, 95, (2, 16, a.block_size)))
    p, q = (
        mx.softmax(d.forward_blocks(features, anchors, previous).logits.astype(mx.float32), axis=-1)
        for d in (a, b)
    )
    return float(mx.minimum(p, q).sum(-1).mean())


# -- files -----------------------------------------------------------------------------


def test_shards_load_as_the_single_file_does(tmp_path: Path) -> None:
    folder = edited_copy(NAME, tmp_path / "sharded")
    (folder / "model.safetensors").unlink()
    tensors = tensors_of()
    placed = {k: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, k in enumerate(tensors)}
    for shard in set(placed.values()):
        part = {k: v for k, v in tensors.items() if placed[k] == shard}
        mx.save_safetensors(str(folder / shard), part)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": placed}))
    assert same_draft(load_drafter(folder), load_drafter(DRAFTERS / NAME), 1e-9)

    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model-00002-of-00003\.safetensors"):
        load_drafter(folder)
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(ModelError, match="not a file beside it"):
        load_drafter(folder)
    index.write_text("{}")
    with pytest.raises(ModelError, match="cannot read"):
        load_drafter(folder)


def test_tensor_the_index_promises_must_be_in_a_shard(tmp_path: Path) -> None:
    folder = edited_copy(NAME, tmp_path / "d")
    placed = dict.fromkeys([*tensors_of(), "layers.9.ghost"], "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(ModelError, match=r"tensor layers\.9\.ghost listed in the index"):
        load_drafter(folder)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    folder = edited_copy(NAME, tmp_path / "d")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        load_drafter(folder)


@pytest.mark.parametrize("kept", [4, 1000, -10])
def test_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    folder = edited_copy(NAME, tmp_path / "d")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or cut short"):
        load_drafter(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"drop": ("fc.weight",)}, r"tensor fc\.weight missing"),
        ({"drop": ("confidence_head.proj.bias",)}, r"confidence_head\.proj\.bias missing"),
        (
            {"drop": tuple(f"layers.1.mlp.{n}_proj.weight" for n in ("up", "gate", "down"))},
            r"tensors layers\.1\.mlp\.down_proj\.weight, .* missing",
        ),
        ({"replace": {"markov_head.gate": mx.ones(3)}}, r"tensor markov_head\.gate not known"),
        ({"replace": {"fc.weight": mx.ones((32, 95))}}, r"fc\.weight has shape \(32, 95\), exp"),
        ({"config": {"num_hidden_layers": 1}}, r"layers\.1\..* and 8 more not known"),
        ({"config": {"num_hidden_layers": 3}}, r"layers\.2\..* and 8 more missing"),
        ({"config": {"markov_head_type": "rnn"}}, r"markov_head\.joint_proj.* missing"),
        ({"config": {"target_layer_ids": [0, 4]}}, r"fc\.weight has shape \(32, 96\), exp"),
    ],
)
def test_tensors_must_match_the_config(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    folder = edited_copy(NAME, tmp_path / "d", **changes)
    with pytest.raises(ModelError, match=said):
        load_drafter(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot read"),
        ('{"temperatures": [1, 1]}', "holds 2 temperatures for a block of 5"),
        ('{"temperatures": [1, 1, 0, 1, 1]}', "is not a positive"),
        ('{"temperatures": [1, 1, 1, 1, 1], "offsets": [0]}', "holds 1 offsets for a block of 5"),
        (
            '{"greedy": {"temperatures": [1, 1, 1, 1, 1], "offsets": [0, 0, 0, 0, NaN]}}',
            "not finite",
        ),
        ('{"temperatures": [1, 1, 1, 1, 1], "peaks": [1]}', "holds 1 peaks for a block of 5"),
        ('{"temperatures": [1, 1, 1, 1, 1], "peaks": [0, 0, -1, 0, 0]}', "negative"),
        ('{"greedy": [1, 1, 1, 1, 1]}', "cannot read"),
        ("{}", "cannot read"),
        ("[]", "cannot read"),
    ],
)
def test_bad_calibration_is_refused(tmp_path: Path, text: str, said: str) -> None:
    folder = edited_copy(NAME, tmp_path / "d")
    assert load_drafter(folder).calibration is None
    (folder / "calibration.json").write_text('{"temperatures": [1, 1.5, 2, 1, 0.5]}')
    both = Scale((1.0, 1.5, 2.0, 1.0, 0.5), (0.0,) * 5)
    assert load_drafter(folder).calibration == DraftCalibration(both, both)
    (folder / "calibration.json").write_text(text)
    with pytest.raises(ModelError, match=said):
        load_drafter(folder)


# -- the target ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ({"layers": 7}, "trained on a target of 6 layers, this one has 7"),
        ({"hidden": 48}, "reads hidden states of width 32, the target's have 48"),
        ({"vocab": 64}, "vocabulary has 96 ids, the target's 64: another tokenizer"),
        ({"vocab": 20_000}, "vocabulary has 96 ids, the target's 20000"),
    ],
)
def test_wrong_target_is_refused(target: dict[str, int], said: str) -> None:
    with pytest.raises(PairingError, match=said):
        load_drafter(DRAFTERS / NAME, toy_target(**target))


def test_tap_outside_the_target_is_refused(tmp_path: Path) -> None:
    folder = edited_copy(NAME, tmp_path / "d", config={"num_target_layers": None})
    with pytest.raises(PairingError, match=r"taps layer 4, but the target has layers 0\.\.3"):
        load_drafter(folder, toy_target(layers=4))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bits", [None, 8])
def test_embedding_and_head_come_from_the_target_when_absent(
    tmp_path: Path, tied: bool, bits: int | None
) -> None:
    target = toy_target(tied=tied)
    embedding, head = target.embed_tokens, target.lm_head
    if bits:
        target.embed_tokens = embedding = embedding.to_quantized(32, bits)
        target.lm_head = head = None if tied else head.to_quantized(32, bits)
    bare = edited_copy(NAME, tmp_path / "d", drop=("embed_tokens.weight", "lm_head.weight"))
    with pytest.raises(ModelError, match=r"no embed_tokens or lm_head \(load it together"):
        load_drafter(bare)
    drafter = load_drafter(bare, target)
    assert drafter.embed_tokens is embedding
    table = embedding(mx.arange(96))
    rows = (
        table
        if tied
        else head.weight
        if bits is None
        else mx.dequantize(head.weight, head.scales, head.biases, group_size=32, bits=bits)
    )
    full = edited_copy(
        NAME, tmp_path / "full", replace={"embed_tokens.weight": table, "lm_head.weight": rows}
    )
    assert same_draft(drafter, load_drafter(full), 1e-5)
    shared = load_drafter(DRAFTERS / NAME, target, share_with_target=True)
    assert same_draft(shared, drafter, 1e-9)


def test_own_embedding_and_head_win_over_the_targets() -> None:
    assert same_draft(
        load_drafter(DRAFTERS / NAME, toy_target()), load_drafter(DRAFTERS / NAME), 1e-9
    )


@pytest.mark.parametrize("name", ["qwen3_vanilla", "qwen3_nomarkov"])
@pytest.mark.parametrize("rows", [-1, 1])
@pytest.mark.parametrize("own", [True, False])
def test_padding_of_the_same_vocabulary_is_allowed(
    tmp_path: Path, name: str, rows: int, own: bool
) -> None:
    """One row in 96 more or less is padding: no id is proposed that either side lacks."""
    tensors = tensors_of(name)
    pad = {k: mx.concatenate([v, mx.full((104, v.shape[1]), 9.0)]) for k, v in tensors.items()
           if k in ("embed_tokens.weight", "lm_head.weight", "markov_head.markov_w1.weight",
                    "markov_head.markov_w2.weight")}  # fmt: skip
    drop = () if own else ("embed_tokens.weight", "lm_head.weight")
    pad = {k: v for k, v in pad.items() if k not in drop}
    folder = edited_copy(name, tmp_path / "d", config={"vocab_size": 200}, replace=pad, drop=drop)
    drafter = load_drafter(folder, toy_target(vocab=200 + rows))
    out = draft(drafter)
    assert out.logits.shape[-1] == min(200, 200 + rows)
    assert np.isfinite(np.array(out.logits)).all()


# -- reduced vocabularies --------------------------------------------------------------


def reduced_folder(path: Path, **changes: Any) -> Path:
    tensors = tensors_of()
    ids = mx.array(IDS)
    mask = mx.zeros((96,), dtype=mx.bool_)
    mask[ids] = True
    replace = {
        "lm_head.weight": tensors["lm_head.weight"][ids],
        "markov_head.markov_w2.weight": tensors["markov_head.markov_w2.weight"][ids],
        "d2t": ids.astype(mx.int64) - mx.arange(len(IDS)),
        "t2d": mask,
        "verifier_norm.weight": mx.ones((32,)),
    } | changes.pop("replace", {})
    config = {"draft_vocab_size": len(IDS)} | changes.pop("config", {})
    return edited_copy(NAME, path, config=config, replace=replace, **changes)


def test_reduced_vocabulary_is_the_full_one_restricted(tmp_path: Path) -> None:
    full, reduced = load_drafter(DRAFTERS / NAME), load_drafter(reduced_folder(tmp_path / "d"))
    assert reduced.draft_to_target.tolist() == IDS

    def restricted(logits: mx.array, k: int) -> mx.array:
        return mx.array(IDS)[mx.argmax(logits[:, mx.array(IDS)], axis=-1)]

    context = full.make_context()
    full.extend(mx.random.normal((1, 6, 96), key=mx.random.key(3)), context)
    expected = full.draft(mx.array([3]), context, sampler=restricted)
    out = draft(reduced)
    assert out.tokens.tolist() == expected.tokens.tolist()
    assert float(mx.abs(out.logits - expected.logits[..., mx.array(IDS)]).max()) < 1e-5


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bits", [None, 8])
def test_reduced_head_is_cut_from_the_target(tmp_path: Path, tied: bool, bits: int | None) -> None:
    target = toy_target(tied=tied)
    source = target.embed_tokens if tied else target.lm_head
    if bits:
        source = source.to_quantized(32, bits)
        target = ToyTarget(source if tied else target.embed_tokens, None if tied else source)
    rows = source.weight
    if bits:
        rows = mx.dequantize(rows, source.scales, source.biases, group_size=32, bits=bits)
    folder = reduced_folder(tmp_path / "d", drop=("lm_head.weight",))
    explicit = reduced_folder(tmp_path / "e", replace={"lm_head.weight": rows[mx.array(IDS)]})
    tensors = mx.load(str(folder / "model.safetensors"))
    tensors.pop("lm_head.weight")
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    assert same_draft(load_drafter(folder, target), load_drafter(explicit, target), 1e-5)


@pytest.mark.parametrize(
    ("replace", "said"),
    [
        ({"d2t": mx.zeros((19,), dtype=mx.int64)}, r"d2t has shape \(19,\), expected \(20,\)"),
        ({"d2t": mx.full((20,), 90)}, "d2t does not map to 20 different ids"),
        ({"d2t": -mx.arange(20)}, "d2t does not map to 20 different ids"),
        ({"t2d": mx.ones((96,), dtype=mx.bool_)}, "d2t and t2d disagree"),
    ],
)
def test_bad_vocabulary_tables_are_refused(tmp_path: Path, replace: dict, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        load_drafter(reduced_folder(tmp_path / "d", replace=replace))


def test_reduced_vocabulary_without_its_table_is_refused(tmp_path: Path) -> None:
    folder = reduced_folder(tmp_path / "d")
    tensors = mx.load(str(folder / "model.safetensors"))
    del tensors["d2t"]
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    with pytest.raises(ModelError, match="no d2t tensor"):
        load_drafter(folder)


# -- types and quantisation ------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_keeps_confidence_in_float32(name: str, dtype: mx.Dtype) -> None:
    drafter = load_drafter(DRAFTERS / name, dtype=dtype)
    assert drafter.dtype == dtype
    out = draft(drafter)
    assert out.hidden.dtype == dtype
    assert out.confidence_logits.dtype == mx.float32
    assert drafter.confidence_head.proj.weight.dtype == mx.float32
    assert overlap(load_drafter(DRAFTERS / name), drafter) > 0.98


@pytest.mark.parametrize("name", NAMES)
def test_eight_bit_backbone_drafts_as_float_does(name: str) -> None:
    plain, quantised = load_drafter(DRAFTERS / name), load_drafter(DRAFTERS / name, quantize_bits=8)
    kinds = {path: type(m) for path, m in quantised.named_modules()}
    assert kinds["fc"] is kinds["lm_head"] is nn.QuantizedLinear
    assert kinds["layers.0.self_attn.q_proj"] is nn.QuantizedLinear
    assert kinds["confidence_head.proj"] is nn.Linear
    if plain.markov_head is not None:
        assert kinds["markov_head.markov_w2"] is nn.Linear
    # Acceptance may change by 2 %: that is how far an 8-bit draft may differ from a float one.
    assert overlap(plain, quantised) > 0.98


def test_target_head_is_never_quantised_with_the_drafter(tmp_path: Path) -> None:
    target = toy_target()
    bare = edited_copy(NAME, tmp_path / "d", drop=("embed_tokens.weight", "lm_head.weight"))
    load_drafter(bare, target, quantize_bits=8)
    assert type(target.lm_head) is nn.Linear


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_drafter_survives_saving(tmp_path: Path, bits: int) -> None:
    drafter = load_drafter(DRAFTERS / NAME, quantize_bits=bits)
    save_drafter(drafter, tmp_path / "q")
    again = load_drafter(tmp_path / "q")
    assert again.config == drafter.config
    assert same_draft(again, drafter, 1e-9)
    with pytest.raises(UsageError, match="quantised already"):
        quantize_drafter(again, 8)


@pytest.mark.parametrize("bits", [0, 3, 16])
def test_other_widths_are_refused(bits: int) -> None:
    with pytest.raises(UsageError, match=f"4 or 8 bits, not {bits}"):
        load_drafter(DRAFTERS / NAME, quantize_bits=bits)


def test_widths_that_do_not_quantise_are_refused() -> None:
    with pytest.raises(ModelError, match="cannot quantise"):
        quantize_drafter(toy_drafter(intermediate_size=40), 8)


# -- saving ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_saved_checkpoint_loads_to_equal_weights(tmp_path: Path, name: str) -> None:
    drafter = load_drafter(DRAFTERS / name)
    save_drafter(drafter, tmp_path / "s")
    assert sorted(p.name for p in (tmp_path / "s").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    saved = mx.load(str(tmp_path / "s" / "model.safetensors"))
    theirs = tensors_of(name)
    assert saved.keys() == theirs.keys()
    assert all(mx.array_equal(saved[k], theirs[k]) for k in theirs)
    assert same_draft(load_drafter(tmp_path / "s"), drafter, 1e-9)


@pytest.mark.parametrize("bits", [None, 8])
def test_trained_drafter_is_saved_without_what_it_borrows(tmp_path: Path, bits: int | None) -> None:
    target = toy_target(tied=True)
    if bits:
        target.embed_tokens = target.embed_tokens.to_quantized(32, bits)
    drafter = toy_drafter(draft_vocab_size=len(IDS), num_target_layers=6)
    drafter.set_draft_vocabulary(mx.array(IDS))
    attach_target(drafter, target)
    trained = {name for name, _ in tree_flatten(drafter.trainable_parameters())}
    assert "fc.weight" in trained and not any(n.startswith(("embed", "lm_head")) for n in trained)
    save_drafter(drafter, tmp_path / "s")
    saved = mx.load(str(tmp_path / "s" / "model.safetensors"))
    assert not any(name.startswith(("embed_tokens", "lm_head")) for name in saved)
    assert (saved["d2t"] + mx.arange(len(IDS))).tolist() == IDS
    assert np.flatnonzero(np.array(saved["t2d"])).tolist() == IDS
    again = load_drafter(tmp_path / "s", target)
    assert same_draft(again, drafter, 1e-9)
    save_drafter(again, tmp_path / "whole", embeddings=True)
    assert same_draft(load_drafter(tmp_path / "whole"), drafter, 1e-5)


def test_failed_save_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch) -> None:
    drafter = load_drafter(DRAFTERS / NAME)
    save_drafter(drafter, tmp_path / "s")
    before = {p.name: p.read_bytes() for p in (tmp_path / "s").iterdir()}

    def disk_full(path: str, *_: Any, **__: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mx, "save_safetensors", disk_full)
    with pytest.raises(OSError, match="No space left"):
        save_drafter(toy_drafter(seed=9), tmp_path / "s")
    assert {p.name: p.read_bytes() for p in (tmp_path / "s").iterdir()} == before


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, value: float) -> None:
    folder = edited_copy(
        NAME, tmp_path, replace={"norm.weight": tensors_of()["norm.weight"] * value}
    )
    with pytest.raises(ModelError, match="weights that are no numbers"):
        load_drafter(folder, toy_target())


def test_whole_numbers_where_weights_belong_are_refused(tmp_path: Path) -> None:
    whole = tensors_of()["norm.weight"].astype(mx.int32)
    folder = edited_copy(NAME, tmp_path, replace={"norm.weight": whole})
    with pytest.raises(ModelError, match=r"norm\.weight holds"):
        load_drafter(folder, toy_target())


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": 5},
        {"rope_scaling": [1]},
        {"rope_scaling": "x"},
        {"architectures": 5},
        {"architectures": [{}]},
        {"rms_norm_eps": 10**400},
        {"num_attention_heads": 10**9},
        {"markov_rank": 10**12},
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}},
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3"}},
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": "x"}},
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_a_config_of_no_use_is_refused_in_one_line(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = edited_copy(NAME, tmp_path, config=changes)
    with pytest.raises(ModelError) as caught:
        load_drafter(folder, toy_target())
    assert "\n" not in str(caught.value)
