"""Numbers on a command line: what is none, or out of range, is said in plain words."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A whole number, 0 or more."""
    return _whole(text, 0)


def positive(text: str) -> int:
    """A whole number, 1 or more."""
    return _whole(text, 1)


def temperatures(text: str) -> tuple[float, ...]:
    """A list like ``0,0.7``."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like 0,0.7") from None
    if not all(0 <= value < 100 for value in values):
        raise argparse.ArgumentTypeError("temperatures are from 0 to 100")
    return values


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, {least} or more")
    return value
