"""Rows of keys and values: one layer's KV cache for several ragged requests.

Every row is left-aligned: position p of row r lies at index ``p - start[r]``,
whatever the other rows hold. Rolling a row back is therefore only a smaller
number in ``lengths``: nothing is copied, and what lies behind is overwritten by
the next append and hidden by the mask until then. Sliding-window layers keep
some positions behind their window, so that they can be rolled back exactly
across the point where a rotating buffer would have wrapped.

mlx-lm models see an ordinary cache (``offset``, ``update_and_fetch``,
``make_mask``). This module knows nothing of models, requests or drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import mlx.core as mx

from ..errors import CacheError

# Buffers grow by this many positions, as mlx-lm's do.
GROWTH = 256
# A window layer keeps this many positions more than its window, for rollback.
SLACK = 256
# How a cache returns to fewer positions after a verification:
# exact: by a smaller number; replay: by running the kept tokens again; none: it cannot.
Rollback: TypeAlias = Literal["exact", "replay", "none"]

# Groups that mx.quantize knows, the one mlx-lm prefers first.
GROUP_SIZES = (64, 32)


class RowsKV:
    """Keys and values ``(B, heads, capacity, head_dim)`` with a length per row.

    ``lengths[r]`` is the number of positions row r has seen, ``start[r]`` the
    first of them still stored. ``window`` limits attention to the last that
    many positions (None: all of them).
    """

    rollback: Rollback = "exact"

    def __init__(self, rows: int = 1, window: int | None = None) -> None:
        self.window = window
        self.lengths = [0] * rows
        self.start = [0] * rows
        self.parts: list[mx.array] = []
        self._offsets: tuple[tuple[int, ...], mx.array] | None = None

    # -- storage format; the quantised subclass overrides these three -----------------

    def _encode(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        return [keys, values]

    def _decode(self, parts: list[mx.array]) -> tuple[Any, Any]:
        return parts[0], parts[1]

    def _like(self, rows: int) -> RowsKV:
        return RowsKV(rows, self.window)

    # -- what mlx-lm models call ------------------------------------------------------

    @property
    def offset(self) -> int | mx.array:
        """Where the next token stands: one number, or ``(B,)`` where rows differ."""
        first = self.lengths[0]
        if all(n == first for n in self.lengths):
            return first
        key = tuple(self.lengths)
        if self._offsets is None or self._offsets[0] != key:
            self._offsets = (key, mx.array(key, dtype=mx.int32))
        return self._offsets[1]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append ``(B, heads, L, head_dim)`` to every row; return what they may attend to."""
        lo = self._first_visible()
        width = keys.shape[2]
        self._append(self._encode(keys, values))
        self.lengths = [n + width for n in self.lengths]
        hi = max(self._held())
        return self._decode([part[..., lo:hi, :] for part in self.parts])

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Mask for N new tokens a row, over exactly what ``update_and_fetch`` will return."""
        window = window_size or self.window
        held = self._held()
        lo = self._first_visible()
        hi = max(held) + N
        level = all(h == held[0] for h in held)
        if level and (window is None or hi - lo <= window):
            if N == 1 and not return_array:
                return None
            if not return_array:
                return "causal"
        column = mx.arange(lo, hi)
        query = mx.array(held)[:, None] + mx.arange(N)
        query = query[:, None, :, None]
        mask = column <= query
        if window is not None:
            mask = mask & (column > query - window)
        return mask[0, 0] if len(held) == 1 else mask

    def fetch(self) -> tuple[Any, Any]:
        """All that is stored, ``(B, heads, longest row, head_dim)``; a mask must hide the rest."""
        if not self.parts:
            raise CacheError("this cache is empty")
        hi = max(self._held())
        return self._decode([part[..., :hi, :] for part in self.parts])

    def size(self) -> int:
        return max(self.lengths, default=0)

    def empty(self) -> bool:
        return not self.parts

    @property
    def state(self) -> list[mx.array]:
        return self.parts

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    # -- what the engine calls --------------------------------------------------------

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def can_trim_to(self, row: int, length: int) -> bool:
        """Whether row ``row`` can return to ``length`` positions with its window whole."""
        if not 0 <= length <= self.lengths[row]:
            return False
        reach = 0 if self.window is None else max(0, length - self.window + 1)
        return self.start[row] <= reach

    def trim_to(self, lengths: Sequence[int]) -> None:
        """Forget what each row holds past ``lengths[r]``. Raises CacheError, changing nothing.

        Called after every forward, also when nothing was rejected: between two
        forwards is the only time when positions that no window reaches any
        more can be dropped without a mask noticing.
        """
        for row, length in enumerate(lengths):
            if not self.can_trim_to(row, length):
                raise CacheError(
                    f"cannot roll back from position {self.lengths[row]} to {length}: "
                    f"positions before {self.start[row]} are no longer stored"
                )
        self.lengths = list(lengths)
        self._drop_unreachable()

    def extend(self, other: RowsKV) -> None:
        """Add the rows of ``other`` (same layer, same settings) behind this cache's own."""
        if not other.parts or not self.parts:
            if other.parts:
                self.parts = [_blank(part, self.rows, 0) for part in other.parts]
            elif self.parts:
                other.parts = [_blank(part, other.rows, 0) for part in self.parts]
        if self.parts:
            capacity = max(self.parts[0].shape[2], other.parts[0].shape[2])
            self.parts = [
                mx.concatenate([_widen(a, capacity), _widen(b, capacity)])
                for a, b in zip(self.parts, other.parts, strict=True)
            ]
        self.lengths = self.lengths + other.lengths
        self.start = self.start + other.start

    def filter(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order; frees what no remaining row needs."""
        self.lengths = [self.lengths[r] for r in rows]
        self.start = [self.start[r] for r in rows]
        if self.parts:
            capacity = rounded(max(self._held(), default=0))
            self.parts = [_take(part, rows)[:, :, :capacity] for part in self.parts]

    def extract(self, row: int) -> RowsKV:
        """A copy of one row, as a cache of its own."""
        one = self._like(1)
        one.lengths, one.start = [self.lengths[row]], [self.start[row]]
        held = self._held()[row]
        one.parts = [mx.contiguous(part[row : row + 1, :, :held]) for part in self.parts]
        return one

    # -- inside -----------------------------------------------------------------------

    def _held(self) -> list[int]:
        return [n - s for n, s in zip(self.lengths, self.start, strict=True)]

    def _first_visible(self) -> int:
        """The first index any row's next token may attend to."""
        if self.window is None:
            return 0
        return max(0, min(self._held()) - self.window + 1)

    def _drop_unreachable(self) -> None:
        if self.window is None or not self.parts:
            return
        keep = self.window - 1 + SLACK
        held = self._held()
        if max(held) < keep + GROWTH:
            return
        drop = [max(0, h - keep) for h in held]
        self.parts = [_shift(part[:, :, : max(held)], drop) for part in self.parts]
        self.start = [s + d for s, d in zip(self.start, drop, strict=True)]

    def _append(self, new: list[mx.array]) -> None:
        width = new[0].shape[2]
        need = max(self._held()) + width
        if not self.parts or need > self.parts[0].shape[2]:
            self._grow(new, width)
        held = self._held()
        if all(h == held[0] for h in held):
            for part, piece in zip(self.parts, new, strict=True):
                part[..., held[0] : held[0] + width, :] = piece
            return
        for part, piece in zip(self.parts, new, strict=True):
            for row, at in enumerate(held):
                part[row : row + 1, :, at : at + width, :] = piece[row : row + 1]

    def _grow(self, new: list[mx.array], width: int) -> None:
        """Make room for ``width`` more positions."""
        if not self.parts:
            capacity = rounded(width)
            self.parts = [_blank(part, len(self.lengths), capacity) for part in new]
            return
        longest = max(self._held())
        capacity = rounded(longest + width)
        self.parts = [_widen(part[:, :, :longest], capacity) for part in self.parts]


class QuantizedRowsKV(RowsKV):
    """The same rows with keys and values in ``bits`` bits, in groups of ``group_size``.

    Without a ``group_size`` the largest that divides both head dimensions is
    taken. mlx-lm's attention takes the quantised path for a cache with ``bits``.
    """

    def __init__(
        self,
        rows: int = 1,
        window: int | None = None,
        *,
        bits: int = 8,
        group_size: int | None = None,
    ) -> None:
        super().__init__(rows, window)
        self.bits = bits
        self.group_size = group_size

    def _encode(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        if self.group_size is None:
            self.group_size = _group_size(keys.shape[-1], values.shape[-1])
        return [
            *mx.quantize(keys, group_size=self.group_size, bits=self.bits),
            *mx.quantize(values, group_size=self.group_size, bits=self.bits),
        ]

    def _decode(self, parts: list[mx.array]) -> tuple[Any, Any]:
        return tuple(parts[:3]), tuple(parts[3:])

    def _like(self, rows: int) -> RowsKV:
        return QuantizedRowsKV(rows, self.window, bits=self.bits, group_size=self.group_size)


def _group_size(*dims: int) -> int:
    for size in GROUP_SIZES:
        if all(dim % size == 0 for dim in dims):
            return size
    raise CacheError(
        f"a KV cache with head dimensions {sorted(set(dims))} cannot be quantised",
        "leave --kv-bits out",
    )


def rounded(positions: int) -> int:
    """The capacity of a buffer for so many positions."""
    return -(-positions // GROWTH) * GROWTH


def _blank(like: mx.array, rows: int, capacity: int) -> mx.array:
    return mx.zeros((rows, like.shape[1], capacity, like.shape[3]), dtype=like.dtype)


def _widen(part: mx.array, capacity: int) -> mx.array:
    missing = capacity - part.shape[2]
    if missing <= 0:
        return part
    return mx.concatenate([part, _blank(part, part.shape[0], missing)], axis=2)


def _shift(part: mx.array, drop: Sequence[int]) -> mx.array:
    """Drop the first ``drop[r]`` positions of each row, keeping the rows aligned at 0."""
    width = part.shape[2] - min(drop)
    rows = [_widen(part[r : r + 1, :, d:], width) for r, d in enumerate(drop)]
    return mx.concatenate(rows)


def _take(part: mx.array, rows: Sequence[int]) -> mx.array:
    return part[mx.array(list(rows), dtype=mx.int32)]
