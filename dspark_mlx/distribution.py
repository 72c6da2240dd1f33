"""Which installed distribution this package came from, and whether another one provides it too.

On PyPI the name ``dspark-mlx`` belongs to another project, which installs a ``dspark`` command and
a ``dspark_mlx`` package of its own: in one environment the two overwrite each other's files.
Importing this module costs nothing; the look-ups read the metadata of what is installed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

NAME = "dspark-chat"
PACKAGES = ("dspark_mlx", "tui")


def version_text(command: str) -> str:
    """The answer to ``--version``: the command, its version and the distribution it belongs to."""
    from . import __version__

    installed = installed_version()
    origin = f"{NAME} {installed}" if installed else "a source folder that is not installed"
    return f"{command} {__version__}, from {origin}"


def installed_version() -> str | None:
    """The version of the distribution that holds this very package; None in a bare clone."""
    from importlib import metadata

    try:
        found = metadata.distribution(NAME)
    except metadata.PackageNotFoundError:
        return None
    here = Path(__file__).resolve().parent
    if Path(str(found.locate_file(here.name))).resolve() == here:
        return found.version
    origin = json.loads(found.read_text("direct_url.json") or "{}")  # of an editable install
    return found.version if origin.get("url") == here.parent.as_uri() else None


def others() -> list[str]:
    """Other installed distributions whose files include a ``dspark_mlx`` package, by name.

    Only distributions with commands of that package are looked at, which takes a few milliseconds.
    """
    from importlib import metadata

    found = {}
    for entry in metadata.entry_points(group="console_scripts"):
        if entry.dist and entry.module.partition(".")[0] in PACKAGES:
            found[entry.dist.name] = entry.dist
    return sorted(
        name
        for name, dist in found.items()
        if name.lower().replace("_", "-") != NAME
        and "dspark_mlx/__init__.py," in (dist.read_text("RECORD") or "")
    )


def warn_of_others(command: str) -> None:
    """Print one line on stderr if another distribution provides ``dspark_mlx`` too."""
    for name in others():
        print(
            f"{command}: warning: {name} also installs dspark_mlx, and its files and ours replace "
            f"each other (pip uninstall {name} && pip install --force-reinstall --no-deps {NAME})",
            file=sys.stderr,
        )
