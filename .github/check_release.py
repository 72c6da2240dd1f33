"""Checks a built release: ``check_release.py v0.1.0 dist``. Exits with one line if it is wrong.

The tag must be the version of the wheel, and the wheel must hold what does not come from a ``.py``
file: the registry, the default drafter, the data and the markers of typed packages.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

NEEDED = (
    "dspark_mlx/models.toml",
    "dspark_mlx/py.typed",
    "dspark_mlx/data/prompts.jsonl",
    "dspark_mlx/data/drafters/smollm2-135m/config.json",
    "dspark_mlx/data/drafters/smollm2-135m/model.safetensors",
    "tui/app.tcss",
    "tui/py.typed",
)


def main(tag: str, folder: str) -> None:
    wheels = sorted(Path(folder).glob("*.whl"))
    if len(wheels) != 1 or not list(Path(folder).glob("*.tar.gz")):
        sys.exit(f"{folder} must hold one wheel and one sdist")
    name, version = wheels[0].name.split("-")[:2]
    if name != "dspark_chat" or tag != f"v{version}":
        sys.exit(f"the tag {tag} does not belong to {wheels[0].name}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        held = set(wheel.namelist())
    if absent := [name for name in NEEDED if name not in held]:
        sys.exit(f"{wheels[0].name} lacks {', '.join(absent)}")
    print(f"{wheels[0].name}: {len(held)} files")


if __name__ == "__main__":
    main(*sys.argv[1:])
