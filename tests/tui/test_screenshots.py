from __future__ import annotations

from pathlib import Path

import pytest
from make_trace import make

from dspark_mlx.events import to_json
from tui import screenshots


def test_pictures_are_made_from_a_recording_by_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screenshots, "SHOTS", screenshots.SHOTS[:1])
    trace = tmp_path / "run.jsonl"
    trace.write_text("".join(to_json(event) + "\n" for event in make(1, 120)))
    assert screenshots.main([str(trace), str(tmp_path / "out"), "--prompt", "Why [so]?"]) == 0
    picture = (tmp_path / "out" / "chat.svg").read_text()
    for part in ("[so]?", "tokens/s", "draft", "kept"):
        assert part in picture.replace("&#160;", " ")
    assert screenshots.main([str(tmp_path / "none"), str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
