from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_mlx.errors import UsageError
from tui.settings import Settings, SettingsFile, _toml, parse


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    wanted = Settings(
        model="hf:a/b", system='say "hi"\n\\ \x7f 你', temperature=0.5, seed=7, draft_length=0,
        live_panel=False, keys={"chat.new": "ctrl+b"}, top_k=40, thinking="on",
    )  # fmt: skip
    path = tmp_path / "deep" / "chat.toml"
    SettingsFile(path).save(wanted)
    assert SettingsFile(path).load() == wanted
    assert list(path.parent.glob(".*")) == [], "no temporary file stays"


def test_only_changes_are_written_and_unknown_keys_stay(tmp_path: Path) -> None:
    path = tmp_path / "chat.toml"
    path.write_text('future = [1, 2]\ntop_k = 3\n[more]\nx = "y"\n')
    file = SettingsFile(path)
    settings = file.load()
    assert settings.top_k == 3 and file.problems == []
    file.save(dataclasses.replace(settings, top_p=0.9))
    assert tomllib.loads(path.read_text()) == {
        "future": [1, 2], "top_k": 3, "top_p": 0.9, "more": {"x": "y"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("temperature = -1", "temperature"),
        ('temperature = "hot"', "temperature"),
        ("top_p = 0", "top-p"),
        ("top_k = 1.5", "top_k"),
        ('method = "magic"', "method"),
        ("max_tokens = 0", "max_tokens"),
        ("kv_bits = 3", "kv_bits"),
        ("live_panel = 1", "live_panel"),
        ("seed = true", "seed"),
        ("keys = 3", "keys"),
    ],
)
def test_a_wrong_value_is_named_and_the_rest_is_used(tmp_path: Path, line: str, word: str) -> None:
    path = tmp_path / "chat.toml"
    path.write_text(f"{line}\nmin_p = 0.25\n")
    file = SettingsFile(path)
    assert file.load() == Settings(min_p=0.25)
    assert len(file.problems) == 1 and word in file.problems[0]


def test_a_broken_file_never_stops_the_chat_and_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "chat.toml"
    path.write_text("temperature = = 3")
    file = SettingsFile(path)
    assert file.load() == Settings() and len(file.problems) == 1
    file.save(Settings(top_k=2))
    assert SettingsFile(path).load().top_k == 2
    assert "= = 3" in path.with_suffix(".broken.toml").read_text()


def test_form_texts_are_understood() -> None:
    assert parse("seed", "") is None and parse("seed", " 12 ") == 12
    assert parse("temperature", "0.7") == 0.7
    with pytest.raises(UsageError, match="whole number"):
        parse("top_k", "many")
    with pytest.raises(UsageError, match="no such setting"):
        parse("colour", "red")


TEXT = st.text(alphabet=st.characters(codec="utf-8"))


@given(
    st.dictionaries(
        TEXT,
        st.one_of(TEXT, st.booleans(), st.integers(-(2**60), 2**60),
                  st.floats(allow_nan=False, allow_infinity=False),
                  st.lists(st.integers(0, 9)), st.dictionaries(TEXT, TEXT)),
    )
)  # fmt: skip
def test_any_table_survives_writing(table: dict) -> None:
    assert tomllib.loads(_toml(table)) == table
