"""Converts a llama-type GGUF file to an MLX model folder that mlx-lm loads.

mlx reads the file; before it does, ``check`` proves that every part of it lies inside the file,
because the native reader maps the file and a truncated one would crash the process. The
quantisation is kept bit for bit: mlx reads Q4_0, Q4_1 and Q8_0 as its own affine triples (weight,
scales, biases) with groups of 32. Whether the model runs quantised is decided where it is loaded.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelError

# Counts up whenever the written folder changes, so that folders of older versions are made again.
CONVERTER_VERSION = 1

_AGAIN = "delete the file and fetch it again"
_MLX_FOLDER = "use the model's MLX folder instead"

# The bounds check

_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4  # of a tensor, from the format
_DEFAULT_ALIGNMENT = 32  # of the tensor data, from the format
# Tensor types whose values mlx keeps: name, values per block, bytes per block. mlx would turn any
# other type into float16.
_TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
}
# Bytes of a metadata value of each scalar type.
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _STRING, _ARRAY = 4, 8, 9


def check(path: Path) -> None:
    """Raise ModelError unless mlx can read the file without leaving it or losing precision."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"{path.name} is not a GGUF file", "check the path")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                whole = _Header(data, path.name).end() <= len(data)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}", "check the path") from None
    except (struct.error, OverflowError):  # a step over the end of the file
        whole = False
    if not whole:
        raise ModelError(f"{path.name} is cut short", _AGAIN)


class _Header:
    """Walks over the header of a mapped file. A step over the end raises struct.error."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data, self.name, self.at = data, name, 4

    def end(self) -> int:
        """Where the last tensor ends, in bytes. Raises ModelError for what mlx cannot read."""
        if (version := self.number("I")) not in _VERSIONS:
            raise ModelError(f"{self.name} has GGUF version {version}", "versions 2 and 3 are read")
        n_tensors, n_values, alignment = self.number("Q"), self.number("Q"), _DEFAULT_ALIGNMENT
        for _ in range(n_values):
            key, kind, start = self.text(), self.number("I"), self.at
            self.skip_value(kind)
            if key == b"general.alignment" and kind == _UINT32:
                (alignment,) = struct.unpack_from("<I", self.data, start)
        ends = [self.tensor_end() for _ in range(n_tensors)]
        if alignment == 0:
            raise self.damaged("its alignment is 0")
        return math.ceil(self.at / alignment) * alignment + max(ends, default=0)

    def number(self, code: str) -> int:
        value: int = struct.unpack_from(f"<{code}", self.data, self.at)[0]
        self.at += struct.calcsize(code)
        return value

    def text(self) -> bytes:
        size = self.number("Q")
        self.at += size
        return self.data[self.at - size : self.at]

    def skip_value(self, kind: int) -> None:
        count = 1
        if kind == _ARRAY:
            kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            for _ in range(count):
                self.text()
        elif kind in _SCALAR_BYTES:
            self.at += _SCALAR_BYTES[kind] * count
        else:
            raise self.damaged(f"unknown value type {kind}")

    def tensor_end(self) -> int:
        """Where the data of the table's next tensor ends, from the start of all data."""
        name, dimensions = self.text().decode(errors="replace"), self.number("I")
        if dimensions > _MAX_DIMENSIONS:
            raise self.damaged(f"tensor {name} has {dimensions} dimensions")
        values = math.prod(self.number("Q") for _ in range(dimensions))
        kind, offset = self.number("I"), self.number("Q")
        if kind not in _TENSOR_TYPES:
            raise ModelError(
                f"{self.name}: tensor {name} has the quantisation type {kind}, "
                "which mlx cannot keep",
                f"use a file with {', '.join(known for known, _, _ in _TENSOR_TYPES.values())}",
            )
        _, block_values, block_bytes = _TENSOR_TYPES[kind]
        return offset + math.ceil(values / block_values) * block_bytes

    def damaged(self, why: str) -> ModelError:
        return ModelError(f"{self.name} is damaged: {why}", _AGAIN)


# The model

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_DERIVED = {"rope_freqs"}  # tables that follow from the metadata; mlx computes its own
_GROUP_SIZE = 32  # values that share a scale in Q4_0, Q4_1 and Q8_0


