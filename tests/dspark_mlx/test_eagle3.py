"""EAGLE-3: reference numbers of four layouts, the same text as without it, refused folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import laws
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from decoding import make_engine, plain_text, request, run_one, toy_target
from drafter_toys import DRAFTERS, ToyTarget
from toys import prompt

from dspark_mlx.draft import DraftRow
from dspark_mlx.draft.chain import MOST_OWED, ChainProposer
from dspark_mlx.draft.dspark.config import DrafterConfig
from dspark_mlx.draft.eagle3 import (
    Eagle3,
    Eagle3Config,
    attach,
    describe,
    eagle3_proposer,
    eagle3_taps,
    load_eagle3,
)
from dspark_mlx.draft.strategies import kind_of
from dspark_mlx.errors import ModelError
from dspark_mlx.request import SamplingParams

TOLERANCE = 1e-4
NAMES = ("eagle3_official", "eagle3_speculators", "eagle3_v31", "eagle3_norm_before_fc")


def stand_in(name: str) -> ToyTarget:
    """A target with the embedding that the reference was computed with."""
    folder = DRAFTERS / name
    borrowed = folder / "target.safetensors"
    embed = nn.Embedding(96, 32)
    if borrowed.exists():
        embed.weight = laws.tensors(borrowed)["model.embed_tokens.weight"]
    else:
        embed.weight = laws.tensors(folder / "model.safetensors")["embed_tokens.weight"]
    return ToyTarget(embed, nn.Linear(32, 96, bias=False))


def rounds(name: str) -> list[dict[str, Any]]:
    reference = laws.tensors(DRAFTERS / name / "reference.safetensors")
    found: list[dict[str, Any]] = [{}, {}, {}]
    for key, value in reference.items():
        number, part = key.removeprefix("round").split(".")
        found[int(number)][part] = value
    return found


def watched(proposer: ChainProposer) -> tuple[list[mx.array], list[mx.array]]:
    """What the network's logits and fed-back inputs were, call by call."""
    logits: list[mx.array] = []
    fed: list[mx.array] = []
    network: Any = proposer.network
    head, back = network.logits, network.fed_back

    class Watching:
        def __getattr__(self, key: str) -> Any:
            return getattr(network, key)

        def logits(self, out: mx.array) -> mx.array:
            logits.append(head(out))
            fed.append(back(out))
            return logits[-1]

    proposer.network = Watching()
    return logits, fed


@pytest.mark.parametrize("name", NAMES)
def test_three_rounds_reproduce_the_reference(name: str) -> None:
    network = load_eagle3(DRAFTERS / name, stand_in(name))
    proposer = eagle3_proposer(network, 96)
    logits, fed = watched(proposer)
    row, done = proposer.new_row(), 0
    for number, expected in enumerate(rounds(name)):
        ids = expected["ids"].tolist()
        context, features = ids[:-1], expected["features"]
        if number == 0:
            proposer.prefill(row, context, features)
            proposer.extend(row)
        else:
            proposer.append_features(features[:, done:])
            proposer.commit([context[done:]], [4], [len(context) - done - 1])
        done = len(context)
        logits.clear()
        fed.clear()
        draft = proposer.propose([DraftRow(ids[-1], len(ids), SamplingParams(), 4)])
        assert draft.token_rows() == [expected["tokens"].tolist()]
        assert mx.abs(mx.concatenate(logits) - expected["logits"]).max() < TOLERANCE
        assert mx.abs(mx.concatenate(fed) - expected["hidden"]).max() < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_rows_at_different_rounds_draft_as_each_alone(name: str) -> None:
    """Two rows, one a round behind the other: 4 calls a round of 4 tokens, catch-up included."""
    proposer = eagle3_proposer(load_eagle3(DRAFTERS / name, stand_in(name)), 96)
    logits, _ = watched(proposer)
    expected = rounds(name)
    for number in (0, 1):
        row = proposer.new_row()
        proposer.prefill(row, expected[number]["ids"].tolist()[:-1], expected[number]["features"])
        proposer.extend(row)
    for step in (0, 1):
        pair = expected[step : step + 2]
        texts = [part["ids"].tolist() for part in pair]
        if step:
            done = [len(part["ids"]) - 1 for part in expected[:2]]
            given = [p["features"][:, n:] for p, n in zip(pair, done, strict=True)]
            wide = max(g.shape[1] for g in given)
            proposer.append_features(
                mx.concatenate([mx.pad(g, [(0, 0), (0, wide - g.shape[1]), (0, 0)]) for g in given])
            )
            context = [t[n:-1] for t, n in zip(texts, done, strict=True)]
            proposer.commit(context, [4, 4], [len(c) - 1 for c in context])
        logits.clear()
        draft = proposer.propose([DraftRow(t[-1], len(t), SamplingParams(), 4) for t in texts])
        assert draft.token_rows() == [part["tokens"].tolist() for part in pair]
        assert len(logits) == 4
        for r, part in enumerate(pair):
            ours = mx.stack([slot[r] for slot in logits])
            assert mx.abs(ours - part["logits"]).max() < TOLERANCE


