"""The distribution: what ``--version`` names, and the warning about another ``dspark_mlx``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_mlx import __version__, distribution

ROOT = Path(__file__).parents[2]


def install(site: Path, name: str, *, files: str = "", url: str = "") -> None:
    """Write as much of an installed distribution's metadata as is looked at."""
    info = site / f"{name.replace('-', '_')}-9.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.1\n")
    (info / "entry_points.txt").write_text("[console_scripts]\ndspark = dspark_mlx.commands:main\n")
    (info / "RECORD").write_text(files)
    if url:
        (info / "direct_url.json").write_text(json.dumps({"url": url}))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all that ``importlib.metadata`` sees."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_the_version_names_the_distribution(site: Path) -> None:
    assert distribution.version_text("dspark").endswith(
        "from a source folder that is not installed"
    )
    install(site, "dspark-chat", url=ROOT.as_uri())
    text = distribution.version_text("dspark")
    assert text == f"dspark {__version__}, from dspark-chat 9.1"


def test_a_distribution_elsewhere_is_not_where_this_package_came_from(site: Path) -> None:
    install(site, "dspark-chat", files="dspark_mlx/__init__.py,,\n")
    assert distribution.installed_version() is None
    assert distribution.others() == []


def test_only_another_distribution_with_the_same_files_is_warned_of(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(site, "editable-of-an-older-name", files="_editable.pth,,\n")
    distribution.warn_of_others("dspark")
    assert capsys.readouterr().err == ""
    install(site, "dspark-mlx", files="dspark_mlx/__init__.py,sha256=x,1\n")
    distribution.warn_of_others("dspark")
    assert capsys.readouterr().err.startswith(
        "dspark: warning: dspark-mlx also installs dspark_mlx"
    )


@pytest.mark.parametrize("module", ["dspark_mlx", "tui"])
def test_both_commands_say_it_in_one_line(tmp_path: Path, module: str) -> None:
    install(tmp_path, "dspark-mlx", files="dspark_mlx/__init__.py,sha256=x,1\n")
    result = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert __version__ in result.stdout
    assert result.stderr.count("\n") == 1 and "pip uninstall dspark-mlx" in result.stderr
