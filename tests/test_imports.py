"""What importing costs and pulls in: the library stays light until it is used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"mlx", "mlx_lm", "numpy", "transformers", "huggingface_hub", "textual"}


def loaded_by(code: str) -> set[str]:
    """The top-level packages that are loaded after ``code`` ran in a fresh interpreter."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {name.partition(".")[0] for name in json.loads(result.stdout.splitlines()[-1])}


@pytest.mark.parametrize(
    "code",
    [
        "import dspark_mlx",
        "import dspark_mlx.request, dspark_mlx.errors, dspark_mlx.events",
        "from dspark_mlx import Request, SamplingParams, Cuts",
        "import dspark_mlx.registry",
        "import dspark_mlx.commands; dspark_mlx.commands.make_parser(None)",
        "import dspark_mlx.commands.models",
    ],
)
def test_importing_loads_nothing_heavy(code: str) -> None:
    assert loaded_by(code) & HEAVY == set()


def test_the_schedule_needs_no_mlx() -> None:
    assert loaded_by("import dspark_mlx.schedule") & (HEAVY - {"numpy"}) == set()


def test_every_public_name_resolves() -> None:
    code = "import dspark_mlx\nfor name in dspark_mlx.__all__: assert getattr(dspark_mlx, name)"
    packages = loaded_by(code)
    assert "mlx" in packages
    assert "textual" not in packages


def test_generate_is_the_function_whatever_was_imported_first() -> None:
    for first in ("import dspark_mlx.api.generate", "from dspark_mlx import load"):
        packages = loaded_by(
            f"{first}\nimport dspark_mlx\nfrom dspark_mlx import generate\n"
            "assert callable(generate) and callable(dspark_mlx.generate)"
        )
        assert "mlx_lm" in packages


def test_an_unknown_name_is_an_attribute_error() -> None:
    import dspark_mlx

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = dspark_mlx.nonsense
    assert set(dspark_mlx.__all__) <= set(dir(dspark_mlx))


def test_the_terminal_app_does_not_load_mlx_at_import() -> None:
    assert loaded_by("import tui.__main__") & {"mlx", "mlx_lm", "transformers"} == set()


def test_the_fast_blas_comes_before_mlx() -> None:
    code = (
        "import dspark_mlx, sys\n"
        "from dspark_mlx import blas\n"
        "first = blas.prefer_fast_blas()\n"
        "import mlx.core\n"
        "assert blas.prefer_fast_blas() == first\n"
        "assert first is None or (sys.platform == 'linux' and 'openblas' in first)"
    )
    assert "mlx" in loaded_by(code)


def test_blas_is_left_alone_once_mlx_is_loaded() -> None:
    code = (
        "import mlx.core, dspark_mlx\nfrom dspark_mlx import blas\n"
        "assert blas.prefer_fast_blas() is None"
    )
    assert "mlx" in loaded_by(code)
