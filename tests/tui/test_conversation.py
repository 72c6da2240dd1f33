from __future__ import annotations

import json

import pytest
from scripted import finished, step

from dspark_mlx.events import Prefill, Queued
from tui import export
from tui.conversation import Conversation, stats_line
from tui.settings import Settings


def replied(text: str = "Hello", **end: object) -> Conversation:
    chat = Conversation(system="Be brief.")
    chat.ask("Hi [there]")
    chat.request("r", Settings())
    chat.apply(step("r", [text]))
    chat.apply(finished("r", **end))
    return chat


def test_history_repeats_the_assistant_exactly_thoughts_included() -> None:
    raw = "<think>\nhm\n</think>\n\nYes \x1b[31m!\n"
    chat = replied(raw)
    chat.ask("And?")
    turns = chat.history()
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "user"]
    assert turns[2]["content"] == raw


def test_the_tail_of_a_finished_reply_is_part_of_its_text() -> None:
    assert replied("Hel", tail="lo").messages[-1].text == "Hello"


@pytest.mark.parametrize(
    ("reason", "state"),
    [("stop", "done"), ("length", "length"), ("cancelled", "stopped"), ("error", "error")],
)
def test_how_a_reply_ended_is_kept(reason: str, state: str) -> None:
    chat = replied(reason=reason, message="out of memory", hint="close programs")
    assert chat.messages[-1].state == state and chat.active is None
    assert (chat.messages[-1].note == "out of memory (close programs)") is (state == "error")


def test_waiting_says_what_the_engine_does_before_the_first_token() -> None:
    chat = Conversation()
    chat.ask("x")
    chat.request("r", Settings())
    chat.apply(Queued("r", 2))
    assert chat.waiting == "queued behind 2"
    chat.apply(Prefill("r", 512, 2048, 0))
    assert chat.waiting == "reading the prompt, 512 of 2,048 tokens"
    chat.apply(step("r", ["a"]))
    assert chat.waiting == ""


def test_events_of_other_requests_change_nothing() -> None:
    chat = Conversation()
    chat.ask("x")
    chat.request("r", Settings())
    assert not chat.apply(step("other", ["a"])) and not chat.apply(finished("other"))
    assert chat.active == "r" and chat.messages[-1].text == ""


def test_settings_reach_the_request() -> None:
    chat = Conversation()
    chat.ask("x")
    wanted = Settings(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, seed=3, max_tokens=9,
                      method="lookup", thinking="off", draft_length=2, p_min=0.2)  # fmt: skip
    request = chat.request("r", wanted)
    assert request.sampling.temperature == 0.7 and request.sampling.seed == 3
    assert (request.max_tokens, request.method, request.thinking) == (9, "lookup", False)
    assert request.cuts.draft_length == 2 and request.cuts.p_min == 0.2


def test_figures_of_a_reply_fit_one_line() -> None:
    line = stats_line(replied().messages[-1].stats)
    assert "5 tokens" in line and "5.0/s" in line and "40% accepted" in line
    assert stats_line({}) == ""


def test_export_has_every_turn_in_both_forms(tmp_path) -> None:
    chat = replied("Hello \x1b[31mred\x1b[0m")
    path = export.save(chat, tmp_path, "md")
    text = path.read_text()
    assert "Be brief." in text and "Hi [there]" in text and "Hello red" in text
    again = export.save(chat, tmp_path, "md")
    assert again != path, "an export never overwrites another"
    data = json.loads(export.save(chat, tmp_path, "json").read_text())
    assert [m["content"] for m in data["messages"]] == ["Hi [there]", "Hello \x1b[31mred\x1b[0m"]
    assert data["messages"][1]["stats"]["tokens"] == 5
