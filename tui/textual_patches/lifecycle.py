"""An app that is told of its end in time, and whose crash prints no traceback."""

from __future__ import annotations

import traceback

from textual.app import App

from .. import textual_patches


class LifecycleApp(App[None]):
    """Calls ``before_shutdown`` while all widgets are still there, and ``crashed`` on a fault.

    Without this patch neither is called, and Textual prints the traceback.
    """

    def before_shutdown(self) -> None:
        pass

    def crashed(self, report: str) -> None:
        """``report`` is the traceback."""

    async def _shutdown(self) -> None:
        if textual_patches.enabled:
            self.before_shutdown()
        await super()._shutdown()

    def _fatal_error(self) -> None:
        close = getattr(self, "_close_messages_no_wait", None)
        if not textual_patches.enabled or close is None:
            super()._fatal_error()
            return
        self.crashed(traceback.format_exc())
        close()
