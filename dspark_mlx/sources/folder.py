"""Whether a model folder is whole, decided from its own files without network or mlx.

Used for local folders, Hub snapshots and packaged drafters alike: a partial
download, a missing shard or a truncated file is found before it is loaded.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal, TypeAlias

Role: TypeAlias = Literal["target", "drafter"]

INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
# Any one of these groups makes a tokenizer.
_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))


def missing(folder: Path, role: Role = "target") -> str | None:
    """What is missing or damaged in ``folder``, in words; None if it is a whole model.

    A target needs a tokenizer; a drafter uses its target's.
    """
    if not folder.is_dir():
        return "the folder does not exist"
    if not (folder / "config.json").is_file():
        return "config.json is missing"
    if not isinstance(_json(folder / "config.json"), dict):
        return "config.json is damaged"
    if fault := _weights(folder):
        return fault
    has_tokenizer = any(all((folder / f).is_file() for f in group) for group in _TOKENIZERS)
    if role == "target" and not has_tokenizer:
        return "the tokenizer (tokenizer.json) is missing"
    return None


def _weights(folder: Path) -> str | None:
    present = {path.name for path in folder.glob("*.safetensors")}
    needed = set(present)
    if (folder / INDEX).is_file():
        index = _json(folder / INDEX)
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            return f"{INDEX} is damaged"
        needed = set(map(str, weight_map.values()))
    for name in present:
        if match := _SHARD.fullmatch(name):
            count = int(match["count"])
            needed |= {
                f"{match['stem']}-{i:05d}-of-{match['count']}.safetensors"
                for i in range(1, count + 1)
            }
    if not needed:
        return "it has no weights (*.safetensors)"
    if absent := sorted(needed - present):
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        return f"{absent[0]}{more} is missing"
    damaged = sorted(name for name in needed if not whole(folder / name))
    return f"{damaged[0]} is cut short or damaged" if damaged else None


def whole(path: Path) -> bool:
    """Whether the file is as long as its own header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            if header_size > size - 8:
                return False
            header = json.loads(file.read(header_size))
        ends = [v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"]
        return bool(size == 8 + header_size + max(ends, default=0))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return False


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def weight_bytes(folder: Path) -> int:
    """The size of the weights of a whole folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
