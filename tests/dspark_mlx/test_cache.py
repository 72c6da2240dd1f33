"""RowsKV against the simplest model of it: one list of vectors a row."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mlx_lm.models.base import create_attention_mask

from dspark_mlx.errors import CacheError
from dspark_mlx.model import cache
from dspark_mlx.model.cache import QuantizedRowsKV, RowsKV

HEADS, DIM = 2, 4


def attend(keys: mx.array, mask: Any, queries: int) -> list[list[list[float]]]:
    """Per row and query, the first components of the keys that the mask lets it see."""
    rows, _, length, _ = keys.shape
    if mask is None:
        allowed = np.ones((rows, queries, length), dtype=bool)
    elif isinstance(mask, str):
        assert mask == "causal"
        column, row = np.arange(length), np.arange(length - queries, length)
        allowed = np.broadcast_to(column <= row[:, None], (rows, queries, length))
    else:
        found = np.array(mask)
        found = found[None] if found.ndim == 2 else found[:, 0]
        allowed = np.broadcast_to(found, (rows, queries, length))
    values = np.array(keys[:, 0, :, 0])
    return [[values[r][allowed[r, q]].tolist() for q in range(queries)] for r in range(rows)]


class Rows(RuleBasedStateMachine):
    """Appends, roll-backs, joins, leaves and extractions in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.grown = (cache.GROWTH, cache.SLACK)
        cache.GROWTH, cache.SLACK = 4, 5
        self.next = 0.0

    def teardown(self) -> None:
        cache.GROWTH, cache.SLACK = self.grown

    @initialize(rows=st.integers(1, 3), window=st.sampled_from([None, 1, 3, 6]))
    def start(self, rows: int, window: int | None) -> None:
        self.window = window
        self.kv = RowsKV(rows, window)
        self.texts: list[list[float]] = [[] for _ in range(rows)]

    def numbers(self, rows: int, width: int) -> np.ndarray:
        self.next += rows * width
        return np.arange(self.next - rows * width, self.next).reshape(rows, width) + 1

    def append(self, kv: RowsKV, texts: list[list[float]], width: int) -> None:
        new = self.numbers(len(texts), width)
        tiled = np.broadcast_to(new[:, None, :, None], (len(texts), HEADS, width, DIM))
        given = mx.array(tiled.astype(np.float32))
        offset = kv.offset
        expected = [len(t) for t in texts]
        assert (offset.tolist() if isinstance(offset, mx.array) else [offset] * len(texts)) == (
            expected
        )
        mask = create_attention_mask(mx.zeros((len(texts), width, 1)), kv, self.window)
        keys, values = kv.update_and_fetch(given, -given)
        assert float(mx.abs(keys + values).max()) == 0
        for r, text in enumerate(texts):
            text.extend(new[r].tolist())
        window = self.window or 10**9
        seen = attend(keys, mask, width)
        for r, text in enumerate(texts):
            for q in range(width):
                end = len(text) - width + q + 1
                assert seen[r][q] == text[max(0, end - window) : end]

    @rule(width=st.integers(1, 7), data=st.data())
    def round(self, width: int, data: st.DataObject) -> None:
        before = [len(t) for t in self.texts]
        self.append(self.kv, self.texts, width)
        kept = [n + data.draw(st.integers(0, width)) for n in before]
        self.kv.trim_to(kept)
        self.texts = [t[:n] for t, n in zip(self.texts, kept, strict=True)]

    @rule(data=st.data())
    def further_back(self, data: st.DataObject) -> None:
        """Further than a round: done exactly, or refused."""
        wanted = [data.draw(st.integers(0, len(t))) for t in self.texts]
        possible = [self.kv.can_trim_to(r, n) for r, n in enumerate(wanted)]
        if all(possible):
            self.kv.trim_to(wanted)
            self.texts = [t[:n] for t, n in zip(self.texts, wanted, strict=True)]
        else:
            assert self.window is not None
            with pytest.raises(CacheError):
                self.kv.trim_to(wanted)

    @precondition(lambda self: len(self.texts) < 4)
    @rule(rows=st.integers(1, 2), width=st.integers(0, 9))
    def extend(self, rows: int, width: int) -> None:
        other, texts = RowsKV(rows, self.window), [[] for _ in range(rows)]
        if width:
            self.append(other, texts, width)
            other.trim_to([width] * rows)
        self.kv.extend(other)
        self.texts += texts

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        order = data.draw(st.permutations(range(len(self.texts))))
        stay = order[: data.draw(st.integers(1, len(order)))]
        self.kv.filter(stay)
        self.texts = [self.texts[r] for r in stay]

    @rule(data=st.data(), width=st.integers(1, 5))
    def extract(self, data: st.DataObject, width: int) -> None:
        row = data.draw(st.integers(0, len(self.texts) - 1))
        if not self.kv.parts:
            return
        one = self.kv.extract(row)
        self.append(one, [list(self.texts[row])], width)

    @invariant()
    def in_step(self) -> None:
        if not hasattr(self, "kv"):
            return
        assert self.kv.lengths == [len(t) for t in self.texts]
        assert self.kv.rows == len(self.texts)
        assert self.kv.size() == max(map(len, self.texts))
        for r, text in enumerate(self.texts):
            first, stored = self.kv.start[r], len(text) - self.kv.start[r]
            assert first <= max(0, len(text) - (self.window or 10**9) + 1)
            if self.kv.parts:
                assert np.array(self.kv.parts[0][r, 0, :stored, 0]).tolist() == text[first:]
        if self.window is not None and self.kv.parts:
            # What is kept behind the window is bounded, however long the text.
            longest = max(len(t) - s for t, s in zip(self.texts, self.kv.start, strict=True))
            assert longest < self.window - 1 + cache.SLACK + cache.GROWTH + 9


