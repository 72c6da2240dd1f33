"""A GGUF file becomes the same model: weights, rotation, tokenizer; bad files are refused."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf_files
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from gguf_files import HEAD_DIM, HEADS, write_tiny_llama
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.utils import dequantize_model

from dspark_mlx.errors import ModelError
from dspark_mlx.sources import gguf
from dspark_mlx.sources.folder import missing
from dspark_mlx.sources.gguf import convert, unpermute

TOKENS = mx.array([[1, 40, 41, 42, 200, 17, 2, 3]])


def converted(path: Path, **options: Any) -> tuple[gguf_files.TinyLlama, Path]:
    tiny = write_tiny_llama(path / "tiny.gguf", **options)
    folder = path / "model"
    folder.mkdir()
    convert(tiny.path, folder)
    return tiny, folder


def direct_logits(tiny: gguf_files.TinyLlama, config: dict[str, Any]) -> np.ndarray:
    """Logits of mlx-lm's llama on the float weights, never having seen a GGUF file."""
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.load_weights([(name, mx.array(value)) for name, value in tiny.weights.items()])
    return np.array(model(TOKENS))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("quantization", "tolerance"), [("F32", 2e-2), ("F16", 2e-2), ("Q8_0", 0.2), ("Q4_1", 3.0)]
)
def test_converted_model_computes_what_the_float_model_does(
    tmp_path: Path, quantization: str, tolerance: float, tied: bool
) -> None:
    tiny, folder = converted(tmp_path, quantization=quantization, embedding="F16", tied=tied)
    model, _ = mlx_lm.load(str(folder))
    model.set_dtype(mx.float32)
    logits = np.array(dequantize_model(model)(TOKENS))
    expected = direct_logits(tiny, json.loads((folder / "config.json").read_text()))
    assert logits.shape == expected.shape
    assert np.abs(logits - expected).max() < tolerance
    # The wrong row order of q and k is further off than any quantisation here.
    wrong = dict(tiny.weights)
    for name in wrong:
        if "q_proj" in name or "k_proj" in name:
            wrong[name] = gguf_files.permute(wrong[name], wrong[name].shape[0] // HEAD_DIM)
    mistaken = direct_logits(
        gguf_files.TinyLlama(tiny.path, wrong), json.loads((folder / "config.json").read_text())
    )
    assert np.abs(logits - expected).mean() < 0.5 * np.abs(mistaken - expected).mean()


def test_quantised_weights_are_kept_bit_for_bit(tmp_path: Path) -> None:
    tiny, folder = converted(tmp_path, quantization="Q4_1", embedding="Q8_0")
    stored = mx.load(str(folder / "model.safetensors"))
    original = mx.load(str(tiny.path))
    down = "model.layers.0.mlp.down_proj"
    for leaf in ("weight", "scales", "biases"):
        assert mx.array_equal(stored[f"{down}.{leaf}"], original[f"blk.0.ffn_down.{leaf}"])
        q = stored[f"model.layers.0.self_attn.q_proj.{leaf}"]
        assert mx.array_equal(q, unpermute(original[f"blk.0.attn_q.{leaf}"], HEADS))
    settings = json.loads((folder / "config.json").read_text())["quantization"]
    assert (settings["bits"], settings["group_size"]) == (4, 32)
    assert settings["model.embed_tokens"]["bits"] == 8


def test_activations_keep_the_type_of_the_scales(tmp_path: Path) -> None:
    _, folder = converted(tmp_path, quantization="Q8_0", embedding="Q8_0")
    model, _ = mlx_lm.load(str(folder))
    types = {value.dtype for _, value in tree_flatten(model.parameters())}
    assert types == {mx.uint32, mx.float16}
    assert model(TOKENS).dtype == mx.float16


def test_unpermute_undoes_permute() -> None:
    weight = np.arange(HEADS * HEAD_DIM * 3, dtype=np.float32).reshape(-1, 3)
    assert np.array_equal(unpermute(gguf_files.permute(weight, HEADS), HEADS), weight)


def test_tokenizer_has_single_digits_merges_and_special_tokens(tmp_path: Path) -> None:
    _, folder = converted(tmp_path)
    _, tokenizer = mlx_lm.load(str(folder))
    vocabulary = gguf_files.vocabulary()
    text = "hello w12 é😀\n"
    ids = tokenizer.encode(text)
    pieces = [vocabulary[i] for i in ids]
    assert pieces[:4] == ["hello", "Ġw", "1", "2"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.eos_token_ids == {2}
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True
    )
    assert tokenizer.decode(prompt) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_metadata_comes_in_plain_values(tmp_path: Path) -> None:
    tiny = write_tiny_llama(tmp_path / "tiny.gguf", quantization="Q4_1")
    read = gguf.read(tiny.path)
    assert read.count("llama.attention.head_count") == HEADS
    assert read.metadata["llama.rope.freq_base"] == 10000.0
    assert read.metadata["tokenizer.ggml.tokens"] == gguf_files.vocabulary()
    assert set(read.metadata["tokenizer.ggml.token_type"]) == {1, 3}
    with pytest.raises(ModelError, match=r"has no llama\.absent"):
        read.need("llama.absent")


def test_the_check_needs_no_mlx(tmp_path: Path) -> None:
    tiny = write_tiny_llama(tmp_path / "tiny.gguf")
    code = (
        "import sys; from pathlib import Path; from dspark_mlx.sources import gguf\n"
        f"gguf.check(Path({str(tiny.path)!r})); assert 'mlx.core' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)


@pytest.mark.parametrize("keep", [0.05, 0.3, 0.6, 0.99])
def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path, keep: float) -> None:
    tiny = write_tiny_llama(tmp_path / "tiny.gguf")
    data = tiny.path.read_bytes()
    tiny.path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ModelError, match="cut short"):
        convert(tiny.path, tmp_path)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_damaged_header_is_refused_or_harmless(data: st.DataObject) -> None:
    """Wrong counts, sizes and types in the header never lead out of the file."""
    original = _tiny_bytes()
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(4, HEADER_BYTES))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged.gguf"
        path.write_bytes(damaged)
        with contextlib.suppress(ModelError):
            gguf.check(path)


HEADER_BYTES = 4000


@functools.cache
def _tiny_bytes() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return write_tiny_llama(Path(folder) / "tiny.gguf").path.read_bytes()


def test_foreign_files_are_refused_by_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="not a GGUF file"):
        convert(path, tmp_path)
    path.write_bytes(b"GGUF" + (99).to_bytes(4, "little") + bytes(100))
    with pytest.raises(ModelError, match="version 99"):
        convert(path, tmp_path)
    with pytest.raises(ModelError, match="cannot read"):
        convert(tmp_path / "absent.gguf", tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"arch": "mamba"}, "type mamba"),
        ({"quantization": "Q5_1"}, "quantisation type 7"),
        ({"metadata": {"tokenizer.ggml.pre": "qwen2"}}, "tokenizer gpt2/qwen2"),
        ({"metadata": {"tokenizer.ggml.model": "llama"}}, "tokenizer llama/smollm"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type"),
        ({"quantization": "BF16"}, "quantisation type 30"),
        ({"metadata": {"llama.expert_count": 8}}, "llama.expert_count"),
        ({"metadata": {"llama.attention.head_count": 0}}, "not one positive number"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "llama.rope.dimension_count"),
    ],
)
def test_what_cannot_be_converted_exactly_is_refused(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    tiny = write_tiny_llama(tmp_path / "tiny.gguf", **options)
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ModelError, match=words):
        convert(tiny.path, folder)
    assert missing(folder) is not None
