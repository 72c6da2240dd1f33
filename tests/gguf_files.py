"""Small GGUF files for tests: a llama of two layers with a byte-level tokenizer.

Written by the reference writer (the ``gguf`` package), with q and k permuted the
way llama.cpp's converter does it, so the reader is tested against others' bytes.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FF, LAYERS = 64, 4, 2, 16, 96, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TinyLlama:
    """A file and the float weights it was made from, under mlx-lm's names."""

    path: Path
    weights: dict[str, np.ndarray]


def vocabulary() -> list[str]:
    merged = [merge.replace(" ", "") for merge in MERGES]
    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *merged]


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order for interleaved rotation."""
    rows, columns = weight.shape
    return (
        weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def write_tiny_llama(
    path: Path,
    *,
    quantization: str = "Q8_0",
    embedding: str = "F16",
    tied: bool = True,
    seed: int = 0,
    metadata: dict[str, Any] | None = None,
    arch: str = "llama",
) -> TinyLlama:
    """Write ``path``; ``metadata`` adds or replaces string and integer values."""
    rng = np.random.default_rng(seed)
    tokens = vocabulary()

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0, 0.15, (rows, columns)).astype(np.float32)

    tensors = {"token_embd": ("model.embed_tokens", matrix(len(tokens), HIDDEN))}
    for i in range(LAYERS):
        block, layer = f"blk.{i}.", f"model.layers.{i}."
        kv = KV_HEADS * HEAD_DIM
        tensors |= {
            f"{block}attn_norm": (f"{layer}input_layernorm", np.ones(HIDDEN, np.float32) * 1.5),
            f"{block}attn_q": (f"{layer}self_attn.q_proj", matrix(HIDDEN, HIDDEN)),
            f"{block}attn_k": (f"{layer}self_attn.k_proj", matrix(kv, HIDDEN)),
            f"{block}attn_v": (f"{layer}self_attn.v_proj", matrix(kv, HIDDEN)),
            f"{block}attn_output": (f"{layer}self_attn.o_proj", matrix(HIDDEN, HIDDEN)),
            f"{block}ffn_norm": (f"{layer}post_attention_layernorm", np.ones(HIDDEN, np.float32)),
            f"{block}ffn_gate": (f"{layer}mlp.gate_proj", matrix(FF, HIDDEN)),
            f"{block}ffn_up": (f"{layer}mlp.up_proj", matrix(FF, HIDDEN)),
            f"{block}ffn_down": (f"{layer}mlp.down_proj", matrix(HIDDEN, FF)),
        }
    tensors["output_norm"] = ("model.norm", np.ones(HIDDEN, np.float32))
    if not tied:
        tensors["output"] = ("lm_head", matrix(len(tokens), HIDDEN))

    writer = gguf.GGUFWriter(path, arch)
    for key, value in {
        f"{arch}.context_length": 256,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.block_count": LAYERS,
        f"{arch}.feed_forward_length": FF,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
        **(metadata or {}),
    }.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{arch}.rope.freq_base", 10000.0)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(list(MERGES))

    for name, (_, weight) in tensors.items():
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.rpartition(".")[2])
        stored = permute(weight, heads) if heads else weight
        if weight.ndim == 1:
            writer.add_tensor(f"{name}.weight", stored)
            continue
        kind = gguf.GGMLQuantizationType[embedding if name == "token_embd" else quantization]
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return TinyLlama(path, {f"{module}.weight": weight for module, weight in tensors.values()})


def write_wheel(
    folder: Path, gguf_file: Path, *, name: str = "tiny_gguf", version: str = "1.0"
) -> Path:
    """A wheel that pip accepts, with ``gguf_file`` as ``NAME/model.gguf`` in it."""
    info = f"{name}-{version}.dist-info"
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(gguf_file, f"{name}/model.gguf")
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: not-wanted\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel
