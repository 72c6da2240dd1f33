"""A turn of a conversation: asked, saved, submitted; written again, or dropped and asked anew.

The order matters and is kept here: a user's turn is on the disk before
anything is generated from it.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from dspark_mlx.errors import DsparkError

from .widgets.pane import Pane

if TYPE_CHECKING:
    from .app import ChatApp


class Turns:
    """Takes turns in the panes of ``app``'s chat."""

    def __init__(self, app: ChatApp) -> None:
        self._app = app

    async def ask(self, pane: Pane, text: str) -> None:
        """The user's turn, and a reply to it."""
        conversation = pane.conversation
        conversation.ask(text)
        conversation.draft = ""
        self._app.inputs.append(text)
        await self._generate(pane)

    async def resend(self, pane: Pane, text: str) -> None:
        """The user's turn in place of the one being edited, if any, and of all that followed."""
        if pane.editing is not None:
            position, pane.editing = pane.editing, None
            self._drop(pane, position)
        pane.prompt.put("")
        await self.ask(pane, text)

    async def regenerate(self, pane: Pane, position: int) -> None:
        """Write the reply at ``position`` again; what came after it goes."""
        conversation = pane.conversation
        if conversation.active or position < 0:
            return
        if conversation.messages[position].role == "assistant":
            self._drop(pane, position)
        if conversation.messages:
            await self._generate(pane)

    async def _generate(self, pane: Pane) -> None:
        """Save, then submit: the turn is on disk before anything is generated."""
        conversation, app = pane.conversation, self._app
        try:
            request = conversation.request(f"c{secrets.token_hex(4)}", app.settings)
        except DsparkError as error:
            app.notify(str(error), severity="error", markup=False)
            await pane.sync()
            return
        app.save(conversation)
        app.live.request(request.id).title = conversation.name
        app.engine.submit(request)  # before anything is awaited: Esc must find it submitted
        await pane.sync()
        pane.to_end()
        pane.follow()
        app.chat.tell()

    def _drop(self, pane: Pane, position: int) -> None:
        self._app.store.forget(pane.conversation.truncate(position))