# -- on toys ----------------------------------------------------------------------------------


def toy(
    reduced: bool = False, layers: int = 1, taps: tuple[int, ...] = (-1, 0, 1), **options: Any
) -> Callable[[], ChainProposer]:
    """Proposers of a random EAGLE-3 network for the llama toy."""
    target = toy_target("llama")
    ids = mx.array([i for i in range(96) if i % 10 != 9]) if reduced else None
    layer = DrafterConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=96,
        block_size=1,
        mask_token_id=0,
        target_layer_ids=(0,),
    )
    mx.random.seed(5)
    network = Eagle3(
        Eagle3Config(
            layer, taps, 32, block=4, draft_vocab_size=None if ids is None else ids.size, **options
        )
    )
    attach(network, target, frozenset(), ids)
    mx.eval(network.parameters())
    return lambda: eagle3_proposer(network, target.vocab_size)


KINDS: dict[str, dict[str, Any]] = {
    "paper": {},
    "reduced, two layers": {"reduced": True, "layers": 2, "norm_before_residual": True},
    "norms": {"fc_norm": True, "norm_output": True},
    "one feature": {"taps": (2,), "fc": False},
}


@pytest.mark.parametrize("kind", ["paper", "reduced, two layers"])
def test_lossless_greedy(kind: str) -> None:
    laws.lossless_greedy("llama", toy(**KINDS[kind]))
    laws.ragged_rows_equal_each_alone("llama", toy(**KINDS[kind]))


@pytest.mark.parametrize("policy", ["auto", "lagged", "early-stop"])
def test_lossless_greedy_in_a_batch(policy: str) -> None:
    laws.ragged_rows_equal_each_alone("llama", toy(reduced=True), policy)


def test_ends() -> None:
    laws.ends("llama", toy(reduced=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_row_drafts_the_same(kind: str) -> None:
    for width, accepted in ((1, 1), (4, 0), (4, 2), (4, 4)):
        laws.fresh_row("llama", toy(**KINDS[kind]), width, accepted)


@pytest.mark.parametrize("draft_sampling", ["greedy", "coupled", "probabilistic"])
def test_lossless_sampling(draft_sampling: str) -> None:
    laws.lossless_sampling("llama", toy(reduced=True), draft_sampling)


@pytest.mark.parametrize("kind", ["paper", "reduced, two layers"])
def test_non_anticipating(kind: str) -> None:
    laws.non_anticipating("llama", toy(**KINDS[kind]))


def test_plain_rounds_owe_no_more_than_a_bound() -> None:
    target, text = toy_target("llama"), prompt(2 * MOST_OWED + 20)
    make = toy()
    proposer = make()
    given = laws.features(target, text, proposer.spec.taps)
    row = proposer.new_row()
    proposer.prefill(row, text[:8], given[:, :8])
    proposer.extend(row)
    for n in range(8, len(text) - 1):
        mx.eval(proposer.append_features(given[:, n : n + 1]))
        proposer.commit([[text[n]]], [0], [0])
        assert len(proposer._owed[0]) <= MOST_OWED
    fresh = make()
    fresh.extend(laws.new_row(fresh, target, text[:-1]))
    ask = [DraftRow(text[-1], len(text), SamplingParams(), 4)]
    assert proposer.propose(ask).token_rows() == fresh.propose(ask).token_rows()


@pytest.mark.parametrize("length", [1, 9, 14, 19])
def test_a_kept_row_can_be_cut_anywhere(length: int) -> None:
    """Within what is owed exactly; further back one entry is made without its feature."""
    target, text = toy_target("llama"), prompt(20)
    make = toy()
    proposer = make()
    row = laws.new_row(proposer, target, text[:15])
    given = laws.features(target, text, proposer.spec.taps)
    proposer.extend(row)
    for n in range(15, 19):  # owed
        proposer.append_features(given[:, n : n + 1])
        proposer.commit([[text[n]]], [0], [0])
    row = proposer.extract(0)
    proposer.trim_row(row, length)
    assert proposer.row_length(row) == length
    mx.eval(proposer.prefill(row, text[length:], given[:, length:]))
    assert proposer.row_length(row) == 20
    proposer.filter([])
    proposer.extend(row)
    fresh = make()
    fresh.extend(laws.new_row(fresh, target, text))
    ask = [DraftRow(7, 21, SamplingParams(), 4)]
    ours, theirs = proposer.propose(ask), fresh.propose(ask)
    assert ours.peaks is not None and theirs.peaks is not None
    if length >= 15:
        assert mx.abs(ours.peaks - theirs.peaks).max() < 1e-4


def test_the_next_turn_prefills_what_is_new() -> None:
    engine = make_engine(toy_target("llama"), [toy()()], prefill_chunk=8)
    first = run_one(engine, request("a", 40, max_tokens=12, ignore_eos=True))
    turn = (*prompt(40), *first.tokens, *prompt(6, 3))
    ran = run_one(engine, request("b", tokens=turn, max_tokens=12, ignore_eos=True))
    assert ran.finished is not None and ran.finished.reused_tokens >= 51
    assert tuple(ran.tokens) == plain_text("llama", turn, 12)


# -- configs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "model_type", "taps"),
    [
        ({}, "llama", (1, 17, 32)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}, "llama", (1, 17, 32)),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [12, 24, 36]}},
            "gpt_oss",
            (11, 23, 35),
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}}, "llama", (1, 17, 32)),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 17, 32]}},
            "deepseek_v3",
            (1, 16, 31),
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}},
            "deepseek_v3",
            (1, 17, 32),
        ),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "llama", (36,)),
        ({"taps": [3, 4, 5], "eagle_aux_hidden_state_layer_ids": [2, 18, 33]}, "llama", (3, 4, 5)),
    ],
)
def test_which_layers_are_read(
    data: dict[str, Any], model_type: str, taps: tuple[int, ...]
) -> None:
    target: Any = ToyTarget(None, None, num_layers=36)
    target.config = {"model_type": model_type}
    assert eagle3_taps(data, target) == taps


