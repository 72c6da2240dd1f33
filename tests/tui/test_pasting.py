"""Pastes are taken out of the terminal's input whole, wherever reads cut it."""

from __future__ import annotations

import pytest

from tui.textual_patches.pasting import Pastes

INPUT = "a\x1b[200~one \x1b[31m\r\x1b\x1b[A two\x1b[201~b\x1b[A\x1b[200~\x1b[201~c\x1b"


def pieces(*reads: str) -> list[tuple[bool, str]]:
    """What came out: keys joined, as the parser takes them one by one anyway."""
    pastes, found = Pastes(), []
    for read in reads:
        found += pastes.feed(read)
    found += pastes.flush()
    joined: list[tuple[bool, str]] = []
    for pasted, text in found:
        if joined and not pasted and not joined[-1][0]:
            joined[-1] = (False, joined[-1][1] + text)
        else:
            joined.append((pasted, text))
    return joined


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 100])
def test_a_paste_is_one_text_and_its_escape_codes_are_no_keys(size: int) -> None:
    reads = [INPUT[at : at + size] for at in range(0, len(INPUT), size)]
    assert pieces(*reads) == [
        (False, "a"),
        (True, "one \x1b[31m\r\x1b\x1b[A two"),
        (False, "b\x1b[A"),
        (True, ""),
        (False, "c\x1b"),
    ]


def test_a_paste_that_is_never_closed_is_given_as_far_as_it_came() -> None:
    pastes = Pastes()
    assert list(pastes.feed("\x1b[200~some\r\x1b[20")) == []
    assert pastes.inside
    assert list(pastes.flush()) == []
    assert list(pastes.close()) == [(True, "some\r\x1b[20")]
    assert list(pastes.feed("x")) == [(False, "x")]


def test_a_key_that_begins_like_a_mark_is_only_held_for_a_moment() -> None:
    pastes = Pastes()
    assert list(pastes.feed("\x1b")) == []
    assert list(pastes.flush()) == [(False, "\x1b")]


def test_two_thousand_lines_are_one_piece() -> None:
    text = "a line of a paste\r\n" * 2000
    whole = f"\x1b[200~{text}\x1b[201~"
    assert pieces(*(whole[at : at + 4096] for at in range(0, len(whole), 4096))) == [(True, text)]