TestRows = Rows.TestCase
TestRows.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantised_rows_hold_what_quantisation_makes_of_a_row(bits: int) -> None:
    rng = np.random.default_rng(bits)
    kv = QuantizedRowsKV(2, bits=bits, group_size=32)
    assert (kv.bits, kv.group_size) == (bits, 32)
    given = mx.array(rng.normal(size=(2, HEADS, 9, 64)).astype(np.float32))
    for at in range(0, 9, 3):
        kv.update_and_fetch(given[:, :, at : at + 3], -given[:, :, at : at + 3])
        kv.trim_to(kv.lengths)
    kv.trim_to([9, 5])
    kv.update_and_fetch(given[:, :, 5:8], -given[:, :, 5:8])
    kv.trim_to([9, 8])
    keys, values = kv.fetch()
    ours = mx.dequantize(*keys, group_size=32, bits=bits)
    wanted = mx.dequantize(*mx.quantize(given, group_size=32, bits=bits), group_size=32, bits=bits)
    assert np.array(ours[0, :, :9]) == pytest.approx(np.array(wanted[0]))
    assert np.array(ours[1, :, :8]) == pytest.approx(np.array(wanted[1, :, :8]))
    full = RowsKV(2)
    full.update_and_fetch(given, given)
    assert kv.nbytes < full.nbytes * (bits + 2) / 32 + 1
    assert values[0].shape == keys[0].shape


def test_an_empty_cache_says_so() -> None:
    kv = RowsKV(2)
    assert kv.empty() and kv.nbytes == 0 and kv.size() == 0 and kv.offset == 0
    with pytest.raises(CacheError, match="empty"):
        kv.fetch()
    kv.update_and_fetch(mx.ones((2, 1, 3, 4)), mx.ones((2, 1, 3, 4)))
    assert not kv.empty() and kv.state == kv.parts


def test_a_reply_of_many_tokens_grows_in_steps_not_token_by_token() -> None:
    kv = RowsKV(1)
    capacities = set()
    for _ in range(600):
        kv.update_and_fetch(mx.ones((1, 1, 1, 4)), mx.ones((1, 1, 1, 4)))
        kv.trim_to(kv.lengths)
        capacities.add(kv.parts[0].shape[2])
    assert capacities == {256, 512, 768}


def test_leaving_rows_give_their_memory_back() -> None:
    kv = RowsKV(1)
    kv.update_and_fetch(mx.ones((1, 1, 2000, 4)), mx.ones((1, 1, 2000, 4)))
    short = RowsKV(1)
    short.update_and_fetch(mx.ones((1, 1, 3, 4)), mx.ones((1, 1, 3, 4)))
    kv.extend(short)
    assert kv.parts[0].shape == (2, 1, 2048, 4)
    kv.filter([1])
    assert kv.parts[0].shape == (1, 1, 256, 4)