def edited(folder: Path, name: str = "eagle3_speculators", **changes: Any) -> Path:
    """A copy of a reference folder whose config differs; None removes a key."""
    shutil.copytree(DRAFTERS / name, folder, ignore=shutil.ignore_patterns("[rt]*.safetensors"))
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"taps": [1, 2, 9]}, "taps layer 9, but the target has layers 0..5"),
        ({"target_hidden_size": 64}, "hidden states of width 64"),
        ({"norm_before_fc": True}, "input_norm.weight missing"),
        ({"fc_norm": True}, r"fc_norm\.0\.weight.* missing"),
        ({"draft_vocab_size": 60}, "d2t has shape"),
        ({"eagle_config": [1]}, "'eagle_config' must be an object"),
        ({"norm_output": "yes"}, "'norm_output' must be true or false"),
        ({"transformer_layer_config": {"model_type": "gemma4"}}, "'gemma4' is unknown"),
    ],
)
def test_other_folders_are_refused_by_what_is_unknown(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = edited(tmp_path / "drafter", **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load_eagle3(folder, stand_in("eagle3_speculators"))
    assert "\n" not in str(caught.value)


def test_damaged_and_foreign_tensors_are_refused(tmp_path: Path) -> None:
    folder = edited(tmp_path / "drafter")
    path = folder / "model.safetensors"
    target = stand_in("eagle3_speculators")
    tensors = laws.tensors(path)
    mx.save_safetensors(str(path), tensors | {"layers.0.router.weight": mx.zeros((2, 2))})
    with pytest.raises(ModelError, match=r"layers\.0\.router\.weight not known"):
        load_eagle3(folder, target)
    mx.save_safetensors(str(path), tensors | {"norm.weight": mx.full((32,), np.nan)})
    with pytest.raises(ModelError, match="no numbers"):
        load_eagle3(folder, target)
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ModelError, match="damaged or cut short"):
        load_eagle3(folder, target)
    other = ToyTarget(nn.Embedding(4000, 32), None, 4000)
    with pytest.raises(ModelError, match="another tokenizer"):
        load_eagle3(DRAFTERS / "eagle3_official", other)


def test_an_untrained_embedding_is_not_used(tmp_path: Path) -> None:
    target = stand_in("eagle3_speculators")
    assert load_eagle3(DRAFTERS / "eagle3_speculators", target).embed_tokens is target.embed_tokens
    folder = edited(tmp_path / "drafter", embed_requires_grad=True)
    assert load_eagle3(folder, target).embed_tokens is not target.embed_tokens


def test_what_a_folder_holds_and_what_is_told(tmp_path: Path) -> None:
    for name in NAMES:
        assert kind_of(DRAFTERS / name) == "eagle3"
    network = load_eagle3(DRAFTERS / "eagle3_v31", stand_in("eagle3_v31"))
    assert describe(network) == (
        "taps 1, 2, 4; block 4; norms fc_norm, norm_output; fed back after the norm"
    )
    small = load_eagle3(DRAFTERS / "eagle3_official", stand_in("eagle3_official"), quantize_bits=8)
    assert isinstance(small.fc, nn.QuantizedLinear)
