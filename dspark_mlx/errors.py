"""The errors a user can cause or meet; each prints as one clear line.

Commands turn any ``DsparkError`` into that line on stderr and exit code 2; a
traceback therefore always means a fault of ours.
"""

from __future__ import annotations


class DsparkError(Exception):
    """``message`` says what is wrong; ``hint`` says what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(DsparkError, ValueError):
    """An argument out of range or a combination that cannot be honoured."""


class ModelError(DsparkError):
    """A model that is missing, broken or of a kind that is not supported."""


class DownloadError(ModelError):
    """A model source that cannot be reached, is gated, or does not match its pin."""


class PairingError(ModelError):
    """A drafter that does not fit the target (taps, vocabulary, shapes, block)."""


class CacheError(ModelError):
    """A KV cache that cannot be rolled back, or no memory left for one."""
