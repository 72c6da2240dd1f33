"""``dspark models``: the known models, which are on disk, which fit; ``--fetch`` gets one."""

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
from .options import add_cache_flag
from .output import say
from .progress import ProgressLine

# macOS lets the GPU have about this share of the memory (mx.device_info's
# max_recommended_working_set_size says it exactly, but costs loading mlx).
GPU_SHARE = 0.75


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"List models of your own in {user_file()}, in the format of models.toml."
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.add_argument(
        "--fetch",
        metavar="NAME",
        help="download this model (a name from the list, or a Hub id) and print its folder",
    )
    parser.add_argument(
        "--update", action="store_true", help="with --fetch: look for a newer revision on the Hub"
    )
    add_cache_flag(parser)
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
    """Download target and drafter; print their folders unless ``quiet``."""
    absent = sources.on_disk(entry.target_source, cache_dir=cache_dir) is None
    if absent and entry.download_bytes and not sys.stderr.isatty():
        # Where no progress can be drawn, one line says why it takes a while.
        say(f"fetching {entry.name}, {_size(entry.download_bytes)}")
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
    """The entry as plain values, with where it is on this machine and whether it fits."""
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
    from ..bench.text_tables import text_table

    columns = text_table(
        ("NAME", "TARGET", "DRAFTER", "ON DISK", "MEMORY", "FITS"),
        [
            (
                row["name"] + ("*" if row["name"] == DEFAULT_MODEL else ""),
                _size(row["target_bytes"]),
                _size(row["drafter_bytes"]) if row["drafter_bytes"] else "-",
                _on_disk(row),
                _size(row["memory_bytes"]),
                "yes" if row["fits"] else "no",
            )
            for row in rows
        ],
    ).splitlines()
    titles = ["TITLE", *(row["title"] for row in rows)]
    lines = [f"{line}  {title}" for line, title in zip(columns, titles, strict=True)]
    return "\n".join(
        [*lines, "", f"* the default. Models may take {_size(usable_memory())} on this machine."]
    )


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
