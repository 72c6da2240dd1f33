"""The command line: one printed answer without a full screen, and bad input in one line."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from make_trace import TEXTS, make, pieces
from scripted import ScriptedEngine, finished

from dspark_mlx.errors import DsparkError
from dspark_mlx.events import Failed, to_json
from tui.__main__ import main, make_parser, pinned
from tui.engine_client import EngineClient
from tui.once import answer
from tui.settings import Settings

ROOT = Path(__file__).parents[2]


def chat(*args: Any, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tui", *map(str, args)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(to_json(event) + "\n" for event in make(1, 60)))
    return path


def test_piped_text_is_answered_without_a_full_screen(trace: Path) -> None:
    done = chat("--replay", trace, "--speed", "inf", stdin="What is it?\n")
    expected = "".join(pieces(TEXTS[0] * 2)[:60])
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.rstrip("\n") == expected.rstrip("\n")
    assert "\x1b" not in done.stdout


def test_a_prompt_with_once_is_answered_too(trace: Path) -> None:
    done = chat("--once", "--replay", trace, "--speed", "inf", "What", "is", "it?")
    assert done.returncode == 0 and done.stdout.startswith("Here is a **short answer**.")


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--temp", "hot"], "--temp"),
        (["--temp", "-1"], "--temp"),
        (["--top-p", "0"], "--top-p"),
        (["--method", "magic"], "--method"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--kv-bits", "5"], "--kv-bits"),
        (["--speed", "0"], "--speed"),
        (["--speed", "fast"], "--speed"),
        (["--speed", "2"], "--replay FILE"),
        (["--replay", "x", "--trace", "x"], "--trace records an engine"),
        (["--replay", "."], "a folder, not a trace"),
        (["--theme", "sepia"], "--theme: theme must be one of"),
        (["--nonsense"], "--nonsense"),
        (["--replay", "/no/such/file"], "there is no trace /no/such/file"),
        (["--trace", "/no/such/folder/x"], "/no/such/folder/x"),
        (["--once"], "nothing to answer"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    args: list[str], word: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("" if "--once" in args else "hi"))
    try:
        code = main(args)
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and word in err and err.startswith("dspark-chat: error:")


def test_input_that_is_not_text_is_refused(trace: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tui", "--replay", str(trace)],
        input=b"\xff\xfe\xfa", capture_output=True, timeout=120, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 2 and b"not text" in done.stderr and done.stderr.count(b"\n") == 1


def test_version_and_help_are_quick_and_load_no_screen() -> None:
    code = (
        "import sys\nfrom tui.__main__ import main\n"
        "try:\n    main(['--version'])\nexcept SystemExit as e: assert not e.code\n"
        "assert 'textual' not in sys.modules and 'mlx' not in sys.modules, 'heavy'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("dspark-chat ")
    assert "--replay" in make_parser().format_help()


def test_the_whole_chat_is_imported_without_mlx() -> None:
    code = (
        "import sys, importlib, pkgutil, tui\n"
        "for m in pkgutil.walk_packages(tui.__path__, 'tui.'):\n"
        "    if not m.name.endswith('__main__'): importlib.import_module(m.name)\n"
        "assert 'mlx' not in sys.modules and 'mlx.core' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_first_paint_waits_for_nothing_heavy() -> None:
    code = (
        "import sys\nimport tui.app\n"
        "heavy = [m for m in ('mlx', 'numpy', 'pygments', 'markdown_it', 'psutil',"
        " 'huggingface_hub', 'httpx') if m in sys.modules]\nassert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_flags_become_settings() -> None:
    args = make_parser().parse_args(
        [
            "--temp",
            "0.5",
            "--top-k",
            "3",
            "--seed",
            "9",
            "--model",
            "m",
            "--thinking",
            "on",
            "--draft-length",
            "2",
            "hi",
        ]
    )
    assert pinned(args) == {
        "temperature": 0.5, "top_k": 3, "seed": 9, "model": "m", "thinking": "on",
        "draft_length": 2,
    }  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_codes_are_taken_out_for_a_terminal_only() -> None:
    for out, expected in ((Terminal(), "red x\n"), (io.StringIO(), "\x1b[31mred x\n")):
        engine = ScriptedEngine(["\x1b[31mred x"])
        assert answer(EngineClient(engine), "hi", Settings(), out) == 0
        assert out.getvalue() == expected
        assert engine.closed


def test_a_failure_while_answering_is_one_error_with_what_to_do() -> None:
    class Failing(ScriptedEngine):
        def load(self, model: str, **options: Any) -> None:
            self.emit(Failed("no network", "connect and try again"))

    engine = Failing()
    with pytest.raises(DsparkError, match=r"no network \(connect and try again\)"):
        answer(EngineClient(engine), "hi", Settings(), io.StringIO())
    assert engine.closed

    class Refusing(ScriptedEngine):
        def submit(self, request) -> None:
            self.emit(finished(request.id, "error", message="out of memory", hint="close some"))

    with pytest.raises(DsparkError, match=r"out of memory \(close some\)"):
        answer(EngineClient(Refusing()), "hi", Settings(), io.StringIO())


def test_settings_and_system_prompt_reach_the_request() -> None:
    engine = ScriptedEngine(["ok"])
    answer(EngineClient(engine), "hi", Settings(system="S", temperature=0.5), io.StringIO())
    (request,) = engine.requests
    assert [m["role"] for m in request.messages] == ["system", "user"]
    assert request.sampling.temperature == 0.5
