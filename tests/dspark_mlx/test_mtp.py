"""MTP: reference numbers of three families, the same text as without it, refused folders."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import laws
import mlx.core as mx
import mlx.nn as nn
import pytest
from decoding import make_engine, request, run_one
from drafter_toys import DRAFTERS
from mlx.utils import tree_flatten
from mlx_lm.models import mimo
from mlx_lm.utils import load_model

from dspark_mlx.draft import DraftRow
from dspark_mlx.draft.chain import ChainProposer
from dspark_mlx.draft.mtp import MTP, describe, load_mtp, mtp_proposer
from dspark_mlx.draft.strategies import kind_of
from dspark_mlx.errors import ModelError
from dspark_mlx.model.target import Target
from dspark_mlx.request import SamplingParams

TOLERANCE = 1e-4
FAMILIES = ("qwen3_5", "glm4_moe", "deepseek_v3")


def folder_of(family: str) -> Path:
    return DRAFTERS / f"mtp_{family}"


@functools.cache
def target_of(family: str) -> Target:
    # mlx-lm drops DeepSeek's MTP layer only where it is number 61.
    model, config = load_model(folder_of(family), strict=family != "deepseek_v3")
    return Target(model, config)


@functools.cache
def network_of(family: str) -> MTP:
    return load_mtp(folder_of(family), target_of(family))


def rounds(family: str) -> list[dict[str, Any]]:
    reference = laws.tensors(folder_of(family) / "reference.safetensors")
    found: list[dict[str, Any]] = [{}, {}, {}]
    for key, value in reference.items():
        number, part = key.removeprefix("round").split(".")
        found[int(number)][part] = value
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tap_behind_the_last_layer_is_the_final_norm(family: str) -> None:
    target = target_of(family)
    for expected in rounds(family):
        ids = expected["ids"][None, :-1]
        rows = target.make_rows()
        logits, hidden = target.forward(ids, rows, (target.num_layers,))
        assert hidden is not None
        assert mx.abs(hidden[0] - expected["target_hidden"]).max() < TOLERANCE
        assert mx.abs(logits[0] - expected["target_logits"]).max() < TOLERANCE


def walk(network: MTP, expected: list[dict[str, Any]], raw: bool) -> None:
    """Every round of a reference, in a row of its own and in a pair with the next round."""
    kind = "raw_" if raw else ""
    logits: list[mx.array] = []

    class Watching:
        def __getattr__(self, key: str) -> Any:
            return getattr(network, key)

        def logits(self, out: mx.array) -> mx.array:
            logits.append(network.logits(out))
            return logits[-1]

    proposer = mtp_proposer(network, 96)
    proposer.network = Watching()
    row = proposer.new_row()
    ids = expected[0]["ids"].tolist()
    proposer.prefill(row, ids[:-1], expected[0]["target_hidden"][None])
    proposer.extend(row)
    done = len(ids) - 1
    for number, part in enumerate(expected):
        ids, hidden = part["ids"].tolist(), part["target_hidden"][None]
        if number:
            proposer.append_features(hidden[:, done:])
            new = ids[done:-1]
            proposer.commit([new], [3], [len(new) - 1])
            done = len(ids) - 1
        logits.clear()
        draft = proposer.propose([DraftRow(ids[-1], len(ids), SamplingParams(), 3)])
        assert draft.token_rows() == [part[f"{kind}tokens"].tolist()]
        assert mx.abs(mx.concatenate(logits) - part[f"{kind}logits"]).max() < TOLERANCE
    pair = mtp_proposer(network, 96)
    rows = []
    for part in expected[1:]:
        ids = part["ids"].tolist()
        row = pair.new_row()
        pair.prefill(row, ids[:-1], part["target_hidden"][None])
        pair.extend(row)
        rows.append(DraftRow(ids[-1], len(ids), SamplingParams(), 3))
    assert pair.propose(rows).token_rows() == [
        part[f"{kind}tokens"].tolist() for part in expected[1:]
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_three_rounds_reproduce_the_reference(family: str) -> None:
    walk(network_of(family), rounds(family), raw=False)


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_the_same_with_what_comes_before_the_norm_fed_back(family: str) -> None:
    network = load_mtp(folder_of(family), target_of(family))
    network.config = replace(network.config, feeds_normed=False)
    walk(network, rounds(family), raw=True)


# -- whole replies ----------------------------------------------------------------------------


def make(family: str) -> Callable[[], ChainProposer]:
    network = network_of(family)
    return lambda: mtp_proposer(network, 96)


@pytest.fixture
def as_toy(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Target]:
    """Lets the laws run on a reference target in place of a toy."""

    def use(family: str) -> Target:
        target = target_of(family)
        target.check((target.num_layers,))
        monkeypatch.setattr(laws, "toy_target", lambda kind: target)

        def plain(kind: str, tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
            ask = request(tokens=tokens, max_tokens=count, ignore_eos=True, method="none")
            return tuple(run_one(make_engine(target), ask).tokens)

        monkeypatch.setattr(laws, "plain_text", plain)
        return target

    return use


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_lossless_greedy(family: str, as_toy: Callable[[str], Target]) -> None:
    as_toy(family)
    laws.lossless_greedy(family, make(family))
    laws.ragged_rows_equal_each_alone(family, make(family))
    laws.ragged_rows_equal_each_alone(family, make(family), "auto")


def test_ends(as_toy: Callable[[str], Target]) -> None:
    as_toy("glm4_moe")
    laws.ends("glm4_moe", make("glm4_moe"))


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_a_fresh_row_drafts_the_same(family: str, as_toy: Callable[[str], Target]) -> None:
    as_toy(family)
    for width, accepted in ((1, 1), (3, 0), (3, 2)):
        laws.fresh_row(family, make(family), width, accepted)


@pytest.mark.parametrize("draft_sampling", ["coupled", "probabilistic"])
def test_lossless_sampling(draft_sampling: str, as_toy: Callable[[str], Target]) -> None:
    as_toy("glm4_moe")
    laws.lossless_sampling("glm4_moe", make("glm4_moe"), draft_sampling)


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_non_anticipating(family: str, as_toy: Callable[[str], Target]) -> None:
    as_toy(family)
    laws.non_anticipating(family, make(family))


# -- where the tensors are --------------------------------------------------------------------


def parts_of(family: str) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """A reference folder's tensors: of the MTP layer, and all others."""
    tensors = laws.tensors(folder_of(family) / "model.safetensors")
    mine = {k: v for k, v in tensors.items() if k.startswith("mtp.")}
    return mine, {k: v for k, v in tensors.items() if k not in mine}


