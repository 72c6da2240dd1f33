"""A target that is a table: the next token's distribution depends on the last token alone.

Its laws can be written down, so what an engine emits can be compared with what
it must emit. The model is nevertheless a model, with layers, a cache and taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from toys import TextRow

from dspark_mlx.draft import Draft, DraftRow, ProposerSpec
from dspark_mlx.draft.draw import BlockSampler
from dspark_mlx.model.target import Target


class _Layer(nn.Module):
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if cache is not None:
            nothing = mx.zeros((x.shape[0], 1, x.shape[1], 1))
            cache.update_and_fetch(nothing, nothing)
        return x


class _Inner(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, vocab)
        self.embed_tokens.weight = mx.eye(vocab)
        self.layers = [_Layer()]
        self.norm = nn.RMSNorm(vocab)


class TableModel(nn.Module):
    """``table (V, V)``: row x holds the logits of what follows token x."""

    def __init__(self, table: np.ndarray) -> None:
        super().__init__()
        self.model = _Inner(len(table))
        self.table = mx.array(table.astype(np.float32))

    @property
    def layers(self) -> list[nn.Module]:
        return self.model.layers

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        hidden = self.model.embed_tokens(tokens)
        for layer, one in zip(self.layers, cache or [None], strict=True):
            hidden = layer(hidden, cache=one)
        return hidden @ self.table


def table_target(vocab: int = 5, seed: int = 0, spread: float = 1.2) -> Target:
    rng = np.random.default_rng(seed)
    target = Target(TableModel(rng.normal(0.0, spread, (vocab, vocab))))
    target.check((0,))
    return target


def law(target: Target, probabilities: Any, anchor: int, length: int) -> np.ndarray:
    """P(text) ``(V,) * length`` of the target behind ``anchor``; ``probabilities`` of logits."""
    step = np.array(probabilities(target.model.table), dtype=np.float64)
    text = step[anchor]
    for _ in range(length - 1):
        text = text[..., None] * step
    return text


class TableDrafter:
    """Drafts from a table of its own, drawn as DSpark draws; under any ``name``.

    ``confidence`` of slot k depends on the token before it, as a real head's.
    """

    nbytes = 0

    def __init__(self, table: np.ndarray, block: int, name: str = "dspark") -> None:
        self.table = mx.array(table.astype(np.float32))
        self.spec = ProposerSpec(name=name, block=block, samples_drafts=True)

    def new_row(self) -> TextRow:
        return TextRow()

    def prefill(self, row: Any, tokens: Any, features: Any) -> list[mx.array]:
        return []

    def row_length(self, row: Any) -> int:
        return 0

    def trim_row(self, row: Any, length: int) -> None: ...

    def extend(self, row: Any) -> None: ...

    def filter(self, rows: Sequence[int]) -> None: ...

    def extract(self, row: int) -> TextRow:
        return TextRow()

    def peek(self, anchors: Sequence[int]) -> list[tuple[float, ...] | None]:
        return [None] * len(anchors)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        width = max(row.width for row in rows)
        sampler = BlockSampler(rows, self.table.shape[0], None)
        last = mx.array([row.anchor for row in rows])
        tokens, confidence = [], []
        for k in range(width):
            confidence.append(mx.where(last % 2 == 0, 0.9, 0.2))
            last = sampler(self.table[last], k).astype(mx.int32)
            tokens.append(last)
        return Draft(
            mx.stack(tokens, axis=1),
            tuple(row.width for row in rows),
            mx.stack(confidence, axis=1),
            sampler.distributions(),
        )

    def append_features(self, features: Any) -> list[mx.array]:
        return []

    def commit(self, context: Any, verified: Any, accepted: Any) -> None: ...


class NoEnd:
    """A tokenizer for tables: ids are digits, nothing ends a text."""

    bos_token = None
    eos_token_ids: frozenset[int] = frozenset()
    chat_template = None

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(str(i) for i in ids)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """The statistic over cells expected at least 5 times (the rest as one), and a bound for it.

    The bound is the 99.99 % point, by the Wilson-Hilferty approximation.
    """
    counts, expected = counts.ravel().astype(float), expected.ravel()
    assert counts[expected == 0].sum() == 0, "a token that must never come came"
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    z = 3.719
    bound = freedom * (1 - 2 / (9 * freedom) + z * (2 / (9 * freedom)) ** 0.5) ** 3
    return statistic, bound
