"""What goes to the disk by itself: a reply while it grows, and drafts.

Keeps only what has changed since the last look, so that an idle chat writes
nothing. A finished reply and a user's turn are saved at once, by those who know.
"""

from __future__ import annotations

from collections.abc import Iterable

from .conversation import Conversation, Message
from .sessions import SessionStore


class Autosave:
    """``save`` is called once a second; ``edited`` and ``finished`` say what happened between."""

    def __init__(self) -> None:
        self._dirty: set[int] = set()  # ids of conversations with an unsaved draft
        self._saved: dict[int, int] = {}  # message row: characters on disk

    def edited(self, conversation: Conversation) -> None:
        """The conversation's draft changed."""
        self._dirty.add(id(conversation))

    def finished(self, store: SessionStore, message: Message) -> None:
        """A reply has ended: all of it is written, with its figures."""
        self._saved.pop(message.row or 0, None)
        store.later(store.update, message)

    def save(
        self, store: SessionStore, conversations: Iterable[Conversation], model_name: str
    ) -> None:
        """Write what the replies have grown by, and the drafts that changed."""
        for conversation in conversations:
            reply = conversation.reply
            row = reply.row if reply is not None and reply.streaming else None
            if reply is not None and row and len(reply.text) != self._saved.get(row, 0):
                self._saved[row] = len(reply.text)
                store.later(store.update_text, row, reply.text)
            if id(conversation) in self._dirty:
                if conversation.session is not None:
                    store.later(store.save_draft, conversation.session, conversation.draft)
                elif conversation.draft.strip():
                    store.save(conversation, model_name)
        self._dirty.clear()
