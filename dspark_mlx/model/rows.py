"""A model's whole KV state for a set of rows: every layer's cache, moved as one.

Translates the caches an mlx-lm model asks for into ``RowsKV`` layers of the
same meaning, and names those that have none. mlx-lm's cache classes are known
here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from ..errors import CacheError, UsageError
from .cache import QuantizedRowsKV, Rollback, RowsKV

KV_BITS = (2, 3, 4, 5, 6, 8)
KV_GROUP_SIZES = (32, 64, 128)  # what MLX quantises at once


class Rows:
    """The layers' caches of B rows; ``lengths[r]`` positions of row r are held by all."""

    rollback: Rollback = "exact"

    def __init__(self, layers: Sequence[RowsKV], rows: int = 1) -> None:
        self.layers = list(layers)
        self.lengths = [0] * rows

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def arrays(self) -> list[mx.array]:
        """What must be evaluated for the cache to hold its content."""
        return [part for layer in self.layers for part in layer.parts]

    def can_trim_to(self, row: int, length: int) -> bool:
        return all(layer.can_trim_to(row, length) for layer in self.layers)

    def trim_to(self, lengths: Sequence[int]) -> None:
        """Keep ``lengths[r]`` positions of row r. Called after every forward."""
        for layer in self.layers:
            layer.trim_to(lengths)
        self.lengths = list(lengths)

    def extend(self, other: Rows) -> None:
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.extend(theirs)
        self.lengths = self.lengths + other.lengths

    def filter(self, rows: Sequence[int]) -> None:
        for layer in self.layers:
            layer.filter(rows)
        self.lengths = [self.lengths[r] for r in rows]

    def extract(self, row: int) -> Rows:
        one = Rows([layer.extract(row) for layer in self.layers])
        one.lengths = [self.lengths[row]]
        return one


class ForwardOnlyRow(Rows):
    """One row on mlx-lm's own caches, for models whose state cannot be rolled back.

    Good for plain decoding: it can only move forward, alone.
    """

    rollback: Rollback = "none"

    def __init__(self, layers: Sequence[Any], kinds: str) -> None:
        super().__init__([])
        self.layers = list(layers)
        self._kinds = kinds

    @property
    def nbytes(self) -> int:
        return sum(getattr(layer, "nbytes", 0) for layer in self.layers if not layer.empty())

    @property
    def arrays(self) -> list[Any]:
        return [layer.state for layer in self.layers]

    def can_trim_to(self, row: int, length: int) -> bool:
        return False

    def trim_to(self, lengths: Sequence[int]) -> None:
        if lengths[0] < self.lengths[0]:
            raise CacheError(f"{self._kinds} cannot be rolled back")
        self.lengths = list(lengths)

    def extend(self, other: Rows) -> None:
        raise CacheError(f"{self._kinds} cannot hold several requests")

    def filter(self, rows: Sequence[int]) -> None:
        if list(rows) != [0]:
            self.layers = []
            self.lengths = []

    def extract(self, row: int) -> Rows:
        return self


class RowsFactory:
    """Makes empty rows for one model.

    ``rollback`` is how its rows return to fewer positions, the weakest of its
    layers; ``cannot_roll_back`` names the cache types that are the reason for
    ``none``. ``kv_bits`` quantises keys and values (None: as computed).
    """

    def __init__(
        self, model: nn.Module, kv_bits: int | None = None, group_size: int | None = None
    ) -> None:
        self._model = model
        if kv_bits is not None and kv_bits not in KV_BITS:
            raise UsageError(
                f"a KV cache of {kv_bits} bits is not possible",
                f"choose one of {', '.join(map(str, KV_BITS))}",
            )
        if group_size is not None and group_size not in KV_GROUP_SIZES:
            raise UsageError(
                f"a KV cache in groups of {group_size} is not possible",
                f"choose one of {', '.join(map(str, KV_GROUP_SIZES))}",
            )
        self._bits = kv_bits
        self._group = group_size
        asked = make_prompt_cache(model)
        self._windows: list[int | None] = []
        unknown: dict[str, None] = {}
        for layer in asked:
            if type(layer) is KVCache:
                self._windows.append(None)
            elif type(layer) is RotatingKVCache and layer.keep == 0:
                self._windows.append(layer.max_size)
            else:
                unknown[type(layer).__name__] = None
        self.cannot_roll_back = tuple(unknown)
        self.rollback: Rollback = "none" if unknown else "exact"
        if kv_bits is not None and self.rollback == "none":
            raise CacheError(
                f"this model's cache ({', '.join(self.cannot_roll_back)}) cannot be quantised",
                "leave --kv-bits out",
            )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer, the sliding window, or None for full attention."""
        return tuple(self._windows)

    def make(self) -> Rows:
        """One empty row."""
        if self.rollback == "none":
            return ForwardOnlyRow(make_prompt_cache(self._model), ", ".join(self.cannot_roll_back))
        if self._bits is None:
            return Rows([RowsKV(1, w) for w in self._windows])
        return Rows(
            [QuantizedRowsKV(1, w, bits=self._bits, group_size=self._group) for w in self._windows]
        )
