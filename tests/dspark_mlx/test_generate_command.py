"""``dspark generate`` as a user runs it: output, errors, interruption, trace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from folders import write_drafter, write_model

from dspark_mlx.commands import main
from dspark_mlx.events import Finished, Loaded, StepDone
from dspark_mlx.trace import read_trace

# without a profile: a toy's would stay in the user's cache
COMMAND = [sys.executable, "-m", "dspark_mlx", "generate", "--no-profile"]
FIELDS = [
    "text",
    "tokens",
    "finish_reason",
    "prompt_tokens",
    "reused_tokens",
    "generation_tokens",
    "prompt_tps",
    "generation_tps",
    "peak_memory_gb",
    "method",
    "rounds",
    "drafted",
    "scheduled",
    "accepted",
    "accepted_length",
    "acceptance_by_position",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("drafter"))


def run_json(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, object]:
    code = main(
        [
            "generate",
            "--no-profile",
            "--json",
            "--prompt",
            "hello there",
            "--max-tokens",
            "30",
            *flags,
        ]
    )
    out, _ = capsys.readouterr()
    assert code == 0
    report: dict[str, object] = json.loads(out)
    return report


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line a command was refused with."""
    try:
        code = main(["generate", "--no-profile", *flags])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    return err


def test_json_has_every_field_and_the_counts_agree(
    model: Path, drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_json(capsys, "--model", str(model), "--drafter", str(drafter))
    assert [f for f in FIELDS if f not in report] == []
    assert report["method"] == "dspark"
    tokens = report["tokens"]
    assert isinstance(tokens, list)
    assert len(tokens) == report["generation_tokens"] <= 30
    assert report["accepted_length"] == round(len(tokens) / int(str(report["rounds"])), 3)


@pytest.mark.parametrize("method", ["auto", "dspark", "lookup", "none"])
def test_every_method_writes_the_same_greedy_text(
    model: Path, drafter: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    flags = ["--model", str(model), "--drafter", str(drafter)]
    plain = run_json(capsys, "--model", str(model), "--method", "none")
    ours = run_json(capsys, *flags, "--method", method)
    assert ours["tokens"] == plain["tokens"]


@pytest.mark.parametrize(
    "flags",
    [("--draft-length", "1"), ("--p-min", "0.5"), ("--p-survival-min", "0.3"), ("--kv-bits", "8")],
)
def test_cuts_change_no_text(
    model: Path, drafter: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    plain_flags = flags if flags[0] == "--kv-bits" else ()
    plain = run_json(capsys, "--model", str(model), "--method", "none", *plain_flags)
    cut = run_json(capsys, "--model", str(model), "--drafter", str(drafter), *flags)
    assert cut["text"] == plain["text"]
    if flags[0] == "--draft-length":
        assert int(str(cut["scheduled"])) <= int(str(cut["rounds"]))


def test_a_seed_repeats_a_sampled_reply(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", str(model), "--temp", "0.9", "--top-p", "0.95", "--seed", "5"]
    first, second = run_json(capsys, *flags), run_json(capsys, *flags, "--method", "none")
    assert first["tokens"] == second["tokens"]
    assert first["seed"] == 5


def test_auto_without_a_drafter_says_why(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        ["generate", "--no-profile", "--model", str(model), "-p", "hi", "-m", "4", "--verbose"]
    )
    _, err = capsys.readouterr()
    assert code == 0
    assert "lookup (no drafter is known for" in err


def test_text_on_the_terminal_is_the_text_of_json(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_json(capsys, "--model", str(model))
    main(
        [
            "generate",
            "--no-profile",
            "--model",
            str(model),
            "--prompt",
            "hello there",
            "--max-tokens",
            "30",
        ]
    )
    out, _ = capsys.readouterr()
    assert out == f"{report['text']}\n"


def test_a_trace_holds_every_round(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    report = run_json(capsys, "--model", str(model), "--trace", str(path))
    events = list(read_trace(path))
    assert isinstance(events[0], Loaded)
    assert isinstance(events[-1], Finished)
    steps = [e for e in events if isinstance(e, StepDone)]
    assert [t.id for s in steps for t in s.rows[0].tokens] == report["tokens"]


def test_the_prompt_may_come_from_standard_input(model: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--model", str(model), "--prompt", "-", "-m", "4", "--json"],
        input="hello there",
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["generation_tokens"] == 4


def test_a_terminal_without_utf_8_gets_escapes(tmp_path: Path) -> None:
    accented = write_model(tmp_path / "accented")
    tokens = json.loads((accented / "tokenizer.json").read_text())
    vocab = tokens["model"]["vocab"]
    for number, letter in enumerate("abcdefghij"):  # now á, â, ã ... as byte-level BPE spells them
        vocab["Ã" + chr(0xA1 + number)] = vocab.pop(letter)
    (accented / "tokenizer.json").write_text(json.dumps(tokens))
    command = [*COMMAND, "--model", str(accented), "--prompt", "HI", "-m", "40", "--temp", "50"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    plain = subprocess.run([*command, "--seed", "1"], env=env, capture_output=True, check=True)
    assert plain.stdout.isascii() and b"\\xe" in plain.stdout
    as_json = subprocess.run(
        [*command, "--seed", "1", "--json"], env=env, capture_output=True, check=True
    )
    assert not json.loads(as_json.stdout)["text"].isascii()


class TestBadInput:
    @pytest.mark.parametrize(("data", "why"), [(b"\xff\xfe", "not text"), (None, "closed")])
    def test_standard_input_without_text(self, data: bytes | None, why: str) -> None:
        done = subprocess.run(
            [*COMMAND, "--prompt", "-"],
            input=data,
            preexec_fn=None if data else lambda: os.close(0),
            capture_output=True,
        )
        assert done.returncode == 2
        assert why in done.stderr.decode() and done.stderr.count(b"\n") == 1

    def test_a_prompt_that_is_not_utf_8(
        self, model: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert "UTF-8" in refused(capsys, "-p", "a\udcff", "--model", str(model))

    def test_a_model_that_is_not_there(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "no folder" in refused(capsys, "-p", "x", "--model", "/nowhere/at/all")
        assert "smollm2-135m" in refused(capsys, "-p", "x", "--model", "smolm2-135m")

    def test_an_empty_prompt(self, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "empty" in refused(capsys, "-p", " ", "--model", str(model))

    @pytest.mark.parametrize(
        "flags",
        [
            ("--method", "none", "--schedule", "early-stop"),
            ("--method", "none", "--draft-length", "3"),
            ("--schedule", "off", "--p-min", "0.5"),
        ],
    )
    def test_flags_that_contradict_each_other(
        self, flags: tuple[str, ...], model: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert "drafts nothing" in refused(capsys, "-p", "x", "--model", str(model), *flags)

    def test_dspark_without_a_drafter(
        self, model: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        line = refused(capsys, "-p", "x", "--model", str(model), "--method", "dspark")
        assert "drafter" in line

    def test_a_drafter_for_another_target(
        self, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        other = write_drafter(tmp_path / "other")
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps({**config, "num_target_layers": 6}))
        line = refused(capsys, "-p", "x", "--model", str(model), "--drafter", str(other))
        assert "6 layers" in line

    def test_weights_that_are_cut_short(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        cut = write_model(tmp_path / "cut")
        weights = cut / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-2000])
        assert "model.safetensors" in refused(capsys, "-p", "x", "--model", str(cut))

    def test_code_in_a_folder_is_never_run(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not even when someone answers yes: nobody is asked."""
        folder, trace = write_model(tmp_path / "evil"), tmp_path / "ran"
        (folder / "evil.py").write_text(f"open({str(trace)!r}, 'w')\nclass Tok: pass\n")
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config |= {"tokenizer_class": "Tok", "auto_map": {"AutoTokenizer": ["evil.Tok"] * 2}}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        monkeypatch.setattr("builtins.input", lambda *a: pytest.fail("it asks"))
        line = refused(capsys, "-p", "x", "--model", str(folder))
        assert "custom code" in line and not trace.exists()

    def test_files_nested_without_end(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name in ("config.json", "generation_config.json", "model.safetensors.index.json"):
            folder = write_model(tmp_path / name)
            (folder / name).write_text("[" * 100_000)
            assert f"{name} is damaged" in refused(capsys, "-p", "x", "--model", str(folder))

    def test_values_no_layer_can_use(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = write_model(tmp_path / "odd")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "rope_theta": "x"}))
        assert "cannot" in refused(capsys, "-p", "x", "--model", str(folder))

    def test_a_damaged_generation_config(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = write_model(tmp_path / "damaged")
        (folder / "generation_config.json").write_text('{"eos_token_id": [2')
        line = refused(capsys, "-p", "x", "--model", str(folder))
        assert "generation_config.json is damaged" in line

    def test_an_unknown_architecture(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        odd = write_model(tmp_path / "odd", model_type="no_such_model")
        assert "no_such_model" in refused(capsys, "-p", "x", "--model", str(odd))
        (odd / "config.json").write_text("{}")
        assert "'model_type' is missing" in refused(capsys, "-p", "x", "--model", str(odd))

    def test_a_prompt_longer_than_the_context(
        self, model: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        line = refused(capsys, "-p", "x" * 200, "--model", str(model), "--context", "64")
        assert "context is 64" in line

    @pytest.mark.real_model
    def test_transformers_own_warning_is_not_heard(self) -> None:
        done = subprocess.run(
            [*COMMAND, "--prompt", "-"], input=b"ten " * 9000, capture_output=True, check=False
        )
        assert done.returncode == 2
        assert b"context is 8192" in done.stderr and done.stderr.count(b"\n") == 1

    @pytest.mark.parametrize(
        "flags",
        [
            ("--temp", "-1"),
            ("--top-p", "0"),
            ("--max-tokens", "0"),
            ("--draft-length", "-2"),
            ("--p-min", "1.5"),
            ("--kv-bits", "3"),
            ("--method", "magic"),
            ("--seed", "-4"),
            ("--trace", "/nowhere/at/all/run.jsonl"),
        ],
    )
    def test_flags_out_of_range(
        self, model: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, str]
    ) -> None:
        refused(capsys, "-p", "x", "--model", str(model), *flags)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.4, 1.4, None])
def test_ctrl_c_at_any_time_leaves_no_traceback(
    model: Path, tmp_path: Path, delay: float | None
) -> None:
    """During imports, loading and decoding alike; None waits for the first text.

    The delay counts from where the command itself begins: what Python prints
    when it is interrupted while it starts is its own.
    """
    err = tmp_path / "stderr"
    flags = ("--model", str(model), "-p", "hello", "-m", "-1", "--ignore-eos")
    with err.open("wb") as stderr:
        process = subprocess.Popen(
            [COMMAND[0], "-X", "importtime", *COMMAND[1:], *flags],
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
    while b"dspark_mlx.commands.output\n" not in err.read_bytes():
        assert process.poll() is None, err.read_text()
        time.sleep(0.005)
    if delay is None:
        assert process.stdout is not None
        assert process.stdout.read(1)
    else:
        time.sleep(delay)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT)
    assert b"Traceback" not in err.read_bytes()
