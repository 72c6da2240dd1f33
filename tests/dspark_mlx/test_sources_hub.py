"""Hub downloads against a local server: whole or nothing, checked, and clear when they fail.

huggingface_hub reads its settings when it is imported, so every download runs
in a process of its own with HF_ENDPOINT pointing at the server.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hub_server import COMMIT, Hub, serve

ROOT = Path(__file__).parents[2]
REPO = "org/model"

FETCH = """
import json, sys, threading
from dspark_mlx import sources
from dspark_mlx.errors import DsparkError
from huggingface_hub import constants
constants.DOWNLOAD_CHUNK_SIZE = 4096  # the files here are as small as that
words, role, refresh, cancel_after = json.loads(sys.argv[1])
events, cancel = [], threading.Event()
def report(event):
    events.append([event.done, event.total])
    if cancel_after is not None and event.done >= cancel_after:
        cancel.set()
source = sources.parse(words)
try:
    path = sources.fetch(source, role=role, refresh=refresh, report=report, cancel=cancel)
    print(json.dumps({"path": str(path), "events": events}))
except DsparkError as error:
    found = sources.on_disk(source, role=role)
    print(json.dumps({"error": str(error), "kind": type(error).__name__, "found": str(found)}))
"""


@dataclass
class Machine:
    """A home folder and the server it can reach."""

    home: Path
    hub: Hub

    def fetch(
        self,
        words: str = f"hf:{REPO}",
        *,
        role: str = "target",
        refresh: bool = False,
        cancel_after: int | None = None,
        **env: str,
    ) -> dict[str, object]:
        result = subprocess.run(
            [sys.executable, "-c", FETCH, json.dumps([words, role, refresh, cancel_after])],
            cwd=ROOT,
            env={**self.env(), **env},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stderr
        assert "Traceback" not in result.stderr
        answer: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
        return answer

    def env(self) -> dict[str, str]:
        return {
            **{k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))},
            "HF_ENDPOINT": self.hub.url,
            "HF_HOME": str(self.home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "no_proxy": "127.0.0.1",
        }

    def error(self, words: str = f"hf:{REPO}", **options: object) -> str:
        answer = self.fetch(words, **options)  # type: ignore[arg-type]
        assert answer["found"] == "None"
        assert answer["kind"] == "DownloadError"
        assert "\n" not in str(answer["error"])
        return str(answer["error"])


def safetensors(size: int, fill: int = 7) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes([fill]) * size


def model_files() -> dict[str, bytes]:
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    return {
        "config.json": b"{}",
        "tokenizer.json": b'{"a": 1}',
        "model.safetensors.index.json": json.dumps(index).encode(),
        names[0]: safetensors(50_000, 1),
        names[1]: safetensors(60_000, 2),
        "modeling_evil.py": b"raise SystemExit",
        "pytorch_model.bin": b"x" * 100,
        "README.md": b"# hello",
    }


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with serve(Hub(files={REPO: model_files()})) as hub:
        yield Machine(tmp_path / "home", hub)


def test_a_snapshot_is_fetched_whole_and_then_used_without_the_network(machine: Machine) -> None:
    answer = machine.fetch()
    path = Path(str(answer["path"]))
    wanted = {name for name in model_files() if name.endswith((".json", ".safetensors"))}
    assert {p.name for p in path.iterdir()} == wanted, "code and pickles are not fetched"
    assert all((path / name).read_bytes() == model_files()[name] for name in wanted)
    total = sum(len(model_files()[name]) for name in wanted)
    assert answer["events"][-1] == [total, total]
    assert all(a[0] <= b[0] for a, b in zip(answer["events"], answer["events"][1:], strict=False))
    machine.hub.requests.clear()
    assert machine.fetch()["path"] == str(path)
    assert machine.fetch(HF_HUB_OFFLINE="1")["path"] == str(path)
    assert machine.hub.requests == []


def test_a_pinned_revision_is_used(machine: Machine) -> None:
    assert str(machine.fetch(f"hf:{REPO}@{COMMIT}")["path"]).endswith(COMMIT)
    assert "no revision v9" in machine.error(f"hf:{REPO}@v9")


def test_refresh_finds_a_newer_revision_and_keeps_what_is_the_same(machine: Machine) -> None:
    old = machine.fetch()["path"]
    machine.hub.commit = "d" * 40
    machine.hub.files[REPO]["config.json"] = b'{"new": true}'
    machine.hub.requests.clear()
    assert machine.fetch()["path"] == old
    new = Path(str(machine.fetch(refresh=True)["path"]))
    assert new.name == "d" * 40
    assert machine.hub.got("model-00001-of-00002.safetensors") == []
    assert machine.fetch()["path"] == str(new)


def test_a_broken_transfer_resumes_within_a_run(machine: Machine) -> None:
    machine.hub.break_after, machine.hub.breaks_left = 20_000, 1
    path = Path(str(machine.fetch()["path"]))
    name = "model-00001-of-00002.safetensors"
    assert machine.hub.got(name) == ["", "bytes=16384-"]  # the whole chunks before the break
    assert (path / name).read_bytes() == model_files()[name]


def test_a_cancelled_download_keeps_whole_files_and_nothing_else(machine: Machine) -> None:
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    answer = machine.fetch(cancel_after=70_000)  # in the middle of the second of the two
    assert answer["kind"] == "Cancelled"
    assert answer["found"] == "None"
    assert list(machine.home.rglob("*.incomplete")) == []
    machine.hub.requests.clear()
    path = Path(str(machine.fetch()["path"]))
    assert machine.hub.got(first) == []
    assert machine.hub.got(second) == [""]
    assert (path / second).read_bytes() == model_files()[second]


def test_a_partial_snapshot_is_never_taken_as_whole(machine: Machine) -> None:
    path = Path(str(machine.fetch()["path"]))
    shard = path / "model-00002-of-00002.safetensors"
    shard.resolve().unlink()
    shard.unlink()
    error = machine.error(HF_HUB_OFFLINE="1")
    assert "model-00002-of-00002.safetensors is missing" in error
    assert "HF_HUB_OFFLINE" in error
    assert machine.fetch()["path"] == str(path)
    assert shard.read_bytes() == model_files()[shard.name]


def test_a_repository_without_all_its_files_is_refused(machine: Machine) -> None:
    del machine.hub.files[REPO]["model-00002-of-00002.safetensors"]
    answer = machine.fetch()
    assert "model-00002-of-00002.safetensors is missing" in str(answer["error"])
    del (files := model_files())["tokenizer.json"]
    machine.hub.files["org/drafter"] = files
    assert "tokenizer" in str(machine.fetch("hf:org/drafter")["error"])
    assert "path" in machine.fetch("hf:org/drafter", role="drafter")


def test_bytes_that_do_not_match_the_sha256_are_discarded(machine: Machine) -> None:
    machine.hub.damaged = True
    assert "arrived damaged" in machine.error()
    assert list(machine.home.rglob("*.incomplete")) == []
    machine.hub.damaged = False
    assert "path" in machine.fetch()


def test_offline_makes_no_request(machine: Machine) -> None:
    error = machine.error(HF_HUB_OFFLINE="1")
    assert "nothing of it is here" in error
    assert machine.hub.requests == []


def test_each_refusal_says_what_to_do(machine: Machine) -> None:
    machine.hub.gated.add("org/gated")
    machine.hub.forbidden.add("org/closed")
    machine.hub.failing.add("org/broken")
    gated = machine.error("hf:org/gated")
    assert "gated" in gated and "https://huggingface.co/org/gated" in gated
    assert "hf auth login" in gated
    assert "no model org/absent" in machine.error("hf:org/absent")
    assert "hf auth login" in machine.error("hf:org/closed")
    assert "answered 500" in machine.error("hf:org/broken")


def test_no_network_is_one_clear_line(machine: Machine) -> None:
    error = machine.error(HF_ENDPOINT="http://127.0.0.1:9")
    assert "cannot be reached" in error and "try again" in error


def test_weights_of_other_kinds_only_are_refused_before_the_download(machine: Machine) -> None:
    machine.hub.files["org/other"] = {"config.json": b"{}", "model.gguf": b"x" * 5000}
    assert "has no safetensors weights" in machine.error("hf:org/other")
    assert machine.hub.got("config.json") == []


def test_ctrl_c_in_the_middle_of_a_file_is_quiet_and_leaves_no_part_of_it(
    machine: Machine,
) -> None:
    machine.hub.files[REPO] = {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "model.safetensors": safetensors(24_000_000),
    }
    machine.hub.break_after = 22_000_000  # two of huggingface_hub's chunks and a piece
    machine.hub.stalled = threading.Event()
    process = subprocess.Popen(
        [sys.executable, "-m", "dspark_mlx", "models", "--fetch", REPO],
        cwd=ROOT,
        env=machine.env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert machine.hub.stalled.wait(60)
    partial = lambda: sum(p.stat().st_size for p in machine.home.rglob("*.incomplete"))  # noqa: E731
    while partial() < 10_000_000:
        assert process.poll() is None
        threading.Event().wait(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stdout == "" and stderr.strip() == ""
    assert partial() == 0
    machine.hub.stalled = None
    path = Path(str(machine.fetch()["path"]))
    assert (path / "model.safetensors").read_bytes() == safetensors(24_000_000)


@pytest.mark.parametrize("damage", [b"", b"x" * 1000, b"\0" * 60_000])
def test_what_was_damaged_later_is_fetched_again(machine: Machine, damage: bytes) -> None:
    """Its content too: the snapshot's file is only a link to it."""
    path = Path(str(machine.fetch()["path"]))
    name = "model-00002-of-00002.safetensors"
    (path / name).resolve().write_bytes(damage)
    assert machine.fetch()["path"] == str(path)
    assert (path / name).read_bytes() == model_files()[name]