@dataclass(frozen=True, slots=True)
class GGUF:
    """A checked file as mlx reads it: ``metadata`` in plain Python values, ``arrays`` by name."""

    path: Path
    metadata: dict[str, Any]
    arrays: dict[str, Any]

    def need(self, key: str) -> Any:
        """The metadata value, or a ModelError that names the missing key."""
        if key not in self.metadata:
            raise ModelError(f"{self.path.name} has no {key}", "use another GGUF file of the model")
        return self.metadata[key]

    def count(self, key: str, default: int | None = None) -> int:
        """The metadata value as one positive whole number; a list of one a layer is refused."""
        value = self.need(key) if default is None else self.metadata.get(key, default)
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{self.path.name}: {key} is not one positive number", _MLX_FOLDER)
        return value


def read(path: Path) -> GGUF:
    """Check ``path`` and read it with mlx. Raises ModelError for anything unusable."""
    check(path)
    import mlx.core as mx

    try:
        loaded: Any = mx.load(str(path), format="gguf", return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"mlx cannot read {path.name}: {error}") from None
    arrays, metadata = loaded
    plain = {k: v.tolist() if isinstance(v, mx.array) else v for k, v in metadata.items()}
    return GGUF(path, plain, arrays)


def convert(path: Path, folder: Path) -> None:
    """Write ``path`` as an MLX model into the existing, empty ``folder``.

    Raises ModelError for a file that is damaged or of a kind that is not supported.
    """
    gguf = read(path)
    config = model_config(gguf)
    _write_weights(gguf, config, folder / "model.safetensors")
    write_tokenizer(gguf, folder)
    generation = {
        key: config[key]
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        if key in config
    }
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(value, indent=2), encoding="utf-8")


def mlx_module(gguf_name: str) -> str | None:
    """The module of mlx-lm's llama that holds the tensors of ``gguf_name``; None if none does.

    >>> mlx_module("blk.3.attn_q")
    'model.layers.3.self_attn.q_proj'
    """
    if gguf_name in _DERIVED:
        return None
    if gguf_name in _TOP:
        return _TOP[gguf_name]
    block, _, rest = gguf_name.removeprefix("blk.").partition(".")
    if block.isdigit() and rest in _IN_BLOCK:
        return f"model.layers.{block}.{_IN_BLOCK[rest]}"
    raise ModelError(f"the GGUF tensor {gguf_name} has no place in a llama-type model")


def model_config(gguf: GGUF) -> dict[str, Any]:
    """mlx-lm's ``config.json`` for the file, with the quantisation of each module."""
    arch = gguf.need("general.architecture")
    if arch != "llama":
        raise ModelError(
            f"{gguf.path.name} holds a model of type {arch}",
            f"only llama-type GGUF files can be converted; {_MLX_FOLDER}",
        )
    heads = gguf.count("llama.attention.head_count")
    hidden = gguf.count("llama.embedding_length")
    head_dim = gguf.count("llama.attention.key_length", hidden // heads)
    unsupported = [
        key
        for key in (
            "llama.rope.scaling.type",
            "llama.expert_count",
            "llama.attention.sliding_window",
        )
        if gguf.metadata.get(key) not in (None, 0, "none")
    ]
    if gguf.metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
        unsupported.append("llama.rope.dimension_count")
    if unsupported:
        raise ModelError(
            f"{gguf.path.name} uses {', '.join(unsupported)}, which cannot be converted",
            _MLX_FOLDER,
        )
    if "token_embd.weight" not in gguf.arrays:
        raise ModelError(f"{gguf.path.name} has no token_embd.weight")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": gguf.count("llama.block_count"),
        "intermediate_size": gguf.count("llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.count("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": round(gguf.need("llama.attention.layer_norm_rms_epsilon"), 12),
        "rope_theta": gguf.metadata.get("llama.rope.freq_base", 10000.0),
        "max_position_embeddings": gguf.count("llama.context_length"),
        "vocab_size": gguf.arrays["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in gguf.arrays,
        "attention_bias": "blk.0.attn_q.bias" in gguf.arrays,
        "torch_dtype": "float16",
    }
    for role in ("bos", "eos", "padding"):
        if (index := gguf.metadata.get(f"tokenizer.ggml.{role}_token_id")) is not None:
            config[f"{role.replace('padding', 'pad')}_token_id"] = index
    if quantisation := _quantisation(gguf):
        config["quantization"] = quantisation
    return config


def _quantisation(gguf: GGUF) -> dict[str, Any]:
    """The most common width as the default, every other module by name (False: not quantised)."""
    bits: dict[str, int] = {}
    for name, array in gguf.arrays.items():
        base, _, leaf = name.rpartition(".")
        module = mlx_module(base)
        if module is not None and leaf == "weight" and array.ndim == 2:
            # A group of 32 weights with b bits each is packed in b words of 32 bits.
            scales = gguf.arrays.get(f"{base}.scales")
            bits[module] = array.shape[1] // scales.shape[1] if scales is not None else 0
    used = sorted(b for b in bits.values() if b)
    if not used:
        return {}
    common = max(used, key=used.count)
    settings: dict[str, Any] = {"group_size": _GROUP_SIZE, "bits": common, "mode": "affine"}
    for module, b in sorted(bits.items()):
        if b == 0:
            settings[module] = False
        elif b != common:
            settings[module] = {"group_size": _GROUP_SIZE, "bits": b, "mode": "affine"}
    return settings


def _write_weights(gguf: GGUF, config: Mapping[str, Any], path: Path) -> None:
    import mlx.core as mx

    rotated = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    weights = {}
    for name, tensor in gguf.arrays.items():
        base, _, leaf = name.rpartition(".")
        module = mlx_module(base)
        if module is None:
            continue
        if heads := rotated.get(base.rpartition(".")[2]):
            tensor = unpermute(tensor, config[heads])
        if tensor.dtype == mx.float32:
            # Norms: in the type of the quantisation scales, or they would widen every activation.
            tensor = tensor.astype(mx.float16)
        weights[f"{module}.{leaf}"] = tensor
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})


