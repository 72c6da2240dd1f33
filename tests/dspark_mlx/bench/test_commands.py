"""``dspark profile`` and ``dspark bench`` as a user meets them, on a toy model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from folders import write_drafter, write_model

from dspark_mlx.bench.comparison import Benchmark
from dspark_mlx.bench.results import Fork, Results
from dspark_mlx.commands import main
from dspark_mlx.schedule.cost import CostModel


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return str(write_model(folder / "toy")), str(write_drafter(folder / "toy-drafter"))


@pytest.fixture
def model(folders: tuple[str, str], tmp_path: Path) -> list[str]:
    target, drafter = folders
    return ["--model", target, "--drafter", drafter, "--cache-dir", str(tmp_path / "cache")]


def fails(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    try:
        code = main(args)
    except SystemExit as end:
        code = end.code
    output = capsys.readouterr()
    assert code == 2 and output.out == "" and output.err.count("\n") == 1
    return output.err


def test_profile_prints_stores_and_draws(model, tmp_path: Path, capsys) -> None:
    svg = tmp_path / "cost.svg"
    assert main(["profile", *model, "--budget", "0.3", "--max-rows", "2", "--svg", str(svg)]) == 0
    words = capsys.readouterr().out
    assert "target step, ms" in words and "dspark draft, ms" in words and "lookup draft" in words
    ElementTree.fromstring(svg.read_text())
    [stored] = (tmp_path / "cache" / "profiles").glob("*.json")
    assert str(stored) in words
    before = stored.stat().st_mtime_ns
    assert main(["profile", *model, "--max-rows", "2", "--json"]) == 0
    cost = CostModel.from_json(capsys.readouterr().out)
    assert cost.known and "toy" in cost.key.model
    assert stored.stat().st_mtime_ns == before  # not measured again


def test_profile_refuses_what_makes_no_sense(model, capsys) -> None:
    assert "--budget" in fails(capsys, "profile", *model, "--budget", "0")
    assert "--max-rows" in fails(capsys, "profile", *model, "--max-rows", "0")


def test_bench_compares_checks_and_writes(model, tmp_path: Path, capsys) -> None:
    out, svg = tmp_path / "b.json", tmp_path / "b.svg"
    code = main(
        ["bench", *model, "--limit", "1", "--tokens", "6", "--schedules", "fixed:2",
         "--concurrency", "1,2", "--json", str(out), "--svg", str(svg)]
    )  # fmt: skip
    words = capsys.readouterr().out
    assert code == 0
    assert "lossless: yes" in words and "dspark fixed:2" in words and "2 requests" in words
    data = json.loads(out.read_text())
    assert data["lossless"] and data["about"]["tokens"] == 6
    assert {cell["name"]["system"] for cell in data["cells"]} == {
        "mlx-lm", "none", "dspark fixed:2", "lookup fixed:2"
    }  # fmt: skip
    ElementTree.fromstring(svg.read_text())


def test_an_absent_peer_is_named_in_the_report(model, capsys, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    args = ["--limit", "1", "--tokens", "2", "--methods", "none", "--against", "mlx-dspark"]
    assert main(["bench", *model, *args]) == 0
    assert "not compared: mlx-dspark is not installed here" in capsys.readouterr().out


def test_a_text_that_is_not_the_models_own_ends_with_code_1(model, capsys, monkeypatch) -> None:
    def compare(self, *args, **options) -> Results:
        fork = Fork("dspark auto", "hello", 3, 1.5, False)
        return Results({"model": "toy"}, "mlx-lm", forks=[fork], compared=2)

    monkeypatch.setattr(Benchmark, "compare", compare)
    assert main(["bench", *model, "--limit", "1"]) == 1
    assert "lossless: NO" in capsys.readouterr().out


def test_bench_under_load(model, tmp_path: Path, capsys) -> None:
    out, svg = tmp_path / "l.json", tmp_path / "l.svg"
    args = ["--load", "cpu:1", "--load-rounds", "6", "--tokens", "8", "--limit", "1"]
    args += ["--methods", "dspark", "--schedules", "fixed", "--json", str(out), "--svg", str(svg)]
    assert main(["bench", *model, *args]) == 0
    assert "response of dspark fixed to cpu:1" in capsys.readouterr().out
    assert len(json.loads(out.read_text())["response"]["points"]) == 18
    ElementTree.fromstring(svg.read_text())


def test_simulation_needs_no_model(tmp_path: Path, capsys) -> None:
    out, svg = tmp_path / "s.json", tmp_path / "s.svg"
    args = ["--simulate", "flat", "code", "--schedules", "fixed", "--json", str(out)]
    assert main(["bench", *args, "--svg", str(svg)]) == 0
    assert "of the best fixed length" in capsys.readouterr().out
    assert json.loads(out.read_text())[0]["table"] == "flat"
    ElementTree.fromstring(svg.read_text())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--methods", "nonsense"], "no method named"),
        (["--schedules", "nonsense"], "no schedule named"),
        (["--concurrency", "0"], "1 or more"),
        (["--temps", "-1"], "from 0 to 100"),
        (["--load", "disk"], "no load"),
        (["--against", "vllm"], "no peer named"),
        (["--prompts", "/no/such/file"], "cannot read the prompts"),
        (["--tokens", "0"], "1 or more"),
        (["--methods", "none", "--load", "cpu:1", "--limit", "1"], "no draft"),
        (["--simulate", "/no/such", "code"], "cannot read the cost table"),
        (["--simulate", "flat", "/no/such"], "cannot read the trace"),
        (["--simulate", "flat", "code", "--load", "cpu:1"], "no use of --load"),
        (["--simulate", "flat", "code", "--methods", "none"], "no use of --methods"),
        (["--simulate", "flat", "code", "--schedules", "auto,auto"], "twice"),
        (["--load", "cpu:1", "--against", "mlx-lm"], "no use of --against"),
        (["--load", "cpu:1", "--schedules", "auto,off"], "one schedule"),
        (["--concurrency", "x"], "'x' is not a whole number"),
        (["--temps", "warm"], "'warm' is not a list"),
        (["--json", "/no/such/folder/x.json"], "no folder /no/such/folder"),
        (["--svg", "/"], "it is a folder"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(model, args, words: str, capsys) -> None:
    assert words in fails(capsys, "bench", *model, *args)
