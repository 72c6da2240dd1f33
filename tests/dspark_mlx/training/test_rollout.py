"""The target's own answers: whole, resumable, turn by turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlx.utils import tree_map
from toys import EOS, ToyTokenizer, plain_greedy
from training_toys import chain_model, model_config

from dspark_mlx.engine.engine import Engine
from dspark_mlx.errors import UsageError
from dspark_mlx.events import Finished
from dspark_mlx.model.target import Target
from dspark_mlx.schedule import Off
from dspark_mlx.training.data import Record, parse
from dspark_mlx.training.rollout import answer


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
    engine = stopping_engine(chain_model())
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


def stopping_engine(model: Any) -> Engine:
    """Every reply ends as if it had said all: the chain itself may never end one."""
    engine = engine_of(model)
    steps = engine.step

    def stopping() -> list[Any]:
        return [
            Finished(**{**vars_of(e), "reason": "stop"}) if isinstance(e, Finished) else e
            for e in steps()
        ]

    engine.step = stopping  # type: ignore[method-assign]
    return engine


def vars_of(event: Finished) -> dict[str, Any]:
    return {name: getattr(event, name) for name in Finished.__dataclass_fields__}


def test_the_same_prompt_twice_is_answered_once_and_another_system_prompt_apart(
    tmp_path: Path,
) -> None:
    out = tmp_path / "a.jsonl"
    systems = [
        parse(
            json.dumps(
                {"messages": [{"role": "system", "content": s}, {"role": "user", "content": "hi"}]}
            ),
            "x:1",
        )
        for s in ("one", "two", "one")
    ]
    asked = [*records(1), *records(1), *systems]
    for _ in range(2):  # the second time all is there
        answer(engine_of(chain_model()), asked, out, temperatures=(0.0,), max_tokens=4)
        said = [[m["content"] for m in row["messages"]] for row in rows_of(out)]
        assert sorted(said) == [["one", "hi"], ["q0 0"], ["two", "hi"]]


def test_a_prompt_that_does_not_fit_is_left_out_by_name(tmp_path: Path) -> None:
    out, said = tmp_path / "a.jsonl", list[str]()
    engine = engine_of(chain_model())
    engine.prefiller.context_limit = 60
    long = parse(json.dumps({"prompt": "word " * 50}), "x:1")
    answer(engine, [long, *records(2)], out, temperatures=(0.0,), max_tokens=4, say=said.append)
    assert len(rows_of(out)) == 2
    assert any("left out the prompt 'word word" in line and "context" in line for line in said)


def test_a_later_turn_that_does_not_fit_ends_its_conversation(tmp_path: Path) -> None:
    out, said = tmp_path / "a.jsonl", list[str]()
    talk = parse(json.dumps({"turns": ["hello", "word " * 50]}), "x:1")
    for _ in range(2):
        engine = stopping_engine(chain_model())
        engine.prefiller.context_limit = 60
        answer(engine, [talk], out, temperatures=(0.0,), max_tokens=4, say=said.append)
        (row,) = rows_of(out)
        assert row["last"]
    assert any("left out the prompt 'hello'" in line for line in said)
    assert "1 of 1 prompts are answered already" in said


def test_a_conversation_broken_off_is_not_written_twice(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    options: dict[str, Any] = {"temperatures": (0.0,), "max_tokens": 5}
    answer(stopping_engine(chain_model()), records(1, turns=3), out, **options)
    whole = out.read_text()
    out.write_text("".join(whole.splitlines(keepends=True)[:2]))
    answer(stopping_engine(chain_model()), records(1, turns=3), out, **options)
    assert out.read_text() == whole


@pytest.mark.parametrize("line", [b"{half", b"[1]", b"\0\0\0", b"\xff\xfe"])
def test_damaged_answers_are_named_by_their_line(tmp_path: Path, line: bytes) -> None:
    out = tmp_path / "a.jsonl"
    options: dict[str, Any] = {"temperatures": (0.0,), "max_tokens": 4}
    answer(engine_of(chain_model()), records(1), out, **options)
    before = out.read_bytes()
    out.write_bytes(before + line + b"\n" + before)
    with pytest.raises(UsageError, match=r"a\.jsonl:2 "):
        answer(engine_of(chain_model()), records(2), out, **options)


def test_answers_of_another_model_are_refused(tmp_path: Path) -> None:
    out, other = tmp_path / "a.jsonl", chain_model()
    other.update(tree_map(lambda v: v * 1.01, other.parameters()))
    options: dict[str, Any] = {"temperatures": (0.0,), "max_tokens": 4}
    answer(engine_of(chain_model()), records(1), out, **options)
    with pytest.raises(UsageError, match="another model"):
        answer(engine_of(other), records(2), out, **options)
