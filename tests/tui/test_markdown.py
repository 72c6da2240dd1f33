"""Markdown that grows: nothing is lost, long lines are cut apart, waiting is not charged."""

from __future__ import annotations

import asyncio

import pytest

from tui.widgets.markdown import _LONG, Block, GrowingMarkdown


async def shown(chat, pieces: list[str]) -> list[str]:
    """The sources of the blocks after ``pieces`` were fed."""
    async with chat() as c:
        body = GrowingMarkdown()
        await c.app.chat.query_one("#panes").mount(body)
        for piece in pieces:
            body.feed(piece)
        await body.settle()
        return [block.source for block in body.query_children(Block)]


@pytest.mark.parametrize("cut", [1000, 7000, 100_000])
async def test_a_line_of_any_length_is_shown_whole_in_parts_laid_out_together(chat, cut) -> None:
    text = "".join(chr(97 + n % 26) for n in range(100_000))
    blocks = await shown(chat, [text[at : at + cut] for at in range(0, len(text), cut)])
    assert "".join(blocks) == text
    assert max(len(block) for block in blocks) <= 3 * _LONG


async def test_text_with_line_ends_stays_one_piece_of_markdown(chat) -> None:
    lines = "a line of text that is not long\n" * 1000
    assert await shown(chat, [lines, "\n```\n", "x" * 3 * _LONG, "\n```\n"]) == [
        lines + "\n```\n" + "x" * 3 * _LONG + "\n```\n"
    ]


async def test_settling_waits_for_text_fed_before_the_widget_was_up(chat) -> None:
    async with chat() as c:
        body = GrowingMarkdown("early")
        c.app.chat.query_one("#panes").mount(body)
        await body.settle()
        assert [block.source for block in body.query_children(Block)] == ["early"]


async def test_a_wait_for_the_screen_is_not_charged_as_work(chat, monkeypatch) -> None:
    costs: list[float] = []

    async def slow(self) -> None:
        await asyncio.sleep(1.0)

    async def rest(self, cost: float) -> None:
        costs.append(cost)

    monkeypatch.setattr(GrowingMarkdown, "_painted", slow)
    monkeypatch.setattr(GrowingMarkdown, "_rest", rest)
    await shown(chat, ["a word"])
    assert costs and max(costs) < 0.9
