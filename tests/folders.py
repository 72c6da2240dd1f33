"""Model and drafter folders for tests: small, whole, and loadable by the real loading code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from drafter_toys import toy_drafter
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from toys import EOS, VOCAB, llama_toy

from dspark_mlx.draft.dspark.pairing import attach_target
from dspark_mlx.draft.dspark.save import save_drafter
from dspark_mlx.model.target import Target

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """One printable character an id (2..95), byte-level, with an end-of-text token."""
    vocab = {"<pad>": 0, "<eos>": EOS}
    # Ġ is the byte-level alphabet's letter for a space.
    vocab |= {"Ġ" if i == 0 else chr(32 + i): 2 + i for i in range(VOCAB - 2)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(folder: Path, seed: int = 0, **config: Any) -> Path:
    """A llama toy as an mlx-lm model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    model = llama_toy(seed)
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        dict(tree_flatten(model.parameters())),
        metadata={"format": "mlx"},
    )
    args = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "eos_token_id": EOS,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps({**args, **config}))
    write_tokenizer(folder)
    return folder


def write_drafter(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random drafter that fits ``write_model``'s target."""
    config = {"target_layer_ids": (-1, 0, 1), "num_target_layers": 2, "vocab_size": VOCAB}
    drafter = toy_drafter(seed, **(config | changes))
    attach_target(drafter, Target(llama_toy(seed)))
    save_drafter(drafter, folder)
    return folder
