"""Toy models, tokenizers and proposers that tests run whole rounds on in milliseconds.

Models are real mlx-lm architectures, two layers and 32 wide, with random
weights made livelier than usual so that greedy text does not repeat one token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models import gemma3_text, granitemoehybrid, llama, qwen3

from dspark_mlx.draft import Draft, DraftRow, ProposerSpec
from dspark_mlx.model.target import Target

VOCAB = 96
EOS = 1


def _lively(model: nn.Module, seed: int, scale: float) -> nn.Module:
    """Random weights large enough that the next token depends on all before it."""
    rng = np.random.default_rng(seed)

    def fill(value: mx.array) -> mx.array:
        if value.ndim < 2:
            return value
        return mx.array(rng.normal(0.0, scale, value.shape).astype(np.float32))

    model.update(tree_map(fill, model.parameters()))
    mx.eval(model.parameters())
    return model


def llama_toy(seed: int = 0, window: int | None = None, scale: float = 0.35) -> nn.Module:
    """Llama; with ``window`` every second layer is a sliding-window layer."""
    kinds = ["full_attention", "sliding_attention" if window else "full_attention"]
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
        head_dim=32,
        layer_types=kinds,
        sliding_window=window,
    )
    return _lively(llama.Model(args), seed, scale)


def qwen3_toy(seed: int = 0, scale: float = 0.35) -> nn.Module:
    args = qwen3.ModelArgs(
        model_type="qwen3",
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        vocab_size=VOCAB,
        head_dim=32,
        max_position_embeddings=4096,
        rope_theta=10000.0,
        tie_word_embeddings=True,
    )
    return _lively(qwen3.Model(args), seed, scale)


def gemma3_toy(seed: int = 0, window: int = 16, scale: float = 0.2) -> nn.Module:
    """Gemma 3: scaled embeddings, and layers that alternate between window and full attention."""
    args = gemma3_text.ModelArgs(
        model_type="gemma3_text",
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCAB,
        sliding_window=window,
        sliding_window_pattern=2,
        query_pre_attn_scalar=32,
    )
    return _lively(gemma3_text.Model(args), seed, scale)


def hybrid_toy(seed: int = 0, scale: float = 0.35) -> nn.Module:
    """Granite 4 hybrid: a Mamba 2 layer, whose state cannot be rolled back, and an attention."""
    args = granitemoehybrid.ModelArgs(
        model_type="granitemoehybrid",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        max_position_embeddings=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=False,
        embedding_multiplier=1.0,
        attention_multiplier=0.25,
        logits_scaling=1.0,
        residual_multiplier=1.0,
        layer_types=["mamba", "attention"],
        rms_norm_eps=1e-5,
        shared_intermediate_size=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_proj_bias=False,
        mamba_d_state=8,
        mamba_d_conv=4,
        mamba_n_groups=1,
        mamba_conv_bias=True,
        mlp_bias=False,
    )
    return _lively(granitemoehybrid.Model(args), seed, scale)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "llama": llama_toy,
    "llama-window": lambda seed=0: llama_toy(seed, window=16),
    "qwen3": qwen3_toy,
    "gemma3": gemma3_toy,
}


class ToyTokenizer:
    """Ids 2..95 are one printable character each; 0 pads, 1 ends the text."""

    bos_token = None
    eos_token_ids = frozenset({EOS})
    has_chat_template = True
    chat_template = "toy"

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("" if i < 2 else chr(31 + i) for i in ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [min(max(ord(c) - 31, 2), VOCAB - 1) for c in text]

    def apply_chat_template(self, messages: Any, **options: Any) -> list[int]:
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return self.encode(text + "<assistant>")


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    return [int(t) for t in rng.integers(2, VOCAB, length)]


def plain_greedy(model: nn.Module, tokens: Sequence[int], count: int) -> list[int]:
    """The target's own greedy continuation, one full forward a token, no cache."""
    text = list(tokens)
    for _ in range(count):
        text.append(int(mx.argmax(model(mx.array([text]))[0, -1]).item()))
    return text[len(tokens) :]


class TextRow(list[int]):
    """A row state that is nothing but its tokens, on the host."""

    nbytes = 0

    @property
    def arrays(self) -> list[mx.array]:
        return []

    def extract(self, row: int) -> TextRow:
        return TextRow(self)


class OracleProposer:
    """Drafts the target's own greedy text, each token spoiled with probability ``noise``.

    Gives every accept pattern from none to the whole block. Keeps its rows'
    texts on the host, as the lookup proposer does.
    """

    nbytes = 0

    def __init__(self, model: nn.Module, block: int, noise: float = 0.4, seed: int = 0) -> None:
        self.model = model
        self.spec = ProposerSpec(name="oracle", block=block)
        self.noise = noise
        self.rng = np.random.default_rng(seed)
        self._rows: list[TextRow] = []

    def new_row(self) -> TextRow:
        return TextRow()

    def prefill(self, row: TextRow, tokens: Sequence[int], features: Any) -> list[mx.array]:
        row.extend(tokens)
        return []

    def row_length(self, row: TextRow) -> int:
        return len(row)

    def trim_row(self, row: TextRow, length: int) -> None:
        del row[length:]

    def extend(self, row: TextRow) -> None:
        self._rows.append(row)

    def filter(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[r] for r in rows]

    def extract(self, row: int) -> TextRow:
        return TextRow(self._rows[row])

    def peek(self, anchors: Sequence[int]) -> list[tuple[float, ...] | None]:
        return [None] * len(anchors)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        width = max(row.width for row in rows)
        drafts, confidence = [], []
        for text, row in zip(self._rows, rows, strict=True):
            right = plain_greedy(self.model, [*text, row.anchor], width)
            spoil = self.rng.random(width) < self.noise
            drafts.append(
                [
                    (t + 1 - 2) % (VOCAB - 2) + 2 if s else t
                    for t, s in zip(right, spoil, strict=True)
                ]
            )
            confidence.append([0.2 if s else 0.9 for s in spoil])
        return Draft(
            tokens=mx.array(drafts, dtype=mx.int32),
            counts=tuple(row.width for row in rows),
            confidence=mx.array(confidence, dtype=mx.float32),
            q=(None,) * len(rows),
        )

    def append_features(self, features: Any) -> list[mx.array]:
        return []

    def commit(
        self,
        context: Sequence[Sequence[int]],
        verified: Sequence[int],
        accepted: Sequence[int],
    ) -> None:
        for text, tokens in zip(self._rows, context, strict=True):
            text.extend(tokens)


def target(kind: str = "llama", seed: int = 0, **options: Any) -> Target:
    return Target(MODELS[kind](seed=seed), **options)
