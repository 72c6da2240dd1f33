"""Reads what a GGUF file says about itself: metadata and tensor table, no tensor data.

Checks magic, version, tensor types and that every tensor lies inside the file,
because the native reader maps the file and a truncated one would crash it.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. No mlx.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# Tensor types that mlx keeps as they are: name, values per block, bytes per block.
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
}
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Tensor:
    """One row of the tensor table. ``shape`` is row-major, as numpy and mlx have it."""

    name: str
    shape: tuple[int, ...]
    type: str
    bytes: int


@dataclass(frozen=True, slots=True)
class GGUF:
    """A checked GGUF file: ``metadata`` in plain Python values, ``tensors`` by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    def need(self, key: str) -> Any:
        """The metadata value, or a ModelError that names the missing key."""
        if key not in self.metadata:
            raise ModelError(f"{self.path.name} has no {key}", "use another GGUF file of the model")
        return self.metadata[key]


class _Cursor:
    """Little-endian reads from a mapped file; running over its end is a ModelError."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def take(self, size: int) -> int:
        """Step over ``size`` bytes and return where they start."""
        start = self.at
        if size > len(self.data) - start:
            raise truncated(self.path)
        self.at = start + size
        return start

    def scalar(self, code: str) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        size = self.scalar("Q")
        start = self.take(size)
        return self.data[start : start + size].decode("utf-8", errors="replace")

    def value(self, type_: int) -> Any:
        if type_ == _STRING:
            return self.string()
        if type_ == _ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            if inner in _SCALARS:
                form = struct.Struct(f"<{_SCALARS[inner]}")
                start = self.take(form.size * count)
                return [v for (v,) in form.iter_unpack(self.data[start : self.at])]
            if count > len(self.data):
                raise truncated(self.path)
            return [self.value(inner) for _ in range(count)]
        if type_ not in _SCALARS:
            raise ModelError(f"{self.path.name} is damaged: unknown value type {type_}", AGAIN)
        return self.scalar(_SCALARS[type_])


AGAIN = "delete the file and fetch it again"


def truncated(path: Path) -> ModelError:
    return ModelError(f"{path.name} is cut short", AGAIN)


def read(path: Path) -> GGUF:
    """Read and check the header of ``path``. Raises ModelError for anything unusable."""
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise ModelError(f"{path.name} is not a GGUF file", "check the path")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(data, path), path)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}", "check the path") from None


def _parse(cursor: _Cursor, path: Path) -> GGUF:
    cursor.take(len(MAGIC))
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise ModelError(f"{path.name} has GGUF version {version}", "versions 2 and 3 can be read")
    n_tensors, n_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(n_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    rows = [_tensor_row(cursor, path) for _ in range(n_tensors)]
    alignment = metadata.get("general.alignment") or DEFAULT_ALIGNMENT
    data_start = math.ceil(cursor.at / alignment) * alignment
    for tensor, offset in rows:
        if data_start + offset + tensor.bytes > len(cursor.data):
            raise truncated(path)
    return GGUF(path, metadata, {tensor.name: tensor for tensor, _ in rows})


def _tensor_row(cursor: _Cursor, path: Path) -> tuple[Tensor, int]:
    name = cursor.string()
    dims = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
    type_, offset = cursor.scalar("I"), cursor.scalar("Q")
    if type_ not in TENSOR_TYPES:
        known = ", ".join(name for name, _, _ in TENSOR_TYPES.values())
        raise ModelError(
            f"{path.name}: tensor {name} has the quantisation type {type_}, which mlx cannot keep",
            f"use a file with {known}",
        )
    type_name, block, block_bytes = TENSOR_TYPES[type_]
    shape = tuple(reversed(dims))  # GGUF lists the fastest axis first
    size = math.prod(shape) // block * block_bytes
    return Tensor(name, shape, type_name, size), offset
