"""``dspark models``: the known models, what of them is here, what fits; ``--fetch`` gets one."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import sources
from ..errors import UsageError
from ..registry import DEFAULT_MODEL, ModelEntry, Registry, user_file
from ..sources import PackageSource, Source
from .progress import ProgressLine

# macOS lets the GPU have about this share of the memory (mx.device_info's
# max_recommended_working_set_size says it exactly, but costs loading mlx).
GPU_SHARE = 0.75


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"Your own models go into {user_file()}; the format is that of models.toml."
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.add_argument(
        "--fetch",
        metavar="NAME",
        help="download this model (a name from the list, or a Hub id) and print its folder",
    )
    parser.add_argument(
        "--update", action="store_true", help="with --fetch: look for a newer revision on the Hub"
    )
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="keep models in DIR")
    parser.add_argument(
        "--quiet", action="store_true", help="with --fetch: do not print the folder"
    )


def run(args: argparse.Namespace) -> int:
    registry = Registry.load()
    if (args.update or args.quiet) and not args.fetch:
        raise UsageError("--update and --quiet belong to --fetch", "name a model with --fetch")
    if args.fetch:
        fetch(registry.resolve(args.fetch), args.cache_dir, quiet=args.quiet, update=args.update)
        return 0
    rows = [describe(entry, args.cache_dir) for entry in registry.values()]
    print(json.dumps(rows, indent=2) if args.json else table(rows))
    return 0


def fetch(entry: ModelEntry, cache_dir: Path | None, *, quiet: bool, update: bool) -> None:
    """Get target and drafter; print the folders unless ``quiet``."""
    absent = sources.on_disk(entry.target_source, cache_dir=cache_dir) is None
    if absent and entry.download_bytes and not sys.stderr.isatty():
        # Where no progress can be drawn one line says why it takes a while.
        print(f"fetching {entry.name}, {_size(entry.download_bytes)}", file=sys.stderr, flush=True)
    with ProgressLine() as report:
        target = sources.fetch(
            entry.target_source,
            cache_dir=cache_dir,
            report=report,
            expected_bytes=entry.target_bytes,
            refresh=update,
        )
        drafter = None
        if (source := entry.drafter_source) and not isinstance(source, PackageSource):
            drafter = sources.fetch(
                source, role="drafter", cache_dir=cache_dir, report=report, refresh=update
            )
    if not quiet:
        print(target)
        if drafter:
            print(drafter)


def describe(entry: ModelEntry, cache_dir: Path | None) -> dict[str, Any]:
    """The entry with what this machine makes of it, as plain values."""
    needs = entry.memory_bytes(float32=sys.platform != "darwin")
    return {
        **dataclasses.asdict(entry),
        "target_path": _path(entry.target_source, "target", cache_dir),
        "drafter_path": _path(entry.drafter_source, "drafter", cache_dir),
        "memory_bytes": needs,
        "fits": needs <= usable_memory(),
    }


def usable_memory() -> int:
    """Bytes that a model may take on this machine."""
    import psutil

    total = int(psutil.virtual_memory().total)
    return int(total * GPU_SHARE) if sys.platform == "darwin" else total


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in columns, the default model marked, with a line about this machine's memory."""
    head = ("NAME", "TARGET", "DRAFTER", "ON DISK", "MEMORY", "FITS", "TITLE")
    body = [
        (
            row["name"] + ("*" if row["name"] == DEFAULT_MODEL else ""),
            _size(row["target_bytes"]),
            _size(row["drafter_bytes"]) if row["drafter_bytes"] else "-",
            _on_disk(row),
            _size(row["memory_bytes"]),
            "yes" if row["fits"] else "no",
            row["title"],
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, *body]
    ]
    lines += ["", f"* the default. Models may take {_size(usable_memory())} on this machine."]
    return "\n".join(lines)


def _path(source: Source | None, role: sources.Role, cache_dir: Path | None) -> str | None:
    found = sources.on_disk(source, role=role, cache_dir=cache_dir) if source else None
    return str(found) if found else None


def _on_disk(row: dict[str, Any]) -> str:
    here = [part for part in ("target", "drafter") if row[f"{part}_path"]]
    if len(here) == 2 or (here == ["target"] and not row["drafter"]):
        return "yes"
    return here[0] if here else "no"


def _size(count: int) -> str:
    if not count:
        return "?"
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
