"""The target's own answers: whole, resumable, turn by turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toys import EOS, ToyTokenizer, plain_greedy
from training_toys import chain_model, model_config

from dspark_mlx.commands.rollout import answer
from dspark_mlx.engine import Engine
from dspark_mlx.events import Finished
from dspark_mlx.schedule import Off
from dspark_mlx.target import Target
from dspark_mlx.training.data import Record, parse


def engine_of(model: Any) -> Engine:
    return Engine(Target(model, model_config(model)), ToyTokenizer(), [], Off(), max_rows=3)


def records(count: int, turns: int = 1) -> list[Record]:
    return [
        parse(json.dumps({"turns": [f"q{i} {t}" for t in range(turns)], "domain": "x"}), "x:1")
        for i in range(count)
    ]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_the_targets_own(tmp_path: Path) -> None:
    model, out = chain_model(), tmp_path / "a.jsonl"
    made = answer(engine_of(model), records(5), out, temperatures=(0.0,), max_tokens=12)
    rows = rows_of(out)
    assert len(rows) == 5 and made >= sum(len(r["response_tokens"]) for r in rows) - 5
    tokenizer = ToyTokenizer()
    for row in rows:
        ids = tokenizer.apply_chat_template(row["messages"])
        wanted = plain_greedy(model, ids, 12)
        if EOS in wanted:
            wanted = wanted[: wanted.index(EOS) + 1]
        assert row["response_tokens"] == wanted
        assert row["response"] == tokenizer.decode([t for t in wanted if t != EOS])
        assert (row["domain"], row["temperature"]) == ("x", 0.0)


def test_temperatures_take_turns(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    answer(engine_of(chain_model()), records(4), out, temperatures=(0.0, 1.0), max_tokens=4)
    assert sorted(r["temperature"] for r in rows_of(out)) == [0.0, 0.0, 1.0, 1.0]


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    model, whole, broken = chain_model(), tmp_path / "w.jsonl", tmp_path / "b.jsonl"
    options: dict[str, Any] = {"temperatures": (0.0, 0.7), "max_tokens": 8}
    answer(engine_of(model), records(6), whole, **options)
    lines = sorted(whole.read_text().splitlines())
    broken.write_text("\n".join(whole.read_text().splitlines()[:2]) + '\n{"messages": [{"ro')
    said: list[str] = []
    answer(engine_of(model), records(6), broken, say=said.append, **options)
    assert sorted(broken.read_text().splitlines()) == lines
    assert any("2 of 6 prompts are answered" in line for line in said)


def test_later_turns_see_the_answers_before_them(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    engine = engine_of(chain_model())
    steps = engine.step

    def stopping() -> list[Any]:  # the chain itself may never end a reply
        return [
            Finished(**{**vars_of(e), "reason": "stop"}) if isinstance(e, Finished) else e
            for e in steps()
        ]

    engine.step = stopping  # type: ignore[method-assign]
    answer(engine, records(2, turns=3), out, temperatures=(0.0,), max_tokens=5)
    rows = rows_of(out)
    assert len(rows) == 6
    longest = [r for r in rows if r["last"]]
    assert len(longest) == 2
    for row in longest:
        roles = [m["role"] for m in row["messages"]]
        assert roles == ["user", "assistant", "user", "assistant", "user"]
        assert row["response_tokens"][-1] == EOS
        first = next(r for r in rows if r["messages"] == row["messages"][:1])
        assert row["messages"][1]["content"] == first["response"]


def vars_of(event: Finished) -> dict[str, Any]:
    return {name: getattr(event, name) for name in Finished.__dataclass_fields__}
