"""One conversation: its messages, and how engine events turn into text.

Pure: no Textual, no database. The assistant's text is kept exactly as it was produced, thoughts
included: the next prompt must repeat it, so that the engine can reuse its cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dspark_mlx.events import Event, Finished, Prefill, Queued, StepDone
from dspark_mlx.request import Request

from .display_text import one_line
from .settings import Settings

Role = Literal["user", "assistant"]
# streaming: being written; interrupted: was streaming when the program ended.
State = Literal["done", "streaming", "stopped", "length", "error", "interrupted"]
Span = tuple[str, str, float | None]  # text, origin ("draft", "target"), confidence
_STATES: dict[str, State] = {
    "stop": "done",
    "length": "length",
    "cancelled": "stopped",
    "error": "error",
}
_FIGURES = (
    *("prompt_tokens", "reused_tokens", "first_token_seconds"),
    *("rounds", "scheduled", "accepted", "method", "seed"),
)


@dataclass(slots=True)
class ChatMessage:
    """One turn. ``text`` is raw; ``spans`` are its tokens, if known; ``note`` explains an error."""

    role: Role
    text: str = ""
    state: State = "done"
    note: str = ""
    stats: dict[str, Any] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    expects_thinking: bool = False
    row: int | None = None  # in the database
    saved_length: int = 0  # characters of a growing reply that are in the database

    @property
    def streaming(self) -> bool:
        return self.state == "streaming"


@dataclass(slots=True)
class Conversation:
    """``active`` is the id of the request that writes the last message, if any."""

    session: int | None = None
    title: str = ""
    system: str = ""
    draft: str = ""
    messages: list[ChatMessage] = field(default_factory=list)
    active: str | None = None
    waiting: str = ""  # what the engine does before the first token
    saved_draft: str = ""  # the draft as it is in the database

    @property
    def name(self) -> str:
        return self.title or "New chat"

    @property
    def reply(self) -> ChatMessage | None:
        """The assistant's last message."""
        last = self.messages[-1] if self.messages else None
        return last if last and last.role == "assistant" else None

    def ask(self, text: str) -> ChatMessage:
        message = ChatMessage("user", text)
        self.messages.append(message)
        if not self.title:
            self.title = one_line(text, 48)
        return message

    def history(self) -> tuple[Mapping[str, str], ...]:
        """The turns to send, without replies that have no text."""
        turns: list[Mapping[str, str]] = []
        if self.system.strip():
            turns.append({"role": "system", "content": self.system})
        for message in self.messages:
            if message.role == "assistant" and not message.text:
                continue
            turns.append({"role": message.role, "content": message.text})
        return tuple(turns)

    def request(self, request_id: str, settings: Settings) -> Request:
        """The request for a reply to the last turn; also opens the message it will fill."""
        request = Request(
            id=request_id,
            messages=self.history(),
            max_tokens=settings.max_tokens,
            sampling=settings.sampling(),
            cuts=settings.cuts(),
            method=settings.method,  # type: ignore[arg-type]
            thinking=settings.think,
        )
        self.open_reply(request_id, settings.think is not False)
        return request

    def open_reply(self, request_id: str, expects_thinking: bool = False) -> ChatMessage:
        message = ChatMessage("assistant", state="streaming", expects_thinking=expects_thinking)
        self.messages.append(message)
        self.active, self.waiting = request_id, "waiting for the engine"
        return message

    def truncate(self, position: int) -> list[ChatMessage]:
        """Drop the messages from ``position`` on; returns them."""
        dropped = self.messages[position:]
        del self.messages[position:]
        return dropped

    def apply(self, event: Event) -> bool:
        """Take in an event of this conversation's request; returns whether anything changed."""
        message = self.reply
        if self.active is None or message is None:
            return False
        match event:
            case Queued(request_id, ahead) if request_id == self.active:
                self.waiting = f"queued behind {ahead}" if ahead else "reading the prompt"
            case Prefill(request_id, done, total, _) if request_id == self.active:
                self.waiting = f"reading the prompt, {done:,} of {total:,} tokens"
            case StepDone():
                rows = [row for row in event.rows if row.request_id == self.active]
                for row in rows:
                    self.waiting = ""
                    for token in row.tokens:
                        message.text += token.text
                        message.spans.append((token.text, token.origin, token.confidence))
                return bool(rows)
            case Finished() if event.request_id == self.active:
                self._finish(message, event)
            case _:
                return False
        return True

    def abandon(self) -> None:
        """End the reply without waiting for its Finished; what was written stays."""
        if self.active and self.reply:
            self.reply.state = "stopped"
        self.active, self.waiting = None, ""

    def _finish(self, message: ChatMessage, event: Finished) -> None:
        if event.tail:
            message.text += event.tail
            message.spans.append((event.tail, "target", None))
        message.state = _STATES[event.reason]
        if event.reason == "error":
            message.note = f"{event.message} ({event.hint})" if event.hint else event.message
        message.stats = {name: getattr(event, name) for name in _FIGURES} | {
            "tokens": event.generation_tokens,
            "seconds": event.generation_seconds,
        }
        self.active, self.waiting = None, ""


def stats_line(stats: Mapping[str, Any]) -> str:
    """One line of figures about a finished reply, as short as it can be."""
    if not stats.get("tokens"):
        return ""
    parts = [f"{stats['tokens']} tokens"]
    if stats.get("seconds"):
        parts.append(f"{stats['tokens'] / stats['seconds']:.1f}/s")
    if stats.get("first_token_seconds"):
        parts.append(f"first after {stats['first_token_seconds']:.2f} s")
    if stats.get("scheduled"):
        parts.append(f"{100 * stats['accepted'] / stats['scheduled']:.0f}% accepted")
    if stats.get("rounds"):
        parts.append(f"{stats['tokens'] / stats['rounds']:.2f} a round")
    if stats.get("method"):
        parts.append(str(stats["method"]))
    return " · ".join(parts)