def write(folder: Path, files: dict[str, tuple[dict[str, mx.array], str]], **config: Any) -> Path:
    folder.mkdir()
    data = json.loads((folder_of("qwen3_5") / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(data))
    for name, (tensors, layout) in files.items():
        mx.save_safetensors(str(folder / name), tensors, metadata={"format": layout})
    return folder


def with_one_added(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    return {k: v + 1 if v.ndim == 1 and "norm" in k else v for k, v in tensors.items()}


def sanitised(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    return {k: v.moveaxis(2, 1) if "conv1d" in k else v for k, v in tensors.items()}


def test_one_is_added_to_the_norms_exactly_once_wherever_they_are(tmp_path: Path) -> None:
    mine, others = parts_of("qwen3_5")
    bare = {k.removeprefix("mtp."): v for k, v in mine.items()}
    added, plain = with_one_added(mine), sanitised(others)
    folders = {
        "original": write(tmp_path / "a", {"model.safetensors": (mine | others, "pt")}),
        "its shard alone": write(tmp_path / "b", {"model-2.safetensors": (mine, "pt")}),
        "a folder of its own": write(
            tmp_path / "c",
            {"model.safetensors": (with_one_added(bare), "mlx")},
            model_type="qwen3_5_mtp",
        ),
        "a file beside": write(
            tmp_path / "d",
            {"model.safetensors": (plain, "mlx"), "mtp.safetensors": (added, "mlx")},
        ),
        "inside": write(
            tmp_path / "e",
            {
                "model.safetensors": (
                    {f"language_model.{k}": v for k, v in added.items()} | plain,
                    "mlx",
                )
            },
        ),
    }
    for name, folder in folders.items():
        assert kind_of(folder) == "mtp", name
        network = load_mtp(folder, target_of("qwen3_5"))
        walk(network, rounds("qwen3_5"), raw=False)


def test_what_is_no_mtp_layer_for_this_target_is_refused(tmp_path: Path) -> None:
    mine, others = parts_of("qwen3_5")
    target = target_of("qwen3_5")

    def refused(message: str, folder: Path, other: Target = target) -> None:
        with pytest.raises(ModelError, match=message) as caught:
            load_mtp(folder, other)
        assert "\n" not in str(caught.value)

    refused("no tensors named mtp", write(tmp_path / "a", {"model.safetensors": (others, "pt")}))
    extra = {"mtp.router.weight": mx.zeros((2, 2))}
    folder = write(tmp_path / "b", {"model.safetensors": (mine | extra, "pt")})
    refused(r"layer\.router\.weight not known", folder)
    second = {k.replace("layers.0", "layers.1"): v for k, v in mine.items()}
    folder = write(tmp_path / "c", {"model.safetensors": (mine | second, "pt")})
    refused("more than one MTP layer", folder)
    less = {k: v for k, v in mine.items() if "o_proj" not in k}
    folder = write(tmp_path / "d", {"model.safetensors": (less, "pt")})
    refused(r"o_proj\.weight missing", folder)
    folder = write(tmp_path / "e", {"model.safetensors": (mine, "pt")})
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:3000])
    refused("damaged or cut short", folder)
    refused("a target of 2 layers", folder_of("qwen3_5"), target_of("glm4_moe"))
    shutil.copytree(folder_of("glm4_moe"), tmp_path / "f")
    llama = Target(target_of("glm4_moe").model, {"model_type": "llama"})
    refused("MTP layers of 'llama' targets", tmp_path / "f", llama)


def test_what_was_read_is_told() -> None:
    assert describe(network_of("qwen3_5")) == (
        "tap 2 (after the final norm); block 3; norms zero-centred, 1 added; "
        "fed back after the norm"
    )
    small = load_mtp(folder_of("qwen3_5"), target_of("qwen3_5"), quantize_bits=8)
    assert isinstance(small.eh_proj, nn.QuantizedLinear)
    assert small.kv_bytes_per_token == network_of("qwen3_5").kv_bytes_per_token > 0


def test_mimo_puts_the_feature_first_and_reads_no_first_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = mimo.ModelArgs(
        model_type="mimo",
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        vocab_size=96,
        max_position_embeddings=512,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        num_nextn_predict_layers=1,
    )
    mx.random.seed(2)
    config = {"model_type": "mimo", "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 96}
    target = Target(mimo.Model(args), config)
    target.check((2,))
    layer = dict(tree_flatten(mimo.TransformerBlock(args).parameters()))
    layer |= {
        "token_layernorm.weight": mx.random.uniform(shape=(32,)),
        "hidden_layernorm.weight": mx.random.uniform(shape=(32,)),
        "final_layernorm.weight": mx.random.uniform(shape=(32,)),
        "input_proj.weight": mx.random.normal((32, 64)),
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {f"model.mtp_layers.0.{k}": v for k, v in layer.items()}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors, metadata={"format": "pt"})
    assert kind_of(tmp_path) == "mtp"
    network = load_mtp(tmp_path, target)
    hidden = mx.random.normal((1, 2, 32))
    rows = network.make_rows()
    mx.eval(network.run(mx.array([[5, 6]]), hidden, rows))

    def normed(x: mx.array, name: str) -> mx.array:
        return mx.fast.rms_norm(x, layer[f"{name}.weight"], 1e-6)

    e = target.embed_tokens(mx.array([[5, 6]])) * mx.array([0.0, 1.0])[:, None]
    x = mx.concatenate([normed(hidden, "hidden_layernorm"), normed(e, "token_layernorm")], axis=-1)
    want = network.layer(x @ layer["input_proj.weight"].T, "causal", None)
    got = network.run(mx.array([[5, 6]]), hidden, network.make_rows())
    assert mx.abs(got - want).max() < TOLERANCE
    monkeypatch.setattr(laws, "toy_target", lambda kind: target)
    laws.fresh_row("mimo", lambda: mtp_proposer(network, 96), 3, 2)
