"""Traces: one event a line, written as it happens, read back whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from decoding import dspark, make_engine, plain_text, request, run, toy_target
from toys import prompt

from dspark_mlx.errors import UsageError
from dspark_mlx.events import Notice, Prefill
from dspark_mlx.trace import TraceWriter, read_trace


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    own = plain_text("llama", tuple(prompt(12)), 24)
    engine = make_engine(toy_target("llama"), [dspark(toy_target("llama"), lessons=[own])])
    seen = []
    with TraceWriter(path) as writer:

        def watch(engine: object, events: list) -> None:  # type: ignore[type-arg]
            writer.write(events)
            seen.extend(events)
            # each line is whole as soon as it is written
            assert len(path.read_text().splitlines()) == len(seen)

        run(engine, request("a"), request("b", seed=1), each=watch)
    assert list(read_trace(path)) == seen


def test_text_of_every_kind_stays_on_its_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    events = [
        Notice(text)
        for text in (
            "two\nlines\r\n",
            "\u2028\u2029\x85\x0b\x0c",
            "日本語 👩🏽‍🚀",
            "[b]",
            "\ufffd\x00",
        )
    ]
    with TraceWriter(path) as writer:
        writer.write(events)
    assert list(read_trace(path)) == events


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with TraceWriter(path) as writer:
        writer.write([Prefill("a", 1, 3, 0), Prefill("a", 3, 3, 0)])
    whole = path.read_bytes()
    for cut in range(1, len(whole.splitlines()[1])):
        path.write_bytes(whole[:-cut])
        found = list(read_trace(path))
        assert found in ([Prefill("a", 1, 3, 0)], [Prefill("a", 1, 3, 0), Prefill("a", 3, 3, 0)])


def test_a_cut_inside_a_character_is_a_cut_too(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with TraceWriter(path) as writer:
        writer.write([Notice("first"), Notice("日本語")])
    data = path.read_bytes()
    path.write_bytes(data[: data.index("語".encode()) + 1])
    assert list(read_trace(path)) == [Notice("first")]


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with TraceWriter(path) as writer:
        writer.write([Notice("first")])
    path.write_text(path.read_text() + "\n\nnot an event\n" + path.read_text())
    with pytest.raises(UsageError, match=r"run.jsonl, line 4: "):
        list(read_trace(path))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full here")
def test_a_full_disk_is_named_once() -> None:
    with pytest.raises(OSError, match="/dev/full"), TraceWriter("/dev/full") as trace:
        trace.write([Notice("x" * 100)])
    with pytest.raises(OSError, match="/dev/full"):
        TraceWriter("/dev/full").write([Notice("x" * 100_000)])


def test_places_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write the trace"):
        TraceWriter(tmp_path / "no" / "folder" / "run.jsonl")
    with pytest.raises(UsageError, match="cannot write the trace"):
        TraceWriter(tmp_path)
    with pytest.raises(UsageError, match="cannot read the trace"):
        list(read_trace(tmp_path / "nothing.jsonl"))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00\n" * 3)
    with pytest.raises(UsageError):
        list(read_trace(binary))
    empty = tmp_path / "empty"
    empty.touch()
    assert list(read_trace(empty)) == []