def unpermute(tensor: Any, heads: int) -> Any:
    """Undo GGUF's row order of q and k: ``(heads * d, ...)`` in, the same shape out.

    GGUF interleaves the two halves of each head's rows because llama.cpp rotates
    neighbouring pairs; mlx rotates row i with row i + d/2. Rows move whole, so
    packed weights, scales and biases are treated alike.
    """
    rows, *rest = tensor.shape
    return tensor.reshape(heads, rows // heads // 2, 2, *rest).swapaxes(1, 2).reshape(rows, *rest)


# The tokenizer: byte-level BPE only, for the pre-tokenizers whose splitting rule is known here

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF's table that must never be split or merged
# Pre-tokenizers, and whether each digit stands alone before the byte-level split.
_SINGLE_DIGITS = {"smollm": True, "gpt-2": False, "default": False}


def write_tokenizer(gguf: GGUF, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``."""
    kind = gguf.need("tokenizer.ggml.model")
    pre = gguf.metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in _SINGLE_DIGITS:
        raise ModelError(
            f"{gguf.path.name} has the tokenizer {kind}/{pre}, which cannot be converted",
            "use the model's MLX or Hugging Face folder instead",
        )
    _tokenizer(gguf, single_digits=_SINGLE_DIGITS[pre]).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.count(f"{gguf.need('general.architecture')}.context_length"),
        **special_tokens(gguf),
    }
    if template := gguf.metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, ensure_ascii=False, indent=2), encoding="utf-8"
    )


def special_tokens(gguf: GGUF) -> dict[str, str]:
    """The texts of the beginning, end, unknown and padding tokens that the file names."""
    tokens = gguf.need("tokenizer.ggml.tokens")
    found = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = gguf.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and 0 <= index < len(tokens):
            found[f"{role}_token"] = tokens[index]
    return found


def _tokenizer(gguf: GGUF, *, single_digits: bool) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    tokens: list[str] = gguf.need("tokenizer.ggml.tokens")
    types: list[int] = gguf.need("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in gguf.need("tokenizer.ggml.merges")]
    try:
        bpe = models.BPE(vocab={text: i for i, text in enumerate(tokens)}, merges=merges)
    except Exception as error:  # the library raises bare Exception for merges it cannot place
        raise ModelError(f"{gguf.path.name} has a damaged tokenizer: {error}") from None
    tokenizer = Tokenizer(bpe)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        if single_digits
        else byte_level
    )
    tokenizer.decoder = decoders.ByteLevel()
    for special, wanted in ((True, _CONTROL), (False, _USER_DEFINED)):
        added = [
            AddedToken(text, special=special, normalized=False)
            for text, type_ in zip(tokens, types, strict=True)
            if type_ == wanted
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    if gguf.metadata.get("tokenizer.ggml.add_bos_token"):
        index = gguf.need("tokenizer.ggml.bos_token_id")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[index]} $A",
            pair=f"{tokens[index]} $A {tokens[index]} $B",
            special_tokens=[(tokens[index], index)],
        )
    return tokenizer
