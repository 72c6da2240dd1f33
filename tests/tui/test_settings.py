from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_mlx.errors import UsageError
from tui.settings import OPTIONS, Preferences, Settings, SettingsFile, parse


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


@given(TEXT, st.dictionaries(TEXT, TEXT), st.floats(0, 1e9), st.integers(0, 2**64 - 1))
def test_any_value_survives_writing(system: str, keys: dict, temperature: float, seed: int) -> None:
    wanted = Settings(system=system, keys=keys, temperature=temperature, seed=seed)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "chat.toml"
        SettingsFile(path).save(wanted)
        assert SettingsFile(path).load() == wanted


def test_comments_of_a_person_survive_saving(tmp_path: Path) -> None:
    path = tmp_path / "chat.toml"
    path.write_text(
        "# my settings\ntop_k = 3  # not too many\n\n[keys]\n# as in the editor\n"
        '"chat.new" = "ctrl+b"\n'
    )
    file = SettingsFile(path)
    settings = file.load()
    file.save(dataclasses.replace(settings, top_k=4, top_p=0.5))
    text = path.read_text()
    for comment in ("# my settings", "# not too many", "# as in the editor"):
        assert comment in text
    again = SettingsFile(path).load()
    assert (again.top_k, again.top_p, again.keys) == (4, 0.5, {"chat.new": "ctrl+b"})


def test_every_option_has_a_type_that_can_be_read_and_words_that_explain_it() -> None:
    for name, option in OPTIONS.items():
        assert option.about.help
        assert parse(name, option.default) == option.default


def test_flags_are_for_this_run_and_changes_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "chat.toml"
    preferences = Preferences(SettingsFile(path), {"temperature": 0.9})
    preferences.change(top_k=5)
    assert (preferences.now.temperature, preferences.now.top_k) == (0.9, 5)
    kept = SettingsFile(path).load()
    assert (kept.temperature, kept.top_k) == (0.0, 5)
