"""Peers run in their own process, by their public functions; an absent one is named."""

from __future__ import annotations

import json
from dataclasses import asdict
from io import StringIO
from pathlib import Path

import pytest
from folders import write_model

from dspark_mlx.bench.competing_load import import_environment
from dspark_mlx.bench.peers import (
    PeerError,
    PeerSetup,
    PeerSystem,
    check_peer_names,
    serve,
    start_peers,
)
from dspark_mlx.errors import UsageError

STAND_IN = '''
"""The public functions of mlx-dspark that the benchmark uses, answering by arithmetic."""
import sys
from dataclasses import dataclass

__version__ = "0.0.1"
print("a peer that talks while it is imported")


@dataclass
class Result:
    token_ids: list
    num_rounds: int = 3
    seconds: float = 2.0
    prefill_seconds: float = 0.5
    ttft_seconds: float = 0.6


class Target:
    model = None


def load_target(folder, *, require_tap=False):
    if folder == "broken":
        raise ValueError("no such folder\\nand a second line")
    return Target(), ("tokenizer", require_tap)


def load_drafter(folder, *, quantize=True):
    return "drafter of " + folder, {}


def _write(start, prompt_ids, max_new_tokens, temperature):
    print("a peer that talks while it works")
    if prompt_ids == [13]:
        sys.exit("it fell over")
    if prompt_ids == [14]:
        raise RuntimeError("no memory")
    return Result([start + t for t in prompt_ids][:max_new_tokens])


def greedy_generate(target, tokenizer, prompt="", **options):
    return _write(100, **options)


def speculative_generate(target, tokenizer, drafter, prompt="", **options):
    assert drafter == "drafter of d" and tokenizer[1]
    return _write(200, **options)


def lookup_generate(target, tokenizer, prompt="", **options):
    return _write(300, **options)
'''


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mlx_dspark.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_a_stand_in_peer_answers_in_every_mode(stand_in: Path) -> None:
    with start_peers(["mlx-dspark"], PeerSetup("f", drafter="d")) as ([peer], absent):
        assert absent == [] and peer.modes == ["plain", "speculative"]
        plain, speculative = (PeerSystem(peer, mode) for mode in peer.modes)
        assert plain.name == "mlx-dspark 0.0.1 plain"
        run = plain.run([[1, 2, 3], [4]], 2, 0.0, 0)
        assert run.tokens == ((101, 102), (104,))
        assert run.seconds == 3.0 and run.first_token_seconds == (0.6, 0.6) and run.row_rounds == 0
        run = speculative.run([[1, 2, 3]], 8, 0.0, 0)
        assert run.tokens == ((201, 202, 203),) and run.row_rounds == 3
    assert peer._process.poll() is not None


def test_without_a_drafter_its_speculation_is_prompt_lookup(stand_in: Path) -> None:
    with start_peers(["mlx-dspark"], PeerSetup("f")) as ([peer], _):
        assert PeerSystem(peer, "speculative").run([[1]], 8, 0.0, 0).tokens == ((301,),)


def test_a_peer_that_fails_says_why_and_can_go_on(stand_in: Path) -> None:
    with start_peers(["mlx-dspark"], PeerSetup("f")) as ([peer], _):
        system = PeerSystem(peer, "plain")
        with pytest.raises(PeerError, match="RuntimeError: no memory"):
            system.run([[14]], 8, 0.0, 0)
        assert system.run([[1]], 8, 0.0, 0).tokens == ((101,),)
        with pytest.raises(PeerError, match="ended without an answer: it fell over"):
            system.run([[13]], 8, 0.0, 0)


def test_a_peer_that_cannot_load_is_named_and_left_out(stand_in: Path) -> None:
    with start_peers(["mlx-dspark"], PeerSetup("broken")) as (peers, absent):
        assert peers == []
        assert absent == ["not compared: mlx-dspark: ValueError: no such folder"]


def test_an_absent_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with start_peers(["mlx-dspark", "mlx-lm"], PeerSetup("f")) as (peers, absent):
        assert peers == []
        assert absent == [
            "not compared: mlx-dspark is not installed here (pip install mlx-dspark)",
            "not compared: mlx-lm is not installed here (pip install mlx-lm)",
        ]


def test_an_unknown_peer_is_refused() -> None:
    with pytest.raises(UsageError, match="no peer named 'vllm'"):
        check_peer_names(["vllm"])


def test_mlx_lm_itself_writes_what_it_writes_here(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    setup = PeerSetup(str(folder), draft_model=str(folder), dtype="float32")
    jobs = [
        asdict(setup),
        {"mode": "plain", "ids": [5, 6, 7, 8], "max_tokens": 6, "temperature": 0.0},
        {"mode": "speculative", "ids": [5, 6, 7, 8], "max_tokens": 6, "temperature": 0.0},
    ]
    answers = StringIO()
    serve("mlx-lm", StringIO("".join(json.dumps(job) + "\n" for job in jobs)), answers)
    hello, plain, speculative = map(json.loads, answers.getvalue().splitlines())
    assert hello["modes"] == ["plain", "speculative"] and hello["version"].startswith("0.32")
    assert plain["tokens"] == speculative["tokens"] and 0 < len(plain["tokens"]) <= 6
    assert plain["seconds"] > 0 and plain["first_token_seconds"] > 0


def test_a_peer_process_can_import_us_from_anywhere() -> None:
    path = import_environment()["PYTHONPATH"].split(":")[0]
    assert (Path(path) / "dspark_mlx" / "bench" / "peers.py").exists()
