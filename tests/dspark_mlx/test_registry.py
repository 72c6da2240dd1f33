"""The registry: its built-in pairs, the user's file, and what a user may write for a model."""

from __future__ import annotations

from pathlib import Path

import pytest

import dspark_mlx
from dspark_mlx.errors import ModelError, UsageError
from dspark_mlx.registry import DEFAULT_MODEL, ModelEntry, Registry
from dspark_mlx.sources import FolderSource, HubSource, PackageSource, WheelSource


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    empty = tmp_path / "models.toml"
    empty.write_text("")
    return Registry.load(empty)


def load(tmp_path: Path, text: str) -> Registry:
    path = tmp_path / "models.toml"
    path.write_text(text)
    return Registry.load(path)


def test_built_in_entries_are_complete(registry: Registry) -> None:
    pairs = {"qwen3-4b", "qwen3-8b", "qwen3-14b", "gemma4-12b"}
    dflash = {"qwen3-4b-dflash", "qwen3-8b-dflash", "gemma4-12b-dflash"}
    four = {f"{name}-4bit" for name in pairs}
    assert {DEFAULT_MODEL, *pairs, *four, *dflash} == set(registry)
    for entry in registry.values():
        assert entry.title and entry.license and entry.quantization
        assert entry.parameters > 0 and entry.target_bytes > 0 and entry.context > 0
        assert entry.target_source and entry.drafter_source
        assert entry.memory_bytes(float32=True) > entry.memory_bytes(float32=False)


def test_the_default_is_a_pinned_wheel_with_a_packaged_drafter(registry: Registry) -> None:
    entry = registry[DEFAULT_MODEL]
    assert isinstance(entry.target_source, WheelSource)
    assert entry.target_source.sha256 is not None
    assert isinstance(entry.drafter_source, PackageSource)
    shipped = Path(dspark_mlx.__file__).parent / "data" / "drafters" / DEFAULT_MODEL
    assert entry.drafter_bytes == (shipped / "model.safetensors").stat().st_size


def test_both_widths_of_a_target_share_a_drafter(registry: Registry) -> None:
    for name in ("qwen3-4b", "qwen3-8b", "qwen3-14b", "gemma4-12b"):
        eight, four = registry[name], registry[f"{name}-4bit"]
        assert eight.drafter == four.drafter
        assert eight.target != four.target
        assert four.target_bytes < eight.target_bytes


def test_a_name_a_hub_id_and_a_folder_resolve(registry: Registry, tmp_path: Path) -> None:
    assert registry.resolve("qwen3-8b") is registry["qwen3-8b"]
    for words in ("mlx-community/Qwen3-8B-8bit", "hf:mlx-community/Qwen3-8B-8bit"):
        assert registry.resolve(words) is registry["qwen3-8b"], "with its drafter"
    other = registry.resolve("org/name@v1")
    assert other.target_source == HubSource("org/name", "v1")
    assert other.drafter is None
    folder = registry.resolve(str(tmp_path))
    assert folder.name == tmp_path.name
    assert folder.target_source == FolderSource(tmp_path)


def test_a_folder_resolves_to_the_same_place_from_elsewhere(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    entries = [registry.resolve(words) for words in ("models/mine", "./models/mine")]
    monkeypatch.chdir(tmp_path / "models")
    entries.append(registry.resolve("mine"))
    assert {entry.target for entry in entries} == {str(tmp_path / "models" / "mine")}


def test_an_unknown_name_brings_close_ones(registry: Registry) -> None:
    with pytest.raises(UsageError, match=r"'qwen3-8' .*did you mean qwen3-8b"):
        registry.resolve("qwen3-8")
    with pytest.raises(UsageError, match="no model named 'zzz'"):
        registry.resolve("zzz")
    with pytest.raises(ModelError, match="there is no folder"):
        registry.resolve("./absent")


def test_the_users_file_adds_and_replaces(tmp_path: Path) -> None:
    registry = load(
        tmp_path,
        '[mine]\ntarget = "org/name"\n[qwen3-4b]\ntarget = "/models/q"\nthinking = true\n',
    )
    assert registry["mine"] == ModelEntry(name="mine", target="org/name")
    assert registry["qwen3-4b"].thinking is True
    assert registry["qwen3-4b"].drafter is None
    assert DEFAULT_MODEL in registry


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[mine\n", r"not valid TOML.*line 1"),
        (
            '[mine]\ntarget = "org/name"\n\ntaget = 1\n',
            r"line 4: \[mine\] has an unknown key taget",
        ),
        ('[mine]\ntarget = "org/name"\nzzz = 1\n', r"line 3: \[mine\] has an unknown key zzz \("),
        ("x = " + "[" * 100_000, "not valid TOML"),
        ('[mine]\ntarget = "org/é"\n', "is not a model source"),
        ("# x\n[mine]\ntarget = 3\n", r"line 3: \[mine\] target must be a text in quotes"),
        ('[a]\ntarget="o/n"\n[mine]\ntarget="o/n"\ncontext = "8k"', r"line 5: .*a whole number"),
        ('[mine]\ntarget="o/n"\nthinking = 1', r"line 3: .*true or false"),
        ('[mine]\ntarget="o/n"\nparameters = true', r"line 3: .*a whole number"),
        ('[mine]\ntarget="o/n"\ncontext = -1', r"line 3: .*must not be negative"),
        ('\n[mine]\ntitle = "x"\n', r"line 2: \[mine\] has no target"),
        ('[mine]\ntarget = "what"\n', r"line 2: \[mine\] target: 'what' is not a model source"),
        ('mine = "org/name"\n', r"line 1: mine is not a table"),
    ],
)
def test_a_wrong_user_file_is_named_with_line_and_key(
    tmp_path: Path, text: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        load(tmp_path, text)
    assert str(tmp_path / "models.toml") in str(caught.value)


def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        Registry.load(tmp_path / "absent.toml")
    (tmp_path / "models.toml").write_bytes(b"\xff\xfe[")
    with pytest.raises(UsageError, match="not valid TOML"):
        Registry.load(tmp_path / "models.toml")
