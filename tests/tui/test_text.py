from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tui.display_text import (
    Cleaner,
    clean,
    code_blocks,
    count,
    one_line,
    size,
    split_thinking,
)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07x", "x"),
        ("\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("a\x1bPq#0\x1b\\b", "ab"),
        ("\x9b31mx", "x"),
        ("a\rb\r\nc\x85d\u2028e", "a\nb\nc\nd\ne"),
        ("bell\x07 back\x08 null\x00", "bell back null"),
        ("tab\tnew\nline", "tab\tnew\nline"),
        ("\u202eevil\u2066", "evil"),
        ("\ud83d", "\ufffd"),
        ("👩‍👩‍👧 שלום 你好 [b]x[/b]", "👩‍👩‍👧 שלום 你好 [b]x[/b]"),
    ],
)
def test_control_codes_never_reach_the_terminal(raw: str, shown: str) -> None:
    assert clean(raw) == shown


@given(st.text(alphabet=st.characters(codec="utf-8")), st.integers(1, 5))
def test_a_stream_is_cleaned_of_every_escape_however_it_is_cut(text: str, step: int) -> None:
    cleaner = Cleaner()
    shown = "".join(cleaner.feed(text[i : i + step]) for i in range(0, len(text), step))
    shown += cleaner.end()
    assert "\x1b" not in shown and "\x9b" not in shown


def test_an_escape_split_over_tokens_is_still_caught() -> None:
    cleaner = Cleaner()
    assert "".join(map(cleaner.feed, ["a\x1b", "[3", "1m", "b", "\r", "\nc"])) == "ab\nc"


def test_a_thought_is_split_off_only_at_the_start() -> None:
    parts = split_thinking("<think>\nhm\n</think>\n\nAnswer")
    assert (parts.thinking, parts.answer, parts.thinking_open) == ("hm", "Answer", False)
    assert split_thinking("<think>\nstill").thinking_open
    quoted = "Use the `<think>` tag and </think> as you like"
    assert split_thinking(quoted).answer == quoted
    assert split_thinking(quoted, expected=True).answer == quoted


def test_a_thought_opened_by_the_template_ends_at_its_tag() -> None:
    parts = split_thinking("hm hm\n</think>\n\nAnswer", expected=True)
    assert (parts.thinking, parts.answer) == ("hm hm", "Answer")
    assert split_thinking("hm hm\n</think>\n\nAnswer").thinking == ""
    pair = "Tags:\n```\n<think>\n</think>\n```\n"
    assert split_thinking(pair, expected=True).answer == pair


def test_code_blocks_are_found_in_order_also_unfinished_ones() -> None:
    text = "a\n```py\nx = 1\n```\nb\n~~~\ny\n~~~\n```sh\nls"
    assert code_blocks(text) == ["x = 1", "y", "ls"]
    assert code_blocks("no code, `inline` only") == []


def test_figures_are_short_and_have_units() -> None:
    assert [size(v) for v in (12, 98_351_102, 4.27e9)] == ["12 B", "98.4 MB", "4.3 GB"]
    assert [count(v) for v in (812, 1234, 128_000)] == ["812", "1.2k", "128k"]
    assert one_line("a\n b" + "c" * 100, 10) == "a bcccccc…"
