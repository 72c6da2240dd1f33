"""Builds a Hugging Face tokenizer from the tokenizer metadata of a GGUF file.

Byte-level BPE only (``gpt2`` in GGUF's words), for the pre-tokenizers whose
splitting rule is known here. Writes the files that mlx-lm's ``load`` reads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import ModelError
from .gguf import GGUF

# Token types of GGUF's table that must never be split or merged.
_CONTROL, _USER_DEFINED = 3, 4
# Pre-tokenizers: whether each digit stands alone before the byte-level split.
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
    _build(gguf, single_digits=_SINGLE_DIGITS[pre]).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.need(f"{gguf.need('general.architecture')}.context_length"),
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


def _build(gguf: GGUF, *, single_digits: bool) -> Any:
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
