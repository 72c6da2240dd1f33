"""Events: frozen plain values that survive JSON, also across versions."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from typing import Any

import pytest
from decoding import ScriptProposer, make_engine, plain_text, request, toy_target
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import prompt

from dspark_mlx.events import KINDS, Finished, Prefill, StepDone, Token, from_json, to_json

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


def value_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of an annotated type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{name: value_of(hint) for name, hint in hints.items()})
    if origin is tuple:
        return st.lists(value_of(args[0]), max_size=3).map(tuple)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(
            *(st.none() if a is type(None) else value_of(a) for a in args),
        )
    return {
        int: st.integers(-(2**63), 2**63),
        float: NUMBERS,
        str: st.text(),
        bool: st.booleans(),
    }[kind]


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_every_event_survives_json(name: str, data: st.DataObject) -> None:
    event = data.draw(value_of(KINDS[name]))
    line = to_json(event)
    assert "\n" not in line and json.loads(line)["event"] == name
    assert from_json(line) == event
    assert type(from_json(line)) is KINDS[name]


@pytest.mark.parametrize("name", KINDS)
def test_events_are_frozen_and_plain(name: str) -> None:
    kind = KINDS[name]
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    for hint in typing.get_type_hints(kind).values():
        value_of(hint)  # raises KeyError for a type that is not plain


def test_numbers_that_json_has_no_word_for_become_null() -> None:
    engine = make_engine(toy_target("llama"))
    engine.submit(request(max_tokens=1))
    step = next(e for e in engine.step() if isinstance(e, StepDone))
    odd = dataclasses.replace(step, tps=math.inf, predicted_tps=math.nan)
    line = to_json(odd)
    assert json.loads(line)["tps"] is None
    again = from_json(line)
    assert isinstance(again, StepDone)
    assert math.isnan(again.tps) and again.predicted_tps is None


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "null",
        "7",
        '"StepDone"',
        "{}",
        '{"event": "Nonsense"}',
        '{"event": 5}',
        '{"event": "Token", "id": 1}',
        '{"event": "Prefill", "request_id": "a"}',
        '{"event": "Finished"}',
        '{"event": "Prefill", "request_id": "a", "done": 1, "total": 2, "reused": []',
        '{"event": "StepDone", "step": 1, "rows": 7}',
        '{"event": ["Prefill"]}',
    ],
)
def test_lines_that_are_no_events_are_refused(line: str) -> None:
    with pytest.raises(ValueError):
        from_json(line)


def test_unknown_fields_of_a_newer_writer_are_ignored_and_missing_defaults_filled() -> None:
    line = json.loads(to_json(Prefill("a", 1, 2, 0)))
    assert from_json(json.dumps({**line, "new": {"deep": [1]}})) == Prefill("a", 1, 2, 0)
    token = Token(5, "x", "draft")
    assert (token.confidence, token.survival) == (None, None)


def test_a_run_tells_its_story_in_order() -> None:
    """Queued, prefill to its end, rounds without a gap, one ending; all of it survives JSON."""
    own = plain_text("llama", tuple(prompt(12)), 24)
    engine = make_engine(
        toy_target("llama"), [ScriptProposer([[*prompt(12), *own]], 4, 0.3)], prefill_chunk=4
    )
    engine.submit(request(max_tokens=24, ignore_eos=True))
    events = []
    while engine.active:
        events += engine.step()
    assert [from_json(to_json(e)) for e in events] == events
    kinds = [type(e).__name__ for e in events]
    assert kinds[:4] == ["Queued", "Prefill", "Prefill", "Prefill"]
    assert set(kinds[4:-1]) == {"StepDone"} and kinds[-1] == "Finished"
    steps = [e for e in events if isinstance(e, StepDone)]
    assert [e.step for e in steps] == list(range(1, len(steps) + 1))
    position = 12
    for step in steps:
        (row,) = step.rows
        assert row.position == position
        position += len(row.tokens)
        assert row.survival == pytest.approx(
            [math.prod(row.confidence[: k + 1]) for k in range(len(row.confidence))]
        )
        assert step.memory.kv > 0 and step.memory.weights > 0
        assert step.load.active in (0, 1) and step.policy == "fixed"
    done = events[-1]
    assert isinstance(done, Finished) and position == 12 + done.generation_tokens
    verified = [row.scheduled for step in steps for row in step.rows]
    assert done.reached == tuple(sum(v > k for v in verified) for k in range(max(verified)))
    stood = [row.accepted for step in steps for row in step.rows]
    assert done.survived == tuple(sum(a > k for a in stood) for k in range(max(verified)))
