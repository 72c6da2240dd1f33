"""The ``dspark`` command as a user meets it: help, mistakes, Ctrl+C, a closed pipe, models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_mlx import commands
from dspark_mlx.commands import COMMANDS, main, models
from dspark_mlx.errors import ModelError
from dspark_mlx.registry import DEFAULT_MODEL, Registry

ROOT = Path(__file__).parents[2]


def dspark(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dspark_mlx", *args],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def fails(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line on stderr of a command line that must end with exit code 2."""
    try:
        code = main(args)
    except SystemExit as end:
        code = end.code
    output = capsys.readouterr()
    assert code == 2
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert "Traceback" not in output.err
    return output.err


def test_help_names_every_command() -> None:
    result = dspark("--help")
    assert result.returncode == 0
    for name, help_ in COMMANDS.items():
        assert name in result.stdout and help_ in result.stdout
    assert dspark("--version").stdout.startswith("dspark ")


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert f"dspark {name}" in capsys.readouterr().out


def test_mistakes_are_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert "COMMAND" in fails(capsys)
    assert "invalid choice: 'mdoels'" in fails(capsys, "mdoels")
    assert "--no-such-flag" in fails(capsys, "models", "--no-such-flag")
    assert "see dspark models --help" in fails(capsys, "models", "--fetch")
    assert "no model named" in fails(capsys, "models", "--fetch", "no-such-model")
    assert "there is no folder" in fails(capsys, "models", "--fetch", "/no/such/folder")


def test_an_error_prints_its_message_and_hint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: object) -> int:
        raise ModelError("the model is broken", "fetch it again")

    monkeypatch.setattr(models, "run", run)
    assert fails(capsys, "models") == "dspark: error: the model is broken (fetch it again)\n"


def test_ctrl_c_ends_with_130_and_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "run", run)
    assert main(["models"]) == commands.EXIT_INTERRUPTED == 130
    assert capsys.readouterr().err.strip() == ""


def test_a_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run(
            [sys.executable, "-m", "dspark_mlx", "models", "--json"],
            cwd=ROOT,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    finally:
        os.close(writer)
    assert result.returncode == commands.EXIT_BROKEN_PIPE
    assert result.stderr == ""


def test_a_closed_standard_output_is_no_error() -> None:
    for command in (["models"], ["models", "--json"]):
        result = subprocess.run(
            [sys.executable, "-m", "dspark_mlx", *command],
            cwd=ROOT,
            preexec_fn=lambda: os.close(1),
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
        assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full here")
def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "dspark_mlx", "models"],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert result.returncode == 2
    assert result.stderr == "dspark: error: No space left on device\n"


def test_models_lists_what_is_here_and_what_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "usable_memory", lambda: 16_000_000_000)
    assert main(["models", "--json", "--cache-dir", str(tmp_path)]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) >= {DEFAULT_MODEL, "qwen3-4b", "qwen3-14b", "gemma4-12b"}
    assert all(row["target_path"] is None for row in rows.values())
    assert rows[DEFAULT_MODEL]["fits"] is True
    assert rows["qwen3-14b"]["fits"] is False
    assert rows["qwen3-14b"]["memory_bytes"] > 16_000_000_000

    assert main(["models", "--cache-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "NAME",
        "TARGET",
        "DRAFTER",
        "ON",
        "DISK",
        "MEMORY",
        "FITS",
        "TITLE",
    ]
    default = next(line for line in lines if line.startswith(f"{DEFAULT_MODEL}*"))
    assert "98 MB" in default and " yes " in default
    assert "16.0 GB" in lines[-1]


def test_fetch_prints_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    header = json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    size = len(header).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(size + header + b"\0")
    assert main(["models", "--fetch", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert main(["models", "--fetch", str(folder), "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    (folder / "model.safetensors").write_bytes(size + header)
    assert "cut short" in fails(capsys, "models", "--fetch", str(folder))


def test_a_wrong_user_file_is_said_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "dspark-mlx").mkdir()
    (tmp_path / "dspark-mlx" / "models.toml").write_text("[mine]\n")
    result = dspark("models", XDG_CONFIG_HOME=str(tmp_path), HOME=str(tmp_path))
    if sys.platform == "darwin":  # the file lives elsewhere there
        assert result.returncode == 0
    else:
        assert result.returncode == 2
        assert "line 1: [mine] has no target" in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.real_model
def test_the_default_model_is_fetched_once() -> None:
    result = dspark("models", "--fetch", DEFAULT_MODEL)
    assert result.returncode == 0, result.stderr
    folder = Path(result.stdout.splitlines()[0])
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == 49152
    assert dspark("models", "--fetch", DEFAULT_MODEL).stdout == result.stdout
    assert (
        Registry.load()[DEFAULT_MODEL].target_bytes == (folder / "model.safetensors").stat().st_size
    )
